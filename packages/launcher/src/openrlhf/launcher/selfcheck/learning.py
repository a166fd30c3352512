"""Rows about one learner: steps, determinism, ZeRO-3, offload, sleep, Liger, 4-bit adapters."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from openrlhf.core.batch import Batch
from openrlhf.launcher.machine import installed_flash_attention
from openrlhf.launcher.selfcheck.attention import FLASH
from openrlhf.launcher.selfcheck.models import SIZE_0_6B, TINY, Shape, make_batch, make_model
from openrlhf.launcher.selfcheck.outcome import CheckError, Outcome
from openrlhf.learner.config import AdamConfig, DsConfig, LoraConfig, OptimConfig, TrainBatchConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.setup import init_distributed, training_device
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.supervised_objectives import SftObjective

STEPS = 4
SAME_LOSS = {"fp32": 1e-4, "bf16": 2e-2}
"""Relative difference allowed between losses of the same steps taken in two ways."""
SAME_REFERENCE = 1e-6
"""Difference allowed between log-probs of one model at two times."""
MIB = 1 << 20


Dtype = Literal["bf16", "fp32"]


def dtype() -> Dtype:
    """What `--ds.param_dtype auto` is here."""
    return "bf16" if training_device().type == "cuda" else "fp32"


def settings(**changes: Any) -> DsConfig:
    """DeepSpeed's settings as a run on this device resolves them, with changes."""
    flash = dtype() == "bf16" and FLASH in installed_flash_attention()
    return replace(DsConfig(param_dtype=dtype(), attn_implementation=FLASH if flash else "sdpa"), **changes)


def make_learner(model: str, ds: DsConfig, *, determinism: bool = False, shares_device: bool = False) -> Learner:
    """A policy that is trained; joins the process group of its environment."""
    init_distributed()
    batch = TrainBatchConfig(micro_batch_size=4, batch_size=8, full_determinism_enable=determinism)
    optim = OptimConfig(adam=AdamConfig(lr=3e-3), lr_scheduler="constant", lr_warmup_ratio=0.0)
    spec = LearnerSpec(role=Role.POLICY, model_path=model, ds=ds, optim=optim, batch=batch, max_optimizer_steps=STEPS)
    return Learner(replace(spec, shares_device=shares_device))


def small_batch() -> Batch:
    """Eight rows for tiny models."""
    return make_batch((40, 33, 8, 21, 40, 12, 27, 16))


def take_steps(learner: Learner, batch: Batch, steps: int = STEPS) -> list[float]:
    """The loss before each of some supervised steps on one batch. Raises CheckError for a step that was skipped."""
    losses = []
    for _ in range(steps):
        metrics = learner.update(batch, SftObjective())
        total, count = metrics["gpt_loss"]
        if metrics["skipped_steps"][0] or not math.isfinite(total):
            raise CheckError(f"a step was skipped: loss {total / count:.4g}, gradient {metrics['grad_norm'][0]:.4g}")
        losses.append(total / count)
    return losses


def must_fall(losses: list[float]) -> None:
    """Raises CheckError unless every step on the same batch made the loss smaller."""
    if any(later >= earlier for earlier, later in itertools.pairwise(losses)):
        raise CheckError(f"the loss on one batch does not fall: {_shown(losses)}")


def must_agree(losses: list[float], expected: list[float], what: str) -> float:
    """The largest relative difference of two series of losses. Raises CheckError above what rounding explains."""
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    if not worst <= SAME_LOSS[dtype()]:
        raise CheckError(f"{what}: losses {_shown(losses)} instead of {_shown(expected)}")
    return worst


def _shown(losses: list[float]) -> str:
    return " ".join(f"{loss:.5f}" for loss in losses)


PEAK_TFLOP_PER_S = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362}
"""Of dense bf16 products, by what NVIDIA's names of devices contain, from the data sheets; the first that fits."""


