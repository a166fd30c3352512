"""Rows about weight pushes: a learner's weights into a real engine, and both sides score the same tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf.agents.engine import SamplingParams
from openrlhf.core.config import AlgoConfig, PolicyLossConfig
from openrlhf.launcher.ranks.config import RankConfig
from openrlhf.launcher.ranks.roles import PolicyRank
from openrlhf.launcher.ray.learner_actor import wire_specs
from openrlhf.launcher.selfcheck.engine_process import EngineProcess, start_engine
from openrlhf.launcher.selfcheck.learning import (
    MIB,
    Dtype,
    dtype,
    make_learner,
    require_cuda,
    settings,
    small_batch,
    synchronize,
    take_steps,
)
from openrlhf.launcher.selfcheck.models import TINY, WIDE, WIDE_ON_GPU, Shape, make_model
from openrlhf.launcher.selfcheck.outcome import CheckError, Outcome
from openrlhf.learner.setup import training_device
from openrlhf.rollout.engine import EngineControl, InferenceEngine
from openrlhf.rollout.engine_spec import EngineSpec, SyncBackend
from openrlhf.rollout.requests import GenerateRequest
from openrlhf.rollout.sync_check import (
    FP32_TOLERANCE,
    SyncError,
    Tolerance,
    check_sequences,
    compare,
    measured_tolerance,
    noise_bits,
)
from openrlhf.rollout.weights.sender import Sender, WeightSender, send_or_drain
from openrlhf.rollout.weights.wire import BucketPlan, plan_buckets

MEMORY_SHARE = 0.3
"""Of a GPU's memory, for an engine that shares it with a learner."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
NOTICED_S = 15.0
"""Longest time until a killed engine is noticed."""
SAMPLE = GenerateRequest(
    request_id="sample", token_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=8, seed=7, ignore_eos=True)
)
COPIES = 3
SHARED_VERSION, LOST_VERSION = 3, 4
"""Of the pushes that follow on the two of `_push_twice`."""


@dataclass(frozen=True)
class Pair:
    """A learner and an engine that are joined by a weight group."""

    trainer: PolicyRank
    engine: EngineProcess
    spec: EngineSpec
    sender: Sender
    plan: BucketPlan
    bucket_bytes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the learner's stream."""

    def push(self, version: int, *, halfway: Callable[[], None] | None = None) -> None:
        """One whole push. halfway: called in the middle of it."""
        stream = self._stream(halfway)
        if self.spec.sync_backend != "gloo":  # vLLM's trainer engine in the sender calls the engine
            send_or_drain(self.sender, stream, self.plan, version)
            return
        self.engine.ask(EngineControl.receive_weights, self.plan, version)
        try:
            send_or_drain(self.sender, stream, self.plan, version)
        except RuntimeError as error:
            self.engine.answer()  # which has the cause, if it was the engine's
            raise CheckError(f"the push of version {version} failed on the learner's side: {error}") from error
        self.engine.answer()

    def _stream(self, halfway: Callable[[], None] | None) -> Iterator[list[tuple[str, Tensor]]]:
        stream = self.trainer.learner.named_parameter_buckets(self.bucket_bytes, **self.options)
        for number, bucket in enumerate(stream):
            if halfway is not None and number == len(self.plan.buckets) // 2:
                halfway()
            yield bucket

    def difference(self) -> float:
        """Mean |log-prob difference| of both sides on fixed tokens. Raises SyncError where a run would stop."""
        rows = check_sequences(TINY.vocab)
        own, theirs = self.trainer.check_logprobs(rows), self.engine.call(EngineControl.score, rows)
        return compare(own, theirs, tolerance=self.tolerance(rows, own), engine="the engine")

    def tolerance(self, rows: list[list[int]], own: list[list[float]]) -> Tolerance:
        """What a run allows: the trainer scored `rows` as `own`."""
        bits = noise_bits(self.spec.dtype)
        if bits is None:
            return Tolerance(value=FP32_TOLERANCE, source="float32")
        return measured_tolerance(own, self.trainer.check_logprobs(rows, bits=bits), bits=bits)


