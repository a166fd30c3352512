"""Which Python interpreters this machine can really run, and for which of them a CPU build of torch is within reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def find_interpreter(version: str) -> str | None:
    """The path of a Python `version` ("3.12") that starts, else None.

    A name on PATH proves nothing: pyenv leaves shims for versions that are not switched on. So each candidate is run,
    and pyenv's own folder is looked at too.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [sys.executable, shutil.which(f"python{version}")]
    candidates += sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python")), reverse=True)
    for candidate in filter(None, candidates):
        probe = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
        answer = subprocess.run([candidate, "-c", probe], capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip() == version:
            return candidate
    return None


def has_cpu_torch(version: str) -> bool:
    """Whether torch installs for Python `version` without the CUDA libraries (several gigabytes).

    True for the interpreter of `.venv`, which has a torch already; for others only with a CPU wheel in a find-links
    folder (UV_FIND_LINKS) or a torch backend chosen for uv.
    """
    if version == "{}.{}".format(*sys.version_info[:2]) or os.environ.get("UV_TORCH_BACKEND"):
        return True
    folders = os.environ.get("UV_FIND_LINKS", "").split(",")
    pattern = f"torch-*+cpu-cp{version.replace('.', '')}-*.whl"
    return any(list(Path(folder).glob(pattern)) for folder in folders if folder)
