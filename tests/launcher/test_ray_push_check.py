"""What is scored after a weight push, and how much the sides may differ: over a fake fleet and fake ranks."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.agents.engine import Generation, SamplingParams
from openrlhf.launcher.ranks.roles import PolicyRank
from openrlhf.launcher.ray.engine_actor import EngineActor
from openrlhf.launcher.ray.weight_push import CheckPlan, WeightPush, share_of_rows
from openrlhf.rollout.engine import EngineControl
from openrlhf.rollout.sync_check import SyncError, Tolerance

PROMPTS, TEXT = [[5, 6], [7]], [[5, 6, 0, 1], [7, 0, 1]]
FIXED = CheckPlan(prompts=PROMPTS, answer_tokens=2, tolerance=Tolerance(value=1e-3, source="a test"))
MEASURED = CheckPlan(prompts=PROMPTS, answer_tokens=2, tolerance=None, bits=7)


class Fleet:
    """Engines whose log-probs are `shifts`, of what they sample `sampled`; all else of a push, over nccl, succeeds."""

    shares_devices = False

    def __init__(self, lora_rank: int) -> None:
        self.lock = asyncio.Lock()
        self.specs = [SimpleNamespace(sync_backend="nccl", num_workers=1, lora_rank=lora_rank)] * 2
        self.names = ["engine 0", "engine 1"]
        self.engines = [Engine(self, number) for number in range(2)]
        self.shifts = [0.0, 0.0]
        self.sampled = [0.0, 0.0]
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return self._mark if name.startswith("mark") else self._do

    def _mark(self) -> None: ...

    async def _do(self, *args: Any, **kwargs: Any) -> None: ...


class Engine:
    """Scores with its shift; the first one writes 0, 1, ... after a prompt, too."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet, self.number, self.name = fleet, number, f"engine {number}"
        self.asked: list[Any] = []

    async def ask(self, method: Any, *args: Any) -> Any:
        if method is not EngineControl.score:
            return None
        if self.number == 0:
            self.fleet.asked.append(args[0])
        return [[self.fleet.shifts[self.number]] * len(row) for row in args[0]]

    async def stream(self, method: Any, requests: Any) -> Any:
        assert method is EngineActor.generate_many

        async def chunk() -> Any:
            self.asked += [(r.request_id, r.token_ids, r.sampling) for r in requests]
            tokens = [list(range(r.sampling.max_tokens)) for r in requests]
            said = [self.fleet.sampled[self.number]] * len(tokens[0])
            return [
                (i, Generation(token_ids=t, logprobs=said, versions=t, finish_reason="length"))
                for i, t in enumerate(tokens)
            ]

        yield chunk()


class Policy:
    """One rank, whose log-probs move by `noise` when its layers are rounded."""

    def __init__(self) -> None:
        self.noise = 0.01
        self.scored: list[Any] = []
        self.sampled: list[Any] = []
        self.processes = [SimpleNamespace(ask=self.ask_process)]

    def ask_process(self, method: Any, *args: Any) -> Any:
        return method

    def ask(self, method: Any, rows: Any, *, bits: int | None = None, sampled: bool = False) -> Any:
        assert method is PolicyRank.check_logprobs
        (self.sampled if sampled else self.scored).append((rows, bits))
        return rows, 0.0 if bits is None else self.noise

    async def wait(self, refs: Any, what: str, timeout: float = 0) -> list[Any]:
        if isinstance(refs, tuple):
            return [[[refs[1]] * len(row) for row in refs[0]]]
        return [SimpleNamespace(nbytes=10)]


def pushes(check: CheckPlan, *, lora_rank: int = 0) -> tuple[Any, Any, WeightPush]:
    fleet, policy = Fleet(lora_rank), Policy()
    made: Any = fleet
    return fleet, policy, WeightPush(made, bucket_mb=1, check=check)


def test_both_sides_score_what_an_engine_wrote_after_the_first_push() -> None:
    async def main() -> tuple[Any, Any]:
        fleet, policy, push = pushes(FIXED)
        for version in (1, 2):
            metrics = await push.push(policy, version)
            assert (metrics["rollout/sync_error"], metrics["rollout/sync_tolerance"]) == (0, 1e-3)
        return fleet, policy

    fleet, policy = asyncio.run(main())
    greedy = SamplingParams(temperature=0.0, max_tokens=2)
    assert fleet.engines[0].asked == [(f"sync-check-{i}", prompt, greedy) for i, prompt in enumerate(PROMPTS)]
    assert fleet.asked == [TEXT, TEXT]
    assert policy.scored == [(TEXT, None)] * 2


