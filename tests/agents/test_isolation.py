"""What keeps graded programs apart is tried out, and said."""

import logging
import shutil
import subprocess
import sys

import pytest

from openrlhf.agents.graders.code import run_code
from openrlhf.agents.graders.program import isolation, sandbox

SAY = (
    "from openrlhf.agents.graders.code import isolation, missing_isolation, run_code\n"
    "print(isolation(), run_code('print(1)').stdout.strip(), 'user namespaces' in missing_isolation())"
)


@pytest.fixture(autouse=True)
def _fresh():
    isolation.allowed_isolation.cache_clear()
    yield
    isolation.allowed_isolation.cache_clear()


def test_without_bubblewrap_installed(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "bubblewrap" not in isolation.allowed_isolation()
    if sys.platform == "linux":
        assert isolation.missing_isolation().startswith("install bubblewrap (apt install bubblewrap)")


def test_nothing_is_said_once_and_named_in_the_result(monkeypatch, caplog):
    monkeypatch.setattr(isolation, "_works", lambda kind: False)
    with caplog.at_level(logging.WARNING):
        assert isolation.allowed_isolation() == isolation.allowed_isolation() == ("none",)
    assert [r.message for r in caplog.records if "nothing but limits" in r.message] == [caplog.records[0].message]
    assert isolation.missing_isolation()
    assert run_code("print(1)", limits=sandbox.CodeLimits(seconds=60)).isolation == "none"


def test_a_container_that_forbids_user_namespaces():
    if isolation.isolation() != "bubblewrap":
        pytest.skip(f"this machine allows {isolation.allowed_isolation()} only")
    container = ["bwrap", "--bind", "/", "/", "--dev-bind", "/dev", "/dev", "--unshare-user", "--disable-userns"]
    tried = subprocess.run([*container, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"bwrap cannot forbid them here: {tried.stderr}")
    done = subprocess.run(
        [*container, sys.executable, "-c", SAY], capture_output=True, text=True, timeout=200, check=False
    )
    kind, printed, advised = done.stdout.split()
    assert (kind in ("landlock", "none"), printed, advised) == (True, "1", "True"), done.stderr
