"""A weight push as the controller sees it: connect, push, check; a failed push is done again whole in a new group."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from openrlhf.agents.engine import Generation, SamplingParams
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.preflight import Prepared
from openrlhf.launcher.ranks.roles import PolicyRank
from openrlhf.launcher.ray.calls import WorkerDiedError, first_line, gather
from openrlhf.launcher.ray.engine_client import RayEngineClient
from openrlhf.launcher.ray.engine_fleet import STEP_TIMEOUT, EngineFleet, Member
from openrlhf.launcher.ray.learner_actor import LearnerActor, Transfer
from openrlhf.launcher.ray.rank_group import RankGroup
from openrlhf.launcher.ray.remote import Remote, ask_all
from openrlhf.launcher.resolve import ENGINE_DTYPES
from openrlhf.rollout.engine import EngineControl
from openrlhf.rollout.requests import GenerateRequest
from openrlhf.rollout.sync_check import (
    CHECK_ROWS,
    SyncError,
    Tolerance,
    answer_tokens,
    check_prompts,
    check_sequences,
    compare,
    few_tokens,
    measured_tolerance,
    noise_bits,
    written_rows,
)

if TYPE_CHECKING:
    from openrlhf.launcher.ray.engine_actor import EngineActor
    from openrlhf.learner.lora_stream import Form
    from openrlhf.rollout.weights.wire import BucketPlan

log = logging.getLogger(__name__)

Policy = RankGroup[PolicyRank]

A = TypeVar("A")
B = TypeVar("B")

CONNECT_TIMEOUT = 60.0
PUSH_TIMEOUT = 1800.0
CHECK_TIMEOUT = 600.0
OTHER_SIDE_TIMEOUT = 30.0
"""How long the other side of a failed exchange may take to notice; the group's own time-out is 15 s."""
ATTEMPTS = 3
"""A push that fails this often in a row ends the run."""
FEW_ROWS = 4
"""So many rows of the text are scored after a push in float32, where rounding leaves no doubt to be averaged out."""
SAMPLED = SamplingParams(temperature=1.0, max_tokens=2, seed=0, ignore_eos=True)
"""What an engine that serves an adapter samples after a push, to be compared."""
NEWS = 2.0
"""A measured tolerance is logged again when it has grown or shrunk by this factor."""


class JoinError(RuntimeError):
    """Engines could not join."""


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Engines pause for a push and their requests go on afterwards; clear_cache: with a new KV cache."""

    clear_cache: bool


@dataclass(frozen=True, kw_only=True)
class CheckPlan:
    """How pushes are checked.

    prompts: beginnings of the text that both sides score; after the first push the engine writes on, and this text
    stays for the run, so that rollout/sync_error of all steps can be compared. In float32 on both sides (no `bits`) the
    whole text is scored after a push over a new connection, and FEW_ROWS of it in turn after the others.
    answer_tokens: how much the engine writes.
    tolerance: the same for every push; None: measured at every push, for the weights of then, by rounding the trainer's
    layers to `bits` significant bits.
    """

    prompts: Sequence[Sequence[int]]
    answer_tokens: int
    tolerance: Tolerance | None
    bits: int | None = None

    def __post_init__(self) -> None:
        assert self.tolerance is not None or self.bits is not None, "a tolerance, or how to measure it"


def check_plan(config: TrainPPOConfig, prepared: Prepared) -> CheckPlan:
    """The sync check, on the first prompts of the run's file; where those are empty, on tokens of no meaning."""
    max_len, fixed = config.data.max_len, config.vllm.sync_tolerance
    items = (prepared.prompts.item(i) for i in range(min(CHECK_ROWS, len(prepared.prompts))))
    prompts = check_prompts(
        [prepared.tokenizer.encode(item.prompt, add_special_tokens=False) for item in items],
        max_len=max_len,
        without=() if prepared.vision is None else prepared.vision.suppressed,
    ) or check_prompts(check_sequences(prepared.vocab_size), max_len=max_len)
    return CheckPlan(
        prompts=prompts,
        answer_tokens=answer_tokens(prompts, max_len=max_len),
        tolerance=None if fixed is None else Tolerance(value=fixed, source=f"--vllm.sync_tolerance {fixed:g}"),
        bits=noise_bits(ENGINE_DTYPES[config.ds.param_dtype], config.vllm.dtype),
    )