@pytest.mark.parametrize("count", [1, 4, 7, 8, 16, 18])
def test_shares_of_the_text_are_whole_in_every_round(count: int) -> None:
    rows = [[i] for i in range(count)]
    assert share_of_rows(rows, 0) == rows
    parts = max(count // 4, 1)
    round_ = [share_of_rows(rows, number) for number in range(1, parts + 1)]
    assert sorted(row for share in round_ for row in share) == rows
    assert all(len(share) >= min(count, 4) for share in round_)
    assert share_of_rows(rows, parts + 1) == round_[0]


def test_float32_scores_a_share_of_the_text_except_over_a_new_connection() -> None:
    prompts = [[i, i] for i in range(16)]

    async def main() -> list[int]:
        fleet, policy, push = pushes(replace(FIXED, prompts=prompts))
        for version in range(3):
            await push.push(policy, version)
        push._connected = False
        await push.push(policy, 3)
        assert fleet.asked == [rows for rows, _ in policy.scored]
        return [len(rows) for rows in fleet.asked]

    assert asyncio.run(main()) == [16, 4, 4, 16]


def test_a_tolerance_is_measured_at_every_push_and_told_when_it_is_news(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> list[float]:
        _, policy, push = pushes(MEASURED)
        found = []
        for version, noise in enumerate((0.01, 0.019, 0.021, 0.02, 0.005)):
            policy.noise = noise
            found.append((await push.push(policy, version))["rollout/sync_tolerance"])
        assert policy.scored == [(TEXT, None), (TEXT, 7)] * 5
        return found

    assert asyncio.run(main()) == pytest.approx([0.02, 0.038, 0.042, 0.04, 0.01])
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("sync check")]
    why = "which is what rounding its layers to 7 bits does to the trainer"
    assert told == [
        f"sync check: mean |log-prob difference| up to {value} (2 x {noise}, {why})"
        for value, noise in (("0.02", "0.01"), ("0.042", "0.021"), ("0.01", "0.005"))
    ]


def test_a_tolerance_of_the_user_is_told_once_and_never_measured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        _, policy, push = pushes(FIXED)
        for version in range(3):
            await push.push(policy, version)

    asyncio.run(main())
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("sync check")]
    assert told == ["sync check: mean |log-prob difference| up to 0.001 (a test)"]


def test_an_engine_beyond_the_measured_tolerance_ends_the_run() -> None:
    async def main(shift: float) -> float:
        fleet, policy, push = pushes(MEASURED)
        fleet.shifts[1] = shift
        return (await push.push(policy, 1))["rollout/sync_error"]

    assert asyncio.run(main(0.019)) == pytest.approx(0.019)
    with pytest.raises(SyncError, match=r"engine 1 does not compute .* allowed 0\.02 \(2 x 0\.01, which is what"):
        asyncio.run(main(0.021))


def test_engines_that_serve_an_adapter_are_asked_what_they_sample_too() -> None:
    # K07: requests name the adapter, so an engine may score with it and sample without
    async def main(lora_rank: int, sampled: float) -> tuple[Any, Any, float]:
        fleet, policy, push = pushes(FIXED, lora_rank=lora_rank)
        fleet.sampled[1] = sampled
        await push.push(policy, 1)
        return fleet, policy, (await push.push(policy, 2))["rollout/sync_error"]

    fleet, policy, error = asyncio.run(main(8, 9e-4))
    assert error == pytest.approx(9e-4)
    asked = [ids for _, ids, sampling in fleet.engines[1].asked if sampling.temperature == 1.0]
    assert asked == TEXT * 2, "the whole text, so that its blocks may lie in the cache of an older adapter"
    assert policy.sampled == [([[*row, 0, 1] for row in TEXT], None)] * 2, "what all engines wrote is scored once"
    with pytest.raises(SyncError, match=r"engine 1, which samples, does not compute .* 0\.002 over 4 tokens"):
        asyncio.run(main(8, 2e-3))
    fleet, policy, _ = asyncio.run(main(0, 1.0))
    assert policy.sampled == []


@pytest.mark.parametrize(("sampled", "stops"), [(0.059, False), (0.061, True)])
def test_a_few_tokens_may_differ_more_where_both_sides_round(sampled: float, stops: bool) -> None:
    async def main() -> Any:
        fleet, policy, push = pushes(MEASURED, lora_rank=8)
        fleet.sampled[0] = sampled
        await push.push(policy, 1)

    with pytest.raises(SyncError, match="3 times that of the whole text") if stops else nullcontext():
        asyncio.run(main())