_left: dict[SyncBackend, Pair] = {}
"""What a row left behind for `push_shared` and `engine_lost`, which then need no engine of their own."""


def push_gloo(folder: Path) -> Outcome:
    """Gloo: any machine."""
    return _tied_and_untied(folder, "gloo", {})


def push_shared(folder: Path) -> Outcome:
    """Shared memory: any machine. The engine of the row before it gets, in a new group, the weights after a step."""
    pair = _left.pop("gloo", None)
    if pair is None:
        pair = _make_pair(folder, "gloo", {}, shape=TINY, tied=True, number_format=dtype())
    pair.sender.close()
    pair = _left["gloo"] = join(pair.trainer, pair.engine, pair.spec, shared=True)
    take_steps(pair.trainer.learner, small_batch(), 1)
    took = seconds_of(lambda: pair.push(SHARED_VERSION))
    answer = pair.engine.call(InferenceEngine.generate, SAMPLE)
    if set(answer.versions) != {SHARED_VERSION}:
        raise CheckError(f"samples carry the versions {sorted(set(answer.versions))}, not {SHARED_VERSION}")
    numbers = {"difference": pair.difference(), "push_bytes_per_s": pair.plan.nbytes / took}
    speed = f"{numbers['push_bytes_per_s'] / 1e9:.2g} GB/s with the engine's loading"
    return Outcome(detail=f"mean |log-prob difference| {numbers['difference']:.1e}; {speed}", numbers=numbers)


def push_ipc(folder: Path) -> Outcome:
    """CUDA IPC: engine and learner on one GPU."""
    require_cuda()
    return _tied_and_untied(folder, "ipc", {})


def push_nccl(folder: Path) -> Outcome:
    """nccl: the learner on the first GPU, the engine on the second."""
    require_cuda()
    return _tied_and_untied(folder, "nccl", {"CUDA_VISIBLE_DEVICES": second_gpu()})


def second_gpu() -> str:
    """The second GPU that this process may use, as CUDA_VISIBLE_DEVICES names it."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")]
    if len(visible) < 2:
        raise CheckError(f"CUDA_VISIBLE_DEVICES={','.join(visible)!r} shows one GPU, nccl needs two")
    return visible[1]


def _tied_and_untied(folder: Path, backend: SyncBackend, environ: dict[str, str]) -> Outcome:
    """A tiny tied model as this device trains it, then a wider untied one in bf16."""
    wide = WIDE_ON_GPU if training_device().type == "cuda" else WIDE
    _, first = _push_twice(folder / "tied", backend, environ, shape=TINY, tied=True, number_format=dtype())
    pair, second = _push_twice(folder / "untied", backend, environ, shape=wide, tied=False, number_format="bf16")
    _left[backend] = pair
    nbytes = pair.plan.nbytes
    numbers = {
        "tied": first["difference"],
        "untied_bf16": second["difference"],
        "bf16_tolerance": second["tolerance"],
        "push_bytes_per_s": nbytes / second["push_s"],
        "copy_bytes_per_s": nbytes / _copy_seconds(nbytes, backend),
        "bytes": float(nbytes),
    }
    detail = (
        f"mean |log-prob difference| after two pushes: tied {numbers['tied']:.1e}, untied in bf16 "
        f"{numbers['untied_bf16']:.1e} (allowed {numbers['bf16_tolerance']:.1e}); "
        f"{numbers['push_bytes_per_s'] / 1e9:.2g} GB/s, a bare copy {numbers['copy_bytes_per_s'] / 1e9:.2g}"
    )
    return Outcome(detail=detail, numbers=numbers)


def _push_twice(
    folder: Path, backend: SyncBackend, environ: dict[str, str], *, shape: Shape, tied: bool, number_format: Dtype
) -> tuple[Pair, dict[str, float]]:
    """Other weights than the engine started with, and those after a step: the larger difference, the second's time."""
    folder.mkdir()
    pair = _make_pair(folder, backend, environ, shape=shape, tied=tied, number_format=number_format)
    must_differ(pair)
    pair.push(1)
    first = pair.difference()
    take_steps(pair.trainer.learner, small_batch(), 1)
    took = seconds_of(lambda: pair.push(2))
    answer = pair.engine.call(InferenceEngine.generate, SAMPLE)
    if set(answer.versions) != {2}:
        raise CheckError(f"after the push of version 2 samples carry the versions {sorted(set(answer.versions))}")
    again = pair.engine.call(InferenceEngine.generate, SAMPLE)
    if list(again.token_ids) != list(answer.token_ids):
        raise CheckError(f"one seed gave {list(answer.token_ids)} and {list(again.token_ids)}")
    rows = check_sequences(TINY.vocab)
    tolerance = pair.tolerance(rows, pair.trainer.check_logprobs(rows)).value
    return pair, {"difference": max(first, pair.difference()), "tolerance": tolerance, "push_s": took}


