"""The row about pushes of adapters alone: an engine that serves one scores and samples as the learner computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from openrlhf.launcher.ray.learner_actor import wire_specs
from openrlhf.launcher.selfcheck.engine_process import start_engine
from openrlhf.launcher.selfcheck.learning import dtype, require_cuda, small_batch, take_steps
from openrlhf.launcher.selfcheck.models import make_model
from openrlhf.launcher.selfcheck.outcome import CheckError, Outcome
from openrlhf.launcher.selfcheck.push import SAMPLE, Pair, engine_spec, join, make_trainer, must_differ, seconds_of
from openrlhf.learner.config import LoraConfig
from openrlhf.rollout.engine import InferenceEngine
from openrlhf.rollout.engine_spec import SyncBackend
from openrlhf.rollout.sync_check import compare, few_tokens
from openrlhf.rollout.weights.wire import plan_buckets

LORA = LoraConfig(rank=8, alpha=32)


def push_adapter(folder: Path) -> Outcome:
    """CUDA IPC: engine and learner on one GPU."""
    require_cuda()
    return adapter_round(folder, "ipc")


def adapter_round(folder: Path, backend: SyncBackend) -> Outcome:
    """The model with its adapter, then after two steps the adapter alone; scores and samples after each push."""
    spec = replace(engine_spec(make_model(folder / "old", seed=1), backend, dtype()), lora_rank=LORA.rank)
    engine = start_engine(spec, {})
    trainer = make_trainer(make_model(folder / "new", seed=2), dtype(), lora=LORA)
    pair = join(trainer, engine, spec, form="apart")
    must_differ(pair)
    pair.push(1)
    found = [pair.difference(), _sampled(pair, 1)]
    take_steps(trainer.learner, small_batch(), 2)
    options = {"skip_frozen": True, "form": "apart"}
    plan = plan_buckets(wire_specs(trainer.learner, skip_frozen=True, form="apart"), pair.bucket_bytes)
    alone = replace(pair, plan=plan, options=options)
    took = seconds_of(lambda: alone.push(2))
    found += [alone.difference(), _sampled(alone, 2)]
    numbers = {"difference": max(found), "share_of_bytes": plan.nbytes / pair.plan.nbytes, "push_s": took}
    detail = f"mean |log-prob difference| {max(found):.1e}; the adapter is {numbers['share_of_bytes']:.1%} of the bytes"
    return Outcome(detail=detail, numbers=numbers)


def _sampled(pair: Pair, version: int) -> float:
    """The difference of what the engine samples. Raises SyncError where a run would stop."""
    answer = pair.engine.call(InferenceEngine.generate, SAMPLE)
    if set(answer.versions) != {version}:
        raise CheckError(f"after the push of version {version} samples carry {sorted(set(answer.versions))}")
    rows = [[*SAMPLE.token_ids, *answer.token_ids]]
    own = pair.trainer.check_logprobs(rows)
    tolerance = few_tokens(pair.tolerance(rows, own))
    said, computed = [0.0, *answer.logprobs], [0.0, *own[0][len(SAMPLE.token_ids) :]]
    return compare([computed], [said], tolerance=tolerance, engine="the engine, which samples,")
