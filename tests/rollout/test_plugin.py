from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from openrlhf.rollout.weights import plugin
from support.rollout_processes import parent


def test_vllm_finds_the_plugin() -> None:
    (entry,) = [
        e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "openrlhf_weight_transfer"
    ]
    assert entry.load() is plugin.register


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize(("name", "ends"), [("EngineCore", True), ("SomethingElse", False)])
def test_an_engine_core_ends_when_its_parent_is_killed(name: str, ends: bool) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=parent, args=(name, theirs))
    process.start()
    assert ours.poll(60)
    core = ours.recv()
    assert alive(core)
    process.kill()
    process.join(10)
    deadline = time.monotonic() + (10 if ends else 1)
    while alive(core) and time.monotonic() < deadline:
        time.sleep(0.05)
    survived = alive(core)
    if survived:
        os.kill(core, 9)
    assert survived is not ends
