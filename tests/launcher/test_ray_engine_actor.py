"""What an engine's process does before vLLM is imported, and which calls share its slots."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray

from openrlhf.launcher.ray import scratch
from openrlhf.launcher.ray.engine_actor import CONTROL, GENERATION, SLOTS, EngineActor, engine_actor
from openrlhf.rollout.engine import EngineControl
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.vllm.arguments import environment


class Engine:
    """Sees what vLLM would."""

    environment = staticmethod(environment)

    def __init__(self, spec: EngineSpec) -> None:
        self.visible = os.environ.get("CUDA_VISIBLE_DEVICES")

    async def start(self, *, serve: bool) -> None:
        pass

    async def shutdown(self) -> None:
        pass


@pytest.mark.parametrize(("noset", "seen"), [("1", "5,7"), ("0", "2,5,7")])
def test_a_engine_sees_only_its_devices(noset: str, seen: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # with 0 Ray itself narrows what the process sees
    module: Any = ModuleType("openrlhf.rollout.vllm.engine")
    module.VllmEngine = Engine
    monkeypatch.setitem(sys.modules, "openrlhf.rollout.vllm.engine", module)
    monkeypatch.setattr(scratch, "LONGEST_ROOT", 10_000)
    spec = EngineSpec(model="m", device="cuda", tensor_parallel_size=2)
    for name, value in {
        scratch.ROOT_VARIABLE: str(tmp_path),
        "TMPDIR": str(tmp_path),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": noset,
        "CUDA_VISIBLE_DEVICES": "2,5,7",
        **environment(spec),
    }.items():
        monkeypatch.setenv(name, value)
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["5", "7"]})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr("tempfile.tempdir", None)
    made: Any = EngineActor  # abstract to a type checker: `serves` gives it the methods of the protocol
    actor = made()

    async def start_and_end() -> None:
        await actor.start(spec)
        assert actor.engine.visible == seen
        await actor.shutdown()

    asyncio.run(start_and_end())


def test_ray_keeps_the_slots_of_control_calls_and_streams_apart() -> None:
    metadata = engine_actor().__ray_metadata__
    groups = metadata.method_meta.concurrency_group_for_methods
    control = [name for name, _ in inspect.getmembers(EngineControl, inspect.isfunction) if not name.startswith("_")]
    assert {groups.get(name) for name in [*control, "shutdown"]} == {CONTROL}
    assert {groups.get(name) for name in ("start", "generate_many")} == {GENERATION}
    assert {name: metadata.concurrency_groups[name] for name in SLOTS} == SLOTS
