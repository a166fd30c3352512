"""Which Ray a run finds on its machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from openrlhf.launcher.machine import running_ray


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray"


def test_none_where_no_ray_was_started(folder: Path) -> None:
    assert running_ray() is None


def test_an_address_that_answers(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (folder / "ray_current_cluster").write_text(address)
        assert running_ray() == address


@pytest.mark.parametrize("left", ["127.0.0.1:1", "nonsense"])
def test_what_a_dead_ray_left_is_no_ray(folder: Path, left: str) -> None:
    (folder / "ray_current_cluster").write_text(left)
    assert running_ray() is None
