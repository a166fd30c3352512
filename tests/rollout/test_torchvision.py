"""What lets torchvision be imported beside a torch without its libraries."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

SITE = Path(__file__).parents[2] / "packages" / "rollout" / "site"

FAKE = """
import torch
torch.library.register_fake("torchvision::nms")(lambda dets, scores, threshold: scores)
"""
BEFORE = """
import torch
torch.version.cuda = {cuda!r}
import _openrlhf_torchvision
"""


def run_python(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter whose torch calls no entry points."""
    search = "import os, sys; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; sys.path[:0] = "
    code = search + repr([str(p) for p in paths]) + "\n" + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def make_torchvision(folder: Path, library: bytes | None) -> Path:
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(FAKE)
    if library is not None:
        (package / "_C.so").write_bytes(library)
    return folder


def test_missing_operators_are_declared_before_the_import(tmp_path: Path) -> None:
    where = make_torchvision(tmp_path, b"no library")
    code = BEFORE.format(cuda=None) + (
        "_openrlhf_torchvision.declare_missing_operators()\n"
        "print('torchvision' in sys.modules)\n"
        "import torchvision; print(torch.ops.torchvision.nms.default._schema)"
    )
    done = run_python(code, where, SITE)
    assert done.stdout.splitlines()[0] == "False", done.stderr
    assert done.stdout.splitlines()[1].startswith("torchvision::nms(Tensor dets, Tensor scores")


def test_beside_a_torch_with_cuda_nothing_is_declared(tmp_path: Path) -> None:
    where = make_torchvision(tmp_path, b"no library")
    code = BEFORE.format(cuda="13.0") + "_openrlhf_torchvision.declare_missing_operators()\nimport torchvision"
    assert "operator torchvision::nms does not exist" in run_python(code, where, SITE).stderr


def test_torch_calls_it_when_it_is_imported() -> None:
    (found,) = (e for e in entry_points(group="torch.backends") if e.name == "openrlhf_torchvision")
    assert found.value == "_openrlhf_torchvision:declare_missing_operators"
    found.load()


def test_a_python_without_torch_has_nothing_of_it() -> None:
    code = "print(any('_openrlhf' in name for name in sys.modules), 'torch' in sys.modules)"
    assert run_python(code).stdout.split() == ["False", "False"]
