"""A run of any size in one process: the real controller over actors that answer by a rule, in simulated time.

Calls end where a process would begin: an actor writes down that it was called and how many bytes of arguments that
took, and its answer comes after a while. Rules know what an answer looks like, nothing else.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

from ray.cloudpickle import cloudpickle

from openrlhf.agents.engine import Generation
from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.ray.engine_fleet import EngineFleet
from openrlhf.launcher.ray.engine_watch import EngineWatch
from openrlhf.launcher.ray.learner_group import RayLearner
from openrlhf.launcher.ray.rank_group import RankGroup
from openrlhf.launcher.ray.remote import Remote
from openrlhf.launcher.ray.rollout import RayRollout
from openrlhf.launcher.ray.weight_push import CheckPlan, Pause, WeightPush
from openrlhf.launcher.trainer.loop import Trainer, TrainerParts
from openrlhf.rollout.engine import EngineHealth
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.router import Router
from openrlhf.rollout.sync_check import Tolerance
from openrlhf.rollout.weights.group import GroupAddress
from openrlhf.rollout.weights.wire import TensorSpec, plan_buckets
from support.rollout_fakes import EchoEngine
from support.simulated_time import SimulatedLoop
from support.trainer_fakes import GOOD, FakePrompts, FakeSink

SAMPLES = 4
REFERENCE_BYTES, HANDLE_BYTES = 28, 1000
"""An object reference of Ray, and about what an actor's handle takes."""
TENSORS = 200
SUMS = {"train/loss": (2.0, 4.0)}


@dataclass
class Meter:
    """What the controller did so far. work: calls of functions, Python's own and those of the interpreter in C."""

    seconds: float = 0.0
    calls: int = 0
    nbytes: int = 0
    work: int = 0

    def now(self) -> Meter:
        return replace(self, seconds=time.process_time())

    def per(self, steps: int, since: Meter) -> dict[str, float]:
        """Of each of the last `steps` steps."""
        return {name: (value - getattr(since, name)) / steps for name, value in vars(self).items()}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts calls of functions inside, which makes everything slower."""

        def count(frame: Any, event: str, argument: Any) -> None:
            self.work += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(before)


class Answer:
    """A reference whose value comes after a while; as an argument of another call it is as small as Ray's."""

    def __init__(self, value: Any, seconds: float) -> None:
        self._value, self._seconds = value, seconds

    def __reduce__(self) -> Any:
        return bytes, (b"r" * REFERENCE_BYTES,)

    def __await__(self) -> Any:
        yield from asyncio.sleep(self._seconds).__await__()
        return self._value

    def future(self) -> concurrent.futures.Future[Any]:
        found: concurrent.futures.Future[Any] = concurrent.futures.Future()
        asyncio.get_running_loop().call_later(self._seconds, lambda: found.cancelled() or found.set_result(self._value))
        return found


class Actor:
    """Answers every call by the rule of its name."""

    def __init__(self, name: str, meter: Meter, rules: dict[str, Callable[..., Any]]) -> None:
        self.meter, self.rules = meter, rules
        self.random = random.Random(name)  # no two answer at the same time

    def __reduce__(self) -> Any:
        return bytes, (b"a" * HANDLE_BYTES,)

    def __getattr__(self, name: str) -> Method:
        if name.startswith("__"):
            raise AttributeError(name)
        return Method(self, name)


class Method:
    """`actor.method`, as Ray has it."""

    def __init__(self, actor: Actor, name: str, returns: Any = 1) -> None:
        self.actor, self.name, self.returns = actor, name, returns

    def options(self, num_returns: Any) -> Method:
        return Method(self.actor, self.name, num_returns)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        actor, meter = self.actor, self.actor.meter
        meter.calls += 1
        meter.nbytes += len(cloudpickle.dumps((args, kwargs)))
        value = actor.rules.get(self.name, lambda *args, **kwargs: None)(*args, **kwargs)
        seconds = actor.random.random()
        if self.returns == "streaming":
            return _streamed(value)
        return tuple(Answer(part, seconds) for part in value) if self.returns == 2 else Answer(value, seconds)


async def _streamed(value: Any) -> AsyncIterator[Answer]:
    yield Answer(value, 0.0)


def engine_rules() -> dict[str, Callable[..., Any]]:
    word = Generation(token_ids=[1], logprobs=[0.0], versions=[0], finish_reason="length")
    alive = EngineHealth(version=0, running=0, paused=False, unfit="", totals={"iterations": 1.0, "running": 1.0})
    return {
        "start": lambda spec, serve: 1.0,
        "health": lambda: alive,
        "score": lambda rows: [[0.0] * len(row) for row in rows],
        "generate_many": lambda requests: [(number, word) for number in range(len(requests))],
    }


def rank_rules(engines: int) -> dict[str, Callable[..., Any]]:
    address = GroupAddress(master_address="10.0.0.1", master_port=1, world_size=1 + engines, generation=1)
    plan = plan_buckets([TensorSpec(f"model.layers.{n}.weight", "bfloat16", (64, 64)) for n in range(TENSORS)], 1 << 20)
    return {
        "metrics": lambda batch: SUMS,
        "update": lambda batch, order, **options: SUMS,
        "plan_push": lambda *args: plan,
        "open_weight_group": lambda *args: address,
        "check_logprobs": lambda rows: [[0.0] * len(row) for row in rows],
    }