def _make_pair(
    folder: Path, backend: SyncBackend, environ: dict[str, str], *, shape: Shape, tied: bool, number_format: Dtype
) -> Pair:
    old, new = (
        make_model(folder / name, shape, tied=tied, seed=seed, dtype=number_format)
        for name, seed in (("old", 1), ("new", 2))
    )
    spec = engine_spec(old, backend, number_format)
    engine = start_engine(spec, environ)
    return join(make_trainer(new, number_format), engine, spec)


def _copy_seconds(nbytes: int, backend: SyncBackend) -> float:
    """The same bytes from where the learner has them to where they go, without anything around."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=training_device())
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda:1" if backend == "nccl" else source.device)
    target.copy_(source)
    return min(seconds_of(lambda: target.copy_(source)) for _ in range(COPIES))


def seconds_of(action: Callable[[], object]) -> float:
    """How long it takes until every GPU is done with it."""
    synchronize()
    began = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - began


def engine_lost(folder: Path) -> Outcome:
    """An engine's core is killed in the middle of a push; another engine in a new group then gets everything."""
    backend: SyncBackend = "ipc" if training_device().type == "cuda" else "gloo"
    pair = _left.pop(backend, None)
    if pair is None:
        pair = _make_pair(folder, backend, {}, shape=TINY, tied=True, number_format=dtype())
        pair.push(2)
    noticed = _noticed_after(pair)
    pair.sender.close()
    fresh = join(pair.trainer, start_engine(pair.spec, {}), pair.spec)
    must_differ(fresh)
    fresh.push(LOST_VERSION)
    difference = fresh.difference()
    detail = f"noticed after {noticed:.1f} s; mean |log-prob difference| of the next engine {difference:.1e}"
    return Outcome(detail=detail, numbers={"noticed_s": noticed, "difference": difference})


def _noticed_after(pair: Pair) -> float:
    """Seconds from the engine's death to the error in the learner. Raises CheckError where it takes too long."""
    killed: list[float] = []

    def kill() -> None:
        pair.engine.kill_core()
        killed.append(time.monotonic())

    try:
        pair.push(LOST_VERSION, halfway=kill)
    except (CheckError, RuntimeError):
        noticed = time.monotonic() - killed[0]
    else:
        raise CheckError("the push ended without an error, although its engine was killed in the middle")
    if noticed > NOTICED_S:
        raise CheckError(f"a killed engine was noticed after {noticed:.1f} s, not within {NOTICED_S:g} s")
    return noticed


def must_differ(pair: Pair) -> None:
    """Before the push both sides hold other weights: if the check saw no difference it would never see one."""
    try:
        found = pair.difference()
    except SyncError:
        return
    raise CheckError(f"two models with other random weights score alike (difference {found:.3g}): the check is blind")


def colocated(folder: Path) -> Outcome:
    """One round of `--train.colocate_all` with both kinds of sleep."""
    require_cuda()
    return one_round(folder, "ipc")


