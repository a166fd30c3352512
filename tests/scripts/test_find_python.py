"""The shell script that chooses the interpreter for the set-up, with made-up interpreters on PATH."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "find_python.sh"


def interpreter(folder: Path, name: str, version: str, *, venv: bool = True) -> None:
    """A program that answers the script's two questions as a Python of this version would."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncase $2 in *version_info*) echo {version} ;; *venv*) exit {int(not venv)} ;; esac\n")
    path.chmod(0o755)


def find(folder: Path) -> tuple[int, str, str]:
    done = subprocess.run(["/bin/sh", SCRIPT], env={"PATH": str(folder)}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"python3.11": "3.11", "python3.12": "3.12"}, "python3.11"),
        ({"python3.12": "3.12", "python3.13": "3.13"}, "python3.12"),
        ({"python3.13": "3.13"}, "python3.13"),
        ({"python3": "3.12"}, "python3"),
        ({"python3.11": "3.9", "python3": "3.13"}, "python3"),  # a shim that starts another version
    ],
)
def test_l15_the_first_that_is_allowed(tmp_path: Path, there: dict[str, str], chosen: str) -> None:
    for name, version in there.items():
        interpreter(tmp_path, name, version)
    assert find(tmp_path) == (0, str(tmp_path / chosen), "")


def test_l15_one_without_venv_gives_way_to_one_with_it(tmp_path: Path) -> None:
    interpreter(tmp_path, "python3.11", "3.11", venv=False)
    interpreter(tmp_path, "python3.13", "3.13")
    assert find(tmp_path) == (0, str(tmp_path / "python3.13"), "")


def test_l15_what_to_install_is_said(tmp_path: Path) -> None:
    code, _, message = find(tmp_path)
    assert (code, "apt-get install python3 python3-venv" in message) == (1, True)
    interpreter(tmp_path, "python3", "3.14")
    assert "Python 3.11, 3.12 or 3.13 is needed" in find(tmp_path)[2]
    interpreter(tmp_path, "python3.12", "3.12", venv=False)
    assert find(tmp_path)[2] == (
        "set-up: Python 3.12 is here, but not its venv module: apt-get install python3.12-venv\n"
    )
