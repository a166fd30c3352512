"""On the PYTHONPATH of a check: breaks, in the processes of its rows, what SELFCHECK_TEST_FAULT names."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from typing import Any


def a_package_is_too_old() -> None:
    from importlib import metadata

    requires = metadata.requires
    metadata.requires = lambda name: ["torch>=99"] if name == "openrlhf-learner" else requires(name)


def samples_of_a_packed_row_meet() -> None:
    import torch

    from openrlhf.learner import packing

    build = packing.build_inputs

    def running_on(batch: Any, positions: Any, *, packed: bool, **more: Any) -> Any:
        inputs = build(batch, positions, packed=packed, **more)
        return replace(inputs, position_ids=torch.arange(inputs.input_ids.shape[1])[None]) if packed else inputs

    packing.build_inputs = running_on


def packed_learners_stand_still() -> None:
    from openrlhf.learner.learner import Learner

    update = Learner.update
    first: dict[int, Any] = {}

    def once(self: Learner, *args: Any) -> Any:
        if not self.spec.ds.packing_samples:
            return update(self, *args)
        if id(self) not in first:
            first[id(self)] = update(self, *args)
        return first[id(self)]

    Learner.update = once  # type: ignore[method-assign]


def learners_start_from(change: Any) -> None:
    """Learners are made with `change(spec)`, and may be changed by it afterwards."""
    from openrlhf.learner.learner import Learner

    make = Learner.__init__

    def made(self: Learner, spec: Any) -> None:
        make(self, change(spec))

    Learner.__init__ = made  # type: ignore[method-assign]


def zero3_takes_other_steps() -> None:
    def faster(spec: Any) -> Any:
        if spec.ds.zero_stage != 3:
            return spec
        adam = replace(spec.optim.adam, lr=2 * spec.optim.adam.lr)
        return replace(spec, optim=replace(spec.optim, adam=adam))

    learners_start_from(faster)


def deterministic_learners_differ() -> None:
    number = iter(range(1, 100))

    def other(spec: Any) -> Any:
        if not spec.batch.full_determinism_enable:
            return spec
        adam = replace(spec.optim.adam, lr=spec.optim.adam.lr * (1 + 1e-3 * next(number)))
        return replace(spec, optim=replace(spec.optim, adam=adam))

    learners_start_from(other)


def wrong_tensor_in_the_push() -> None:
    from openrlhf.rollout.weights.wire import Packer

    add = Packer.add

    def scaled(self: Packer, name: str, tensor: Any) -> Any:
        return add(self, name, tensor * 1.5 if name.endswith("layers.1.mlp.down_proj.weight") else tensor)

    Packer.add = scaled  # type: ignore[method-assign]


def engines_survive() -> None:
    from openrlhf.launcher.selfcheck.engine_process import EngineProcess

    EngineProcess.kill_core = lambda self: None  # type: ignore[method-assign]


def requests_wait() -> None:
    from openrlhf.rollout.router import Router

    generate = Router.generate

    async def late(self: Router, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(10)
        return await generate(self, *args, **kwargs)

    Router.generate = late  # type: ignore[method-assign]


FAULTS = {
    "versions": a_package_is_too_old,
    "attention": samples_of_a_packed_row_meet,
    "learner-step": packed_learners_stand_still,
    "zero3": zero3_takes_other_steps,
    "determinism": deterministic_learners_differ,
    "push-gloo": wrong_tensor_in_the_push,
    "push-shared": wrong_tensor_in_the_push,
    "engine-lost": engines_survive,
    "generation": requests_wait,
}
"""Row -> what makes it fail, and no other."""

if "openrlhf.launcher.selfcheck.worker" in sys.orig_argv and "SELFCHECK_TEST_FAULT" in os.environ:
    for name in os.environ["SELFCHECK_TEST_FAULT"].split(","):
        FAULTS[name]()
