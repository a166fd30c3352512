"""What set-up decides before it installs anything."""

from __future__ import annotations

from pathlib import Path

import pytest

import interpreters
import set_up


@pytest.fixture
def pip_lists(monkeypatch):
    """Let `pip config list` print the given lines."""

    def fake(*lines: str) -> None:
        done = set_up.subprocess.CompletedProcess([], 0, stdout="\n".join(lines))
        monkeypatch.setattr(set_up.subprocess, "run", lambda *_, **__: done)
        for name in ("UV_FIND_LINKS", "UV_DEFAULT_INDEX", "SSL_CERT_FILE"):
            monkeypatch.delenv(name, raising=False)

    return fake


def test_pip_settings_reach_uv(pip_lists):
    pip_lists("global.find-links='a\\nb'", "global.cert='/c.pem'", "global.index-url='//localhost/simple'")
    env = set_up.uv_environment()
    assert env["UV_FIND_LINKS"] == "a,b"
    assert env["SSL_CERT_FILE"] == "/c.pem"
    assert env["UV_DEFAULT_INDEX"] == "//localhost/simple"


def test_environment_variables_of_pip_win(pip_lists):
    pip_lists(":env:.find-links='from-variable'", "global.find-links='from-file'")
    assert set_up.uv_environment()["UV_FIND_LINKS"] == "from-variable"


def test_variables_of_uv_win(pip_lists, monkeypatch):
    pip_lists("global.find-links='from-pip'")
    monkeypatch.setenv("UV_FIND_LINKS", "mine")
    assert set_up.uv_environment()["UV_FIND_LINKS"] == "mine"


def test_nothing_is_invented(pip_lists):
    pip_lists()
    assert not {"UV_FIND_LINKS", "UV_DEFAULT_INDEX", "SSL_CERT_FILE"} & set_up.uv_environment().keys()


@pytest.mark.parametrize(("device", "expected"), [("NVIDIA_DEVICE", "gpu"), ("ROCM_DEVICE", "cpu")])
def test_set_follows_the_device(monkeypatch, tmp_path, device, expected):
    for name in ("NVIDIA_DEVICE", "ROCM_DEVICE"):
        monkeypatch.setattr(set_up, name, tmp_path / "absent")
    monkeypatch.setattr(set_up, device, tmp_path)
    assert set_up.find_set() == expected


@pytest.fixture
def venv(tmp_path, monkeypatch) -> Path:
    """An empty place for the environment, and a record of what would be installed into it."""
    venv = tmp_path / ".venv"
    monkeypatch.setattr(set_up, "VENV", venv)
    monkeypatch.setattr(set_up, "STAMP", venv / ".set-up")
    monkeypatch.setattr(set_up, "install", lambda chosen: venv.mkdir(exist_ok=True) or (venv / chosen).touch())
    monkeypatch.setattr(set_up, "find_set", lambda: "cpu")
    return venv


def test_second_run_installs_nothing(venv):
    assert set_up.set_up("auto") == 0
    (venv / "cpu").unlink()
    assert set_up.set_up("auto") == 0
    assert not (venv / "cpu").exists()


def test_changed_inputs_install_again(venv, monkeypatch):
    set_up.set_up("auto")
    (venv / "cpu").unlink()
    monkeypatch.setattr(set_up, "inputs_digest", lambda: "other")
    set_up.set_up("auto")
    assert (venv / "cpu").exists()


def test_sets_do_not_mix(venv):
    set_up.set_up("cpu")
    set_up.set_up("gpu")
    assert [path.name for path in venv.iterdir() if path.name != ".set-up"] == ["gpu"]


def test_forced_set_stays(venv):
    set_up.set_up("gpu")
    (venv / "gpu").unlink()
    set_up.set_up("auto")
    assert not (venv / "cpu").exists()


def test_interpreter_that_does_not_start_is_none(monkeypatch, tmp_path):
    """pyenv leaves shims on PATH for versions that are not switched on."""
    shim = tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert interpreters.find_interpreter("3.99") is None


def test_torch_for_other_interpreters_needs_a_wheel(monkeypatch, tmp_path):
    monkeypatch.delenv("UV_TORCH_BACKEND", raising=False)
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    assert not interpreters.has_cpu_torch("3.99")
    (tmp_path / "torch-2.13.0+cpu-cp399-cp399-linux_x86_64.whl").touch()
    assert interpreters.has_cpu_torch("3.99")
