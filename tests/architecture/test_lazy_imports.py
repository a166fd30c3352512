"""What a start costs: `--help` and the configuration load no machine-learning library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "datasets", "numpy")
CONFIGS = sorted(ROOT.glob("packages/*/src/openrlhf/*/config.py"))
COMMANDS = sorted(path.stem for path in ROOT.glob("packages/launcher/src/openrlhf/cli/[a-z]*.py"))

REPORT = "import sys; print('LOADED', *sorted(sys.modules.keys() & set({names!r})))"
RUN_HELP = """
import runpy, sys
sys.argv = ["prog", "--help"]
try:
    runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
"""


def loaded_by(code: str, names: tuple[str, ...] = HEAVY) -> list[str]:
    """Which of `names` are in sys.modules after running `code` in a new process, outside the checkout."""
    script = code + "\n" + REPORT.format(names=names)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_config_loads_no_library(path):
    assert loaded_by(f"import openrlhf.{path.parent.name}.config") == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_loads_no_library(command):
    assert loaded_by(RUN_HELP.format(module=f"openrlhf.cli.{command}")) == []


def test_agents_load_the_standard_library_only():
    code = "import sys; before = set(sys.modules); import openrlhf.agents, openrlhf.utils"
    strangers = (
        "print('LOADED', *sorted({name.partition('.')[0] for name in set(sys.modules) - before}"
        " - sys.stdlib_module_names - {'openrlhf'}))"
    )
    done = subprocess.run([sys.executable, "-c", f"{code}; {strangers}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["LOADED"]