def learner_step(folder: Path) -> Outcome:
    """Steps of a model: tiny on a CPU, of the shape of 0.6 B on a GPU."""
    cuda = training_device().type == "cuda"
    shape, rows, length = (SIZE_0_6B, 32, 512) if cuda else (TINY, 16, 64)
    learner = make_learner(make_model(folder / "model", shape, dtype=dtype()), settings(packing_samples=True))
    batch = make_batch((length,) * rows)
    losses = take_steps(learner, batch, 1)
    synchronize()
    began = time.perf_counter()
    losses += take_steps(learner, batch)
    synchronize()
    speed = STEPS * float(batch.attention_mask.sum()) / (time.perf_counter() - began)
    parameters = sum(p.numel() for p in learner.module.parameters())
    if shape == TINY:  # random weights of the large shape need more than a few steps
        must_fall(losses)
    # forward and backward: 6 per parameter (Kaplan et al. 2020), 12 per layer, channel and token seen (causal: half)
    per_token = 6 * parameters + 6 * shape.layers * shape.heads * shape.head_dim * length
    numbers = {"tokens_per_s": speed, "tflop_per_s": per_token * speed / 1e12, "parameters": float(parameters)}
    detail = f"loss {_shown(losses)}; {speed:,.0f} tokens/s with {parameters / 1e6:.2g} M parameters"
    name = torch.cuda.get_device_name() if cuda else ""
    peak = next((value for part, value in PEAK_TFLOP_PER_S.items() if part in name), None)
    if peak is not None:
        numbers["mfu"] = numbers["tflop_per_s"] / peak
        detail += f", MFU {numbers['mfu']:.0%} of {name}'s {peak} TFLOP/s"
    return Outcome(detail=detail, numbers=numbers)


def synchronize() -> None:
    """Wait for every GPU that this process may use."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def determinism(folder: Path) -> Outcome:
    """Two learners, the same steps, with `--train.full_determinism_enable`."""
    model, batch = make_model(folder / "model"), small_batch()
    states = []
    for _ in range(2):
        learner = make_learner(model, settings(), determinism=True)
        take_steps(learner, batch, 2)
        states.append({n: p.detach().cpu().clone() for n, p in learner.module.named_parameters()})
        del learner
    other = [name for name, tensor in states[0].items() if not torch.equal(tensor, states[1][name])]
    if other:
        raise CheckError(f"{len(other)} of {len(states[0])} tensors differ after two steps, the first {other[0]!r}")
    return Outcome(detail=f"{len(states[0])} tensors are equal after two steps, twice")


def _same_steps(folder: Path, what: str, shape: Shape = TINY, **changes: Any) -> Outcome:
    """Steps with changed settings against those with the usual ones."""
    model, batch = make_model(folder / "model", shape), small_batch()
    expected = take_steps(make_learner(model, settings()), batch)
    losses = take_steps(make_learner(model, settings(**changes)), batch)
    must_fall(expected)
    worst = must_agree(losses, expected, what)
    return Outcome(detail=f"losses differ by {worst:.1e} at most", numbers={"relative_difference": worst})


def zero3(folder: Path) -> Outcome:
    """ZeRO-3 against ZeRO-2."""
    return _same_steps(folder, "--ds.zero_stage 3", zero_stage=3)


def offload(folder: Path) -> Outcome:
    """`--ds.adam_offload` against an optimiser on the device."""
    return _same_steps(folder, "--ds.adam_offload", adam_offload=True)


def require_cuda() -> None:
    """Raises CheckError where torch does not find the machine's GPU."""
    if not torch.cuda.is_available():
        raise CheckError(f"torch {torch.__version__} finds no GPU on a machine that has one: see the row versions")


