"""What the check of the GPU builds looks at."""

from __future__ import annotations

import check_gpu_set


def test_modules_that_speak_to_gpu_libraries_are_found() -> None:
    names = {path.name for path in check_gpu_set.speaking_modules()}
    assert {"cuda_sender.py", "cuda_engine.py", "gloo_engine.py", "engine.py", "models.py"} <= names
    assert "wire.py" not in names


def test_imports_in_functions_count_and_relative_ones_do_not() -> None:
    source = "import torch.cuda\ndef f():\n    from vllm.config import X\nfrom .vllm import y\n"
    assert check_gpu_set.imported_roots(source) == {"torch", "vllm"}


def test_the_builds_of_the_cpu_set_are_refused(tmp_path) -> None:
    faults = check_gpu_set.wrong_versions(tmp_path)
    assert any("is not installed" in fault or "is imported from" in fault for fault in faults)
