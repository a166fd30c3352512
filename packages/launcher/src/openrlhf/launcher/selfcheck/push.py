"""Rows about weight pushes: a learner's weights into a real engine, and both sides score the same tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openrlhf.agents.engine import SamplingParams
from openrlhf.core.config import AlgoConfig, PolicyLossConfig
from openrlhf.launcher.ranks.config import RankConfig
from openrlhf.launcher.ranks.roles import PolicyRank
from openrlhf.launcher.selfcheck.engine_process import EngineProcess
from openrlhf.launcher.selfcheck.learning import (
    MIB,
    dtype,
    make_learner,
    require_cuda,
    settings,
    small_batch,
    take_steps,
)
from openrlhf.launcher.selfcheck.models import TINY, make_model
from openrlhf.launcher.selfcheck.outcome import CheckError, Outcome
from openrlhf.learner.setup import leave_distributed, training_device
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
from openrlhf.rollout.weights.wire import BucketPlan, TensorSpec, plan_buckets

MEMORY_SHARE = 0.3
"""Of a GPU's memory, for an engine that shares it with a learner."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
BUCKET_NUMBERS = 16_384
"""Numbers per bucket: the matrices of a tiny model fit, its embedding does not."""
SAMPLE = GenerateRequest(
    request_id="sample", token_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=8, seed=7, ignore_eos=True)
)


@dataclass(frozen=True)
class Pair:
    """A learner and an engine that are joined by a weight group."""

    trainer: PolicyRank
    engine: EngineProcess
    sender: Sender
    plan: BucketPlan
    backend: SyncBackend
    bucket_bytes: int

    def push(self, version: int) -> None:
        """One whole push."""
        stream = self.trainer.learner.named_parameter_buckets(self.bucket_bytes)
        if self.backend != "gloo":  # vLLM's trainer engine in the sender calls the engine
            send_or_drain(self.sender, stream, self.plan, version)
            return
        self.engine.ask(EngineControl.receive_weights, self.plan, version)
        try:
            send_or_drain(self.sender, stream, self.plan, version)
        except RuntimeError as error:
            self.engine.answer()  # which has the cause, if it was the engine's
            raise CheckError(f"the push of version {version} failed on the learner's side: {error}") from error
        self.engine.answer()

    def difference(self) -> float:
        """Mean |log-prob difference| of both sides on fixed tokens. Raises SyncError where a run would stop."""
        rows = check_sequences(TINY.vocab)
        own, theirs = self.trainer.check_logprobs(rows), self.engine.call(EngineControl.score, rows)
        return compare(own, theirs, tolerance=self.tolerance(rows, own), engine="the engine")

    def tolerance(self, rows: list[list[int]], own: list[list[float]]) -> Tolerance:
        """What a run allows: the trainer scored `rows` as `own`."""
        bits = noise_bits(DTYPES[dtype()])
        if bits is None:
            return Tolerance(value=FP32_TOLERANCE, source="float32")
        return measured_tolerance(own, self.trainer.check_logprobs(rows, bits=bits), bits=bits)


def push_gloo(folder: Path) -> Outcome:
    """Gloo: any machine."""
    return _tied_and_untied(folder, "gloo", {})


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
    numbers = {}
    for tied in (True, False):
        name = "tied" if tied else "untied"
        numbers[name] = _push_twice(folder / name, backend, environ, tied=tied)
    leave_distributed()
    shown = ", ".join(f"{name} {value:.1e}" for name, value in numbers.items())
    return Outcome(detail=f"mean |log-prob difference| after two pushes: {shown}", numbers=numbers)


def _push_twice(folder: Path, backend: SyncBackend, environ: dict[str, str], *, tied: bool) -> float:
    """Other weights than the engine started with, and those after a step. Returns the larger difference."""
    folder.mkdir()
    old = make_model(folder / "old", tied=tied, seed=1)
    trainer = _trainer(make_model(folder / "new", tied=tied, seed=2), sleeps=False)
    with EngineProcess(_engine_spec(old, backend), environ) as engine:
        pair = _join(trainer, engine, backend)
        _must_differ(pair)
        pair.push(1)
        first = pair.difference()
        take_steps(trainer.learner, small_batch(), 1)
        pair.push(2)
        answer = engine.call(InferenceEngine.generate, SAMPLE)
        if set(answer.versions) != {2}:
            raise CheckError(f"after the push of version 2 samples carry the versions {sorted(set(answer.versions))}")
        again = engine.call(InferenceEngine.generate, SAMPLE)
        if list(again.token_ids) != list(answer.token_ids):
            raise CheckError(f"one seed gave {list(answer.token_ids)} and {list(again.token_ids)}")
        return max(first, pair.difference())


def _must_differ(pair: Pair) -> None:
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
    old = make_model(folder / "old", seed=1)
    with EngineProcess(_engine_spec(old, backend, sleeps=True), {}) as engine:
        awake = _free()
        engine.call(EngineControl.sleep)
        asleep = _free()
        trainer = _trainer(make_model(folder / "new", seed=2), sleeps=backend == "ipc")
        trainer.learner.wake()
        take_steps(trainer.learner, small_batch(), 1)
        trainer.learner.sleep()
        trainer.learner.give_back()
        pair = _join(trainer, engine, backend)
        engine.call(EngineControl.wake, "weights")
        pair.push(1)
        trainer.learner.give_back()
        engine.call(EngineControl.wake, "kv_cache")
        difference = pair.difference()
        engine.call(InferenceEngine.generate, SAMPLE)
    leave_distributed()
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


def _trainer(model: str, *, sleeps: bool) -> PolicyRank:
    """The policy's rank as a run makes it."""
    learner = make_learner(model, settings(enable_sleep=sleeps), shares_device=True)
    config = RankConfig(
        algo=AlgoConfig(),
        policy_loss=PolicyLossConfig(),
        value_clip=0.2,
        max_len=128,
        agg_constant=1.0,
        pad_token_id=0,
    )
    return PolicyRank(learner, config, resolve=lambda what, handles: list(handles))


def _engine_spec(model: str, backend: SyncBackend, *, sleeps: bool = False) -> EngineSpec:
    device: Any = training_device().type
    return EngineSpec(
        model=model,
        name="the engine",
        dtype=DTYPES[dtype()],
        device=device,
        max_model_len=256,
        gpu_memory_utilization=MEMORY_SHARE,
        enable_sleep=sleeps,
        sync_backend=backend,
    )


def _join(trainer: PolicyRank, engine: EngineProcess, backend: SyncBackend) -> Pair:
    bucket_bytes = BUCKET_NUMBERS * (4 if dtype() == "fp32" else 2)
    infos = trainer.learner.weight_metadata()
    specs = [TensorSpec(i.name, str(i.dtype).removeprefix("torch."), i.shape) for i in infos]
    if max(spec.nbytes for spec in specs) <= bucket_bytes:
        raise CheckError("no tensor of the model is larger than a bucket")
    sender = _sender(engine, backend, max(bucket_bytes, *(spec.nbytes for spec in specs)))
    address = sender.open(2, 1)
    if backend == "gloo":
        engine.ask(EngineControl.init_weight_transfer, address.for_engine(1))
    sender.connect()
    if backend == "gloo":
        engine.answer()
    return Pair(trainer, engine, sender, plan_buckets(specs, bucket_bytes), backend, bucket_bytes)


def _sender(engine: EngineProcess, backend: SyncBackend, buffer_bytes: int) -> Sender:
    if backend == "gloo":
        return WeightSender()
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
