"""The module that lets torchvision be imported beside a torch without its libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SITE = Path(__file__).parents[2] / "packages" / "rollout" / "site"

FAKE = """
import torch
torch.library.register_fake("torchvision::nms")(lambda dets, scores, threshold: scores)
"""


def run_python(code: str, *paths: Path) -> str:
    """What a fresh interpreter without site-packages' start-up files prints."""
    search = "import sys; sys.path[:0] = " + repr([str(p) for p in paths]) + "\n"
    done = subprocess.run([sys.executable, "-c", search + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def make_torchvision(folder: Path, library: bytes | None) -> Path:
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(FAKE)
    if library is not None:
        (package / "_C.so").write_bytes(library)
    return folder


def test_missing_operators_are_declared_before_the_import(tmp_path: Path) -> None:
    where = make_torchvision(tmp_path, b"no library")
    code = "import _openrlhf_torchvision, torchvision, torch; print(torch.ops.torchvision.nms.default._schema)"
    assert run_python(code, where, SITE).startswith("torchvision::nms(Tensor dets, Tensor scores")


def test_nothing_happens_until_torchvision_is_imported() -> None:
    code = (
        "import _openrlhf_torchvision as m\n"
        "finders = [f for f in sys.meta_path if isinstance(f, m.TorchvisionFinder)]\n"
        "print(finders[0].find_spec('json') is None, 'torch' in sys.modules)"
    )
    assert run_python(code, SITE) == "True False"