def sleep_wake(folder: Path) -> Outcome:
    """Device memory before sleep, asleep and awake again."""
    require_cuda()
    shape = replace(TINY, hidden=1024, heads=16, intermediate=4096)
    learner = make_learner(make_model(folder / "model", shape), settings(enable_sleep=True), shares_device=True)
    batch = small_batch()
    take_steps(learner, batch, 1)
    before = torch.cuda.memory_reserved()
    learner.sleep()
    asleep = torch.cuda.memory_reserved()
    learner.wake()
    take_steps(learner, batch, 1)
    states = 12 * sum(p.numel() for p in learner.module.parameters())  # master weights and Adam's two moments, fp32
    numbers = {"before_mib": before / MIB, "asleep_mib": asleep / MIB, "states_mib": states / MIB}
    if before - asleep < 0.9 * states:
        raise CheckError(
            f"asleep the learner holds {asleep / MIB:.0f} MiB of {before / MIB:.0f}, although its training states take "
            f"{states / MIB:.0f}"
        )
    return Outcome(detail=f"{before / MIB:.0f} MiB, asleep {asleep / MIB:.0f} MiB", numbers=numbers)


def liger(folder: Path) -> Outcome:
    """Log-probs with Liger's kernels against those without."""
    require_cuda()
    model, batch = make_model(folder / "model"), small_batch()
    scores = []
    for kernels in (False, True):
        logprobs = make_learner(model, settings(use_liger_kernel=kernels)).score(batch).logprobs
        assert logprobs is not None
        scores.append(logprobs[batch.action_mask].double())
    mean = float((scores[0] - scores[1]).abs().mean())
    if not mean <= SAME_LOSS[dtype()] * float(scores[0].abs().mean()):
        raise CheckError(f"mean |log-prob difference| {mean:.3g} with --ds.use_liger_kernel")
    return Outcome(detail=f"mean |log-prob difference| {mean:.1e}", numbers={"mean_difference": mean})


def lora(folder: Path) -> Outcome:
    """Adapters on weights in full."""
    return _adapters(folder, settings(lora=LoraConfig(rank=8)))


def lora_4bit(folder: Path) -> Outcome:
    """Adapters on 4-bit weights."""
    require_cuda()
    return _adapters(folder, settings(load_in_4bit=True, lora=LoraConfig(rank=8)))


def _adapters(folder: Path, ds: DsConfig) -> Outcome:
    """Steps of adapters; the reference under them; the model that engines get, read whole; a checkpoint."""
    from transformers import AutoModelForCausalLM

    model, batch = make_model(folder / "model"), small_batch()
    learner = make_learner(model, ds)
    before = _of_base(learner, batch)
    losses = take_steps(learner, batch)
    must_fall(losses)
    moved = float((_of_base(learner, batch) - before).abs().max())
    if not moved <= SAME_REFERENCE:
        raise CheckError(f"the reference, the policy without its adapters, moved by {moved:.3g}")
    stream = learner.named_parameter_buckets(1 << 26)
    weights = {name: tensor.cpu().clone() for bucket in stream for name, tensor in bucket}
    merged: Any = AutoModelForCausalLM.from_pretrained(model, dtype=next(iter(weights.values())).dtype)
    merged.save_pretrained(folder / "merged", state_dict=weights)
    spec = LearnerSpec(role=Role.REFERENCE, model_path=str(folder / "merged"), ds=settings())
    learner.save_checkpoint(str(folder / "checkpoint"))
    own, engines = learner.score(batch).logprobs, Learner(spec).score(batch).logprobs
    take_steps(learner, batch, 1)
    learner.load_checkpoint(str(folder / "checkpoint"))
    again = learner.score(batch).logprobs
    assert again is not None
    assert own is not None
    assert engines is not None
    if not torch.equal(again, own):
        raise CheckError("a checkpoint brings back other adapters than were saved")
    mean = float((own - engines)[batch.action_mask].double().abs().mean())
    if not mean <= SAME_LOSS[dtype()] * float(own[batch.action_mask].double().abs().mean()):
        raise CheckError(f"merged for the engines the model computes something else: mean |difference| {mean:.3g}")
    return Outcome(detail=f"loss {_shown(losses)}, merged: mean |log-prob difference| {mean:.1e}")


def _of_base(learner: Learner, batch: Batch) -> torch.Tensor:
    with learner.base():
        logprobs = learner.score(batch).logprobs
    assert logprobs is not None
    return logprobs