class WeightPush:
    """Brings the policy's weights to every engine.

    check: what trainer and engine must agree on after a push. pause: how engines are made ready for a push; None: they
    are idle. last_bytes: what the last push sent to every engine worker. lock: the fleet's.

    The first push over a new connection moves everything, those after it only what is trained: adapters alone where the
    engines serve them (`EngineSpec.lora_rank`), else the weights that they are merged into.
    """

    def __init__(self, fleet: EngineFleet, *, bucket_mb: int, check: CheckPlan, pause: Pause | None = None) -> None:
        self._fleet = fleet
        self._pause = pause
        self._backend = fleet.specs[0].sync_backend
        self._form: Form = "apart" if fleet.specs[0].lora_rank else "merged"
        self.lock = fleet.lock
        self.version: int | None = None
        self._bucket_bytes = bucket_mb << 20
        self._check_plan = check
        self._rows: list[list[int]] | None = None
        self._checks = 0
        self._told: float | None = None
        self._generation = 0
        self._connected = False
        self._plan: BucketPlan | None = None
        self._plan_skips = False
        self._whole_sent = False
        self.last_bytes = 0

    async def push(self, policy: Policy, version: int) -> dict[str, float]:
        """Push and check. Returns rollout/sync_error, rollout/sync_tolerance, timing/broadcast and timing/sync_check.

        Raises SyncError when the engines then compute something else than the trainer, WorkerDiedError when a learner
        rank is gone or the push failed ATTEMPTS times.
        """
        async with self.lock:
            return await self._push_and_check(policy, version, self._pause)

    async def recover(self, policy: Policy) -> None:
        """Start engines again that are gone and give all of them the weights of the policy. Nothing before any push.

        Requests on the others pause meanwhile; engines that slept sleep again. Between two optimiser steps of one
        version the tokens that follow are labelled with the version before, so their staleness is never understated.
        """
        async with self.lock:
            if self.version is not None and await self._fleet.revive():
                await self._push_again(policy)

    async def join(self, policy: Policy, members: Sequence[Member]) -> None:
        """Let started engines enter the fleet: they have the present weights before agent workers hear of them.

        As in `recover`, in a new group with all others, and not while another push runs. Raises JoinError when the
        weights do not arrive there, or the engines compute something else; the run then goes on without them.
        """
        async with self.lock:
            self._fleet.adopt(members)
            try:
                await self._push_again(policy)
                return
            except Exception as error:
                why = error
            log.warning("engines that joined are given up: %s", why)
            self._fleet.give_up(members)
            await self._push_again(policy)
        raise JoinError(f"the run goes on without the new engines: {first_line(why)}") from why

    async def part(self, count: int) -> None:
        """Take out the engines that came last; the others meet in a new group at the next push."""
        async with self.lock:
            self._connected = False
            await self._fleet.dismiss(count)

    async def _push_again(self, policy: Policy) -> None:
        """The weights of now over new connections; before the first push that one brings them."""
        self._connected = False
        if self.version is None:
            return
        resting = self._fleet.state == "asleep"
        await self._push_and_check(policy, self.version, Pause(clear_cache=False))
        if resting:
            await self._fleet.sleep()

    def alone(self) -> AbstractAsyncContextManager[Any]:
        """Surrounds work of the models that must not meet awake engines: no engine is restarted meanwhile."""
        return self.lock if self._fleet.shares_devices else nullcontext()

    async def _push_and_check(self, policy: Policy, version: int, pause: Pause | None) -> dict[str, float]:
        began = time.perf_counter()
        failures = 0
        while True:
            try:
                metrics = await self._try_once(policy, version, pause)
                break
            except Exception as error:
                failures += 1
                self._connected = False
                self._fleet.fit = False
                if failures == ATTEMPTS or isinstance(error, (ValueError, SyncError)):
                    raise
                log.warning("weight push %d failed (%s): new group, everything again", version, error)
                await self._fleet.revive(after_push=True)
        self.version = version
        self._fleet.fit = True
        await self._fleet.announce()
        took = time.perf_counter() - began - metrics["timing/sync_check"]
        return metrics | {"timing/broadcast": took, "rollout/push_bytes": float(self.last_bytes)}

    async def _try_once(self, policy: Policy, version: int, pause: Pause | None) -> dict[str, float]:
        engines = self._fleet.engines
        await self._fleet.wake_weights()
        if pause is not None:
            await ask_all(engines, "engine pause", STEP_TIMEOUT, EngineControl.pause, clear_cache=pause.clear_cache)
        await self._push_once(policy, version)
        await self._fleet.wake_cache()
        if pause is not None:
            await ask_all(engines, "engine resume", STEP_TIMEOUT, EngineControl.resume)
        pushed = time.perf_counter()
        return await self._check(policy) | {"timing/sync_check": time.perf_counter() - pushed}

    async def _push_once(self, policy: Policy, version: int) -> None:
        if not self._connected:
            await self._connect(policy)
        skip_frozen = self._whole_sent
        if self._plan is None or self._plan_skips != skip_frozen:
            refs = policy.ask_process(LearnerActor.plan_push, self._bucket_bytes, skip_frozen, self._form)
            self._plan = (await policy.wait(refs, "weight push plan", PUSH_TIMEOUT))[0]
            self._plan_skips = skip_frozen
        assert self._plan is not None
        sending = policy.wait(policy.ask_process(LearnerActor.push, version), f"weight push {version}", PUSH_TIMEOUT)
        if self._backend == "gloo":
            what, method = f"weight push {version}", EngineControl.receive_weights
            await _both(sending, ask_all(self._fleet.engines, what, PUSH_TIMEOUT, method, self._plan, version))
        else:  # vLLM's trainer engine in rank 0 calls the engines
            await sending
        self.last_bytes = self._plan.nbytes
        self._whole_sent = True

    async def _connect(self, policy: Policy) -> None:
        self._generation += 1
        workers = [spec.num_workers for spec in self._fleet.specs]
        offsets = list(itertools.accumulate(workers, initial=1))
        processes = policy.processes
        transfers = [Transfer(backend=self._backend)] * len(processes)
        if self._backend != "gloo":  # rank 0 alone calls the engines
            transfers[0] = Transfer(backend=self._backend, engines=tuple(self._fleet.engines), num_workers=workers)
        refs = [
            process.ask(LearnerActor.open_weight_group, offsets[-1], self._generation, transfer, self._bucket_bytes)
            for process, transfer in zip(processes, transfers, strict=True)
        ]
        opened = await policy.wait(refs, "weight group", CONNECT_TIMEOUT)
        connecting = policy.wait(policy.ask_process(LearnerActor.connect_weight_group), "weight group", CONNECT_TIMEOUT)
        if self._backend == "gloo":
            joining = [
                engine.ask(EngineControl.init_weight_transfer, opened[0].for_engine(offset))
                for engine, offset in zip(self._fleet.engines, offsets, strict=False)
            ]
            joined = gather(joining, what="weight group", names=self._fleet.names, timeout=CONNECT_TIMEOUT)
            await _both(connecting, joined)
        else:
            await connecting
        self._connected = True
        self._whole_sent = False
        self._checks = 0

    async def _check(self, policy: Policy) -> dict[str, float]:
        plan, fleet = self._check_plan, self._fleet
        if self._rows is None:
            self._rows = await self._text()
        rows = self._rows if plan.bits is not None else share_of_rows(self._rows, self._checks)
        self._checks += 1
        refs = [policy.ask(PolicyRank.check_logprobs, rows)]
        if plan.tolerance is None:
            refs.append(policy.ask(PolicyRank.check_logprobs, rows, bits=plan.bits))
        (own, *rounded), engines = await _both(
            asyncio.gather(*(policy.wait(ref, "sync check", CHECK_TIMEOUT) for ref in refs)),
            ask_all(fleet.engines, "sync check", CHECK_TIMEOUT, EngineControl.score, rows),
        )
        tolerance = plan.tolerance
        if tolerance is None:
            assert plan.bits is not None
            tolerance = measured_tolerance(own[0], rounded[0][0], bits=plan.bits)
        self._tell(tolerance)
        error = max(
            compare(own[0], scored, tolerance=tolerance, engine=name)
            for name, scored in zip(fleet.names, engines, strict=True)
        )
        if fleet.specs[0].lora_rank:
            error = max(error, await self._check_sampling(policy, few_tokens(tolerance)))
        return {"rollout/sync_error": error, "rollout/sync_tolerance": tolerance.value}

    async def _check_sampling(self, policy: Policy, tolerance: Tolerance) -> float:
        """Compare what engines say of tokens that they sample, behind a text that may still lie in their caches.

        An engine that serves an adapter computes with it where a request names it: one that scores with the adapter may
        sample without, or behind keys and values of an older one.
        """
        assert self._rows is not None
        rows = self._rows[: written_rows(tolerance)]
        engines = await asyncio.gather(*(self._write(engine, rows, SAMPLED) for engine in self._fleet.engines))
        texts = {
            tuple(row) + tuple(a.token_ids): row for answers in engines for row, a in zip(rows, answers, strict=True)
        }
        asked = policy.ask(PolicyRank.check_logprobs, [list(text) for text in texts], sampled=True)
        scored = (await policy.wait(asked, "sync check", CHECK_TIMEOUT))[0]
        own = {text: [0.0, *scores[len(texts[text]) :]] for text, scores in zip(texts, scored, strict=True)}
        return max(
            compare(
                [own[*row, *answer.token_ids] for row, answer in zip(rows, answers, strict=True)],
                [[0.0, *answer.logprobs] for answer in answers],
                tolerance=tolerance,
                engine=f"{name}, which samples,",
            )
            for name, answers in zip(self._fleet.names, engines, strict=True)
        )

    async def _text(self) -> list[list[int]]:
        """The prompts of the check with what the first engine writes after them; nothing is drawn."""
        plan = self._check_plan
        sampling = SamplingParams(temperature=0.0, max_tokens=plan.answer_tokens)
        answers = await self._write(self._fleet.engines[0], plan.prompts, sampling)
        return [[*prompt, *answer.token_ids] for prompt, answer in zip(plan.prompts, answers, strict=True)]

    async def _write(
        self, engine: Remote[EngineActor], prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[Generation]:
        client = RayEngineClient(engine)
        asked = (
            client.generate(GenerateRequest(request_id=f"sync-check-{i}", token_ids=prompt, sampling=sampling))
            for i, prompt in enumerate(prompts)
        )
        return await asyncio.wait_for(asyncio.gather(*asked), CHECK_TIMEOUT)

    def _tell(self, tolerance: Tolerance) -> None:
        if self._told is None or not self._told / NEWS <= tolerance.value <= self._told * NEWS:
            log.info("sync check: mean |log-prob difference| up to %.3g (%s)", tolerance.value, tolerance.source)
            self._told = tolerance.value


def share_of_rows(rows: Sequence[list[int]], number: int) -> Sequence[list[int]]:
    """Which rows check `number` scores: all of them first, then at least FEW_ROWS in turn, each once in a round."""
    parts = max(len(rows) // FEW_ROWS, 1)
    return rows if number == 0 else rows[(number - 1) % parts :: parts]


async def _both(first: Awaitable[A], second: Awaitable[B]) -> tuple[A, B]:
    """Await both sides of an exchange; when one fails, the other gets a moment to fail too. A death is raised first."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    causes = [error for task in done if (error := task.exception()) is not None]
    if causes and pending:
        late, pending = await asyncio.wait(pending, timeout=OTHER_SIDE_TIMEOUT)
        causes += [error for task in late if (error := task.exception()) is not None]
    for task in pending:
        task.cancel()
    if causes:
        deaths = [error for error in causes if isinstance(error, WorkerDiedError)]
        raise (deaths or causes)[0]
    return tasks[0].result(), tasks[1].result()