def one_round(folder: Path, backend: SyncBackend) -> Outcome:
    """Engine asleep, learner steps and sleeps, engine wakes for its weights, push, cache, score."""
    spec = engine_spec(make_model(folder / "old", seed=1), backend, dtype(), sleeps=True)
    engine = start_engine(spec, {})
    awake = _free()
    engine.call(EngineControl.sleep)
    asleep = _free()
    trainer = make_trainer(make_model(folder / "new", seed=2), dtype(), sleeps=backend == "ipc")
    trainer.learner.wake()
    take_steps(trainer.learner, small_batch(), 1)
    trainer.learner.sleep()
    trainer.learner.give_back()
    pair = join(trainer, engine, spec)
    engine.call(EngineControl.wake, "weights")
    pair.push(1)
    trainer.learner.give_back()
    engine.call(EngineControl.wake, "kv_cache")
    difference = pair.difference()
    engine.call(InferenceEngine.generate, SAMPLE)
    numbers = {"difference": difference, "engine_gave_mib": (asleep - awake) / MIB}
    if backend == "ipc" and asleep <= awake:
        raise CheckError(
            f"a sleeping engine gave no memory back: {asleep / MIB:.0f} MiB free, {awake / MIB:.0f} before"
        )
    gave = f"; the sleeping engine gave {numbers['engine_gave_mib']:.0f} MiB" if asleep else ""
    return Outcome(detail=f"mean |log-prob difference| {difference:.1e}{gave}", numbers=numbers)


def _free() -> float:
    """Bytes free on the device; 0 on a CPU."""
    return float(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0.0


def make_trainer(model: str, number_format: Dtype, *, sleeps: bool = False, **changes: Any) -> PolicyRank:
    """The policy's rank as a run makes it. changes: of DeepSpeed's settings."""
    ds = settings(param_dtype=number_format, enable_sleep=sleeps, **changes)
    learner = make_learner(model, ds, shares_device=True)
    config = RankConfig(
        algo=AlgoConfig(),
        policy_loss=PolicyLossConfig(),
        value_clip=0.2,
        max_len=128,
        agg_constant=1.0,
        pad_token_id=0,
    )
    return PolicyRank(learner, config, resolve=lambda what, handles: list(handles))


def engine_spec(model: str, backend: SyncBackend, number_format: Dtype, *, sleeps: bool = False) -> EngineSpec:
    device: Any = training_device().type
    return EngineSpec(
        model=model,
        name="the engine",
        dtype=DTYPES[number_format],
        device=device,
        max_model_len=256,
        gpu_memory_utilization=MEMORY_SHARE,
        enable_sleep=sleeps,
        sync_backend=backend,
    )


def join(trainer: PolicyRank, engine: EngineProcess, spec: EngineSpec, *, shared: bool = False, **options: Any) -> Pair:
    """A new group; its buckets are smaller than the largest tensor. shared: in place of gloo."""
    specs = wire_specs(trainer.learner, **options)
    largest = max(s.nbytes for s in specs)
    bucket_bytes = largest * 3 // 4
    sender = _sender(engine, spec.sync_backend, largest, shared=shared)
    address = sender.open(2, 1)
    if spec.sync_backend == "gloo":
        engine.ask(EngineControl.init_weight_transfer, address.for_engine(1))
    sender.connect()
    if spec.sync_backend == "gloo":
        engine.answer()
    return Pair(trainer, engine, spec, sender, plan_buckets(specs, bucket_bytes), bucket_bytes, options)


def _sender(engine: EngineProcess, backend: SyncBackend, buffer_bytes: int, *, shared: bool) -> Sender:
    if backend == "gloo":
        return WeightSender(shared=shared)
    from openrlhf.rollout.weights.cuda_sender import IpcSender, NcclSender

    if backend == "ipc":
        return IpcSender(rank=0, buffer_bytes=buffer_bytes, engines=OneEngine(engine))
    return NcclSender(master_address="127.0.0.1", buffer_bytes=buffer_bytes, engines=OneEngine(engine))


@dataclass(frozen=True)
class OneEngine:
    """The engine as senders over nccl and CUDA IPC call it."""

    engine: EngineProcess

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let it join."""
        self.engine.call(EngineControl.init_weight_transfer, init_info)

    def start_weight_update(self) -> None:
        """Begin a push."""
        self.engine.call(EngineControl.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        """Receive tensors."""
        self.engine.call(EngineControl.update_weights, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The weights become this version."""
        assert weight_version is not None, "every push of ours has a version"
        self.engine.call(EngineControl.finish_weight_update, int(weight_version))
