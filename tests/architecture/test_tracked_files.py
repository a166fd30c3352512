"""What no committed file may hold: addresses of registries, paths of one machine, lock files. The README is short."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Character classes keep these patterns from matching themselves.
FORBIDDEN = {
    "registry address": r"py[p]i\.org|python[h]osted\.org|py[t]orch\.org/whl|npm[j]s\.(org|com)|deb\.[d]ebian\.org",
    "path of one machine": r"(?<![\w.])/(w[o]rk|r[o]ot|h[o]me/\w+)/|/(o[p]t)/(wheels|pypi)",
    "local file index": r"find-links *= *[\"']?/|index-url *= *[\"']?\w+:/",
}
README_LINES = 120


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = (ROOT / name for name in listed.splitlines())
    return {str(path.relative_to(ROOT)): path.read_text(errors="ignore") for path in paths if path.is_file()}


@pytest.mark.parametrize("what", sorted(FORBIDDEN))
def test_no_file_holds(texts, what):
    assert [name for name, text in texts.items() if re.search(FORBIDDEN[what], text)] == []


def test_no_lock_file(texts):
    """A lock file of uv names the registry of whoever wrote it; `constraints/` pins instead."""
    assert [name for name in texts if name.endswith(("uv.lock", "poetry.lock"))] == []


def test_readme_is_short_and_starts_with_a_command(texts):
    readme = texts["README.md"]
    assert readme.count("\n") <= README_LINES
    first_block = re.search(r"^```\w*\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert first_block is not None
    assert "make quickstart" in first_block[1]


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "LICENSE", "Makefile", ".ci/run"])
def test_root_file_exists(name):
    assert (ROOT / name).is_file()


def test_ci_script_is_executable():
    listed = subprocess.run(["git", "ls-files", "-s", ".ci/run"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert listed.stdout.startswith("100755")