def agent_rules(rng: random.Random) -> dict[str, Callable[..., Any]]:
    def run_group(item: PromptItem, evaluation: Any, parent: Any) -> Any:
        infos = [
            replace(GOOD, reward=float(n % 2), score=float(n % 2), total_length=rng.randint(8, 512))
            for n in range(SAMPLES)
        ]
        return infos, []

    return {"run_group": run_group, "engines_down": dict}


@dataclass
class SimulatedRun:
    """A trainer over `size` engines, as many policy and critic ranks, half as many of a reference, size / 8 workers.

    Every step takes a prompt per rank. `measure` runs it.
    """

    size: int
    asynchronous: bool = True
    backend: Any = "gloo"
    steps: int = 3
    meter: Meter = field(default_factory=Meter)
    sink: FakeSink = field(default_factory=FakeSink)

    def measure(self, *, count_work: bool = False) -> dict[str, float]:
        """What one step costs the controller, the mean over all but the first. count_work: slower by far."""
        seen: list[Meter] = []
        log_step = self.sink.log_step
        self.sink.log_step = lambda *args: (log_step(*args), seen.append(self.meter.now()))[0]  # type: ignore[method-assign]
        loop = SimulatedLoop()
        try:
            with mock.patch("ray.kill"), self.meter.counting() if count_work else mock.MagicMock():
                loop.run_until_complete(self._run())
        finally:
            loop.close()
        assert len(seen) == self.steps
        return seen[-1].per(self.steps - 1, seen[0])

    async def _run(self) -> None:
        size, steps = self.size, self.steps
        flags = {
            "rollout.batch_size": size,
            "rollout.n_samples_per_prompt": SAMPLES,
            "rollout.vllm_generate_batch_size": 2 * size,
            "train.batch_size": size * SAMPLES // 2,
            "train.async_enable": self.asynchronous,
            "train.partial_rollout_enable": self.asynchronous,
            "train.max_steps": 2 * steps,
            "algo.advantage.estimator": "gae",
            "reward.remote_url": "reward.py",
        }
        config = build(TrainPPOConfig(), flags)
        rollout, learner, watch = self._parts()
        prompts = FakePrompts((steps + 3) * size)
        trainer = Trainer(config, TrainerParts(rollout=rollout, learner=learner, prompts=prompts, sink=self.sink))
        watch.start()
        try:
            await trainer.run()
        finally:
            await watch.stop()

    def _parts(self) -> tuple[RayRollout, RayLearner, EngineWatch]:
        size = self.size
        specs = [EngineSpec(model="M", name=f"engine {n}", sync_backend=self.backend, stats=True) for n in range(size)]
        fleet = EngineFleet(specs, lambda n: Remote(f"engine {n}", Actor(f"engine {n}", self.meter, engine_rules())))
        check = CheckPlan(prompts=[[5, 6], [7]], answer_tokens=2, tolerance=Tolerance(value=1e-3, source="a test"))
        push = WeightPush(fleet, bucket_mb=1, check=check, pause=Pause(clear_cache=False))
        rng = random.Random(0)
        rollout = RayRollout(
            lambda n: Remote(f"agent worker {n}", Actor(f"agent {n}", self.meter, agent_rules(rng))),
            fleet,
            workers=max(size // 8, 1),
            group_timeout=100.0,
            silence=100.0,
            decode=str,
            n_samples=SAMPLES,
            max_len=512,
        )
        fleet.on_change = rollout.engines_changed
        learner = RayLearner(
            policy=self._ranks("policy", size),
            critic=self._ranks("critic", size),
            reference=self._ranks("reference", size // 2),
            push=push,
            tokenizer_path="T",
        )
        watch = EngineWatch(fleet, partial(push.recover, learner.policy), rollout, learner.groups, 5.0)
        return rollout, learner, watch

    def _ranks(self, role: str, count: int) -> RankGroup[Any]:
        rules = rank_rules(self.size)
        ranks = [Remote[Any](f"{role} rank {n}", Actor(f"{role} {n}", self.meter, rules)) for n in range(count)]
        return RankGroup[Any](role=role, ranks=ranks, hidden_size=64, share_prompt=True)


def route(size: int, *, meter: Meter | None = None) -> float:
    """CPU seconds of one router that spreads the samples of a step over `size` engines."""
    router = Router([EchoEngine(f"engine {n}", seed=n) for n in range(size)])

    async def group(number: int) -> None:
        sampling: Any = mock.Mock(max_tokens=16)
        asked = (router.generate([1] * 8, sampling, group_id=f"g{number}") for _ in range(SAMPLES))
        await asyncio.gather(*asked)

    async def step() -> None:
        await asyncio.gather(*(group(number) for number in range(size)))
        await router.close()

    loop = SimulatedLoop()
    began = time.process_time()
    try:
        with mock.MagicMock() if meter is None else meter.counting():
            loop.run_until_complete(step())
    finally:
        loop.close()
    return time.process_time() - began
