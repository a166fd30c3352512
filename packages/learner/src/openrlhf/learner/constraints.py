"""Which of the learner's parameters do not go together, and why. Pure, without any ML library.

`LearnerSpec` refuses what is found here; who reads command lines asks the same functions and puts flags in the place of
the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openrlhf.learner.config import DsConfig, ModelConfig, OptimConfig

NS_STEPS = 5
"""Newton-Schulz iterations of DeepSpeed's Muon."""


@dataclass(frozen=True)
class Conflict:
    """names: the parameters, as paths in `LearnerSpec`. problem: why they do not fit. fix: what to do instead."""

    names: tuple[str, ...]
    problem: str
    fix: str


def ds_conflicts(ds: DsConfig, *, trained: bool) -> Iterator[Conflict]:
    """What DeepSpeed, or the way a model is loaded, makes impossible."""
    if ds.load_in_4bit and trained and ds.lora.rank == 0:
        problem = "4-bit weights cannot be trained, adapters on them can"
        yield Conflict(("ds.load_in_4bit", "ds.lora.rank"), problem, "`ds.lora.rank` 16")
    if ds.load_in_4bit and ds.zero_stage == 3:
        problem = "stage 3 cannot partition 4-bit weights"
        yield Conflict(("ds.load_in_4bit", "ds.zero_stage"), problem, "`ds.zero_stage` 2")
    if trained:
        yield from _adapters(ds)
    if ds.param_dtype == "fp16" and ds.zero_stage == 0:
        problem = "fp16 needs loss scaling, which stage 0 lacks"
        yield Conflict(("ds.param_dtype", "ds.zero_stage"), problem, "`ds.zero_stage` 1, 2 or 3")
    if trained:
        yield from _accumulation(ds)
    if ds.tensor_parallel_size > 1:
        yield from _tensor_parallel(ds)


def _adapters(ds: DsConfig) -> Iterator[Conflict]:
    if ds.lora.dora and ds.zero_stage == 3:
        problem = "DoRA measures whole weights, which stage 3 has in parts"
        yield Conflict(("ds.lora.dora", "ds.zero_stage"), problem, "`ds.zero_stage` 2, or leave `ds.lora.dora` out")
    if ds.lora.save_merged and ds.load_in_4bit:
        problem = "merged into 4-bit weights an adapter is lost in their rounding"
        fix = "export the adapter, and merge it into the base as it came with lora_combiner"
        yield Conflict(("ds.lora.save_merged", "ds.load_in_4bit"), problem, fix)


def _accumulation(ds: DsConfig) -> Iterator[Conflict]:
    names = ("ds.grad_accum_dtype", "ds.param_dtype", "ds.zero_stage")
    asked = ds.grad_accum_dtype
    if asked is not None and ds.zero_stage == 0 and asked != ds.param_dtype:
        problem = "without ZeRO, DeepSpeed accumulates in the dtype of the parameters"
        yield Conflict(names, problem, "`ds.zero_stage` 1 or more, or leave `ds.grad_accum_dtype` out")
    elif (ds.zero_stage, ds.param_dtype, asked) == (1, "bf16", "fp32") and not ds.adam_offload:
        problem = "for this DeepSpeed has an optimiser of its own, which steps with gradients that are not finite"
        yield Conflict(names, problem, "`ds.zero_stage` 2, or leave `ds.grad_accum_dtype` out")


def _tensor_parallel(ds: DsConfig) -> Iterator[Conflict]:
    size = "ds.tensor_parallel_size"
    if ds.zero_stage == 3:
        fix = "`ds.zero_stage` 2, or `ds.tensor_parallel_size` 1"
        yield Conflict((size, "ds.zero_stage"), "ZeRO-3 cuts the parameters already", fix)
    if ds.lora.rank > 0:
        yield Conflict(("ds.lora.rank", size), "adapters are not cut over ranks", "`ds.tensor_parallel_size` 1")
    if ds.load_in_4bit:
        yield Conflict(("ds.load_in_4bit", size), "4-bit weights are not cut", "`ds.tensor_parallel_size` 1")


def sequence_conflicts(ds: DsConfig) -> Iterator[Conflict]:
    """What does not go with rows that are cut over ranks, or has not been shown to give the same numbers with it."""
    size = "ds.ring_attn_size"
    if ds.ring_attn_size == 1:
        if ds.ring_attn_head_stride != 1:
            problem = "there are no rows cut over ranks, whose heads it counts"
            yield Conflict(("ds.ring_attn_head_stride", size), problem, "leave `ds.ring_attn_head_stride` out")
        return
    if not ds.packing_samples:
        problem = "packed rows are cut, not padded ones"
        yield Conflict((size, "ds.packing_samples"), problem, "`ds.packing_samples`")
    others = {"ds.tensor_parallel_size": ds.tensor_parallel_size > 1, "ds.zpg": ds.zpg > 1}
    for name in (name for name, given in others.items() if given):
        yield Conflict((size, name), "they have not been shown to work together", f"`{name}` 1")
    switches = {
        "ds.deepcompile": ds.deepcompile,
        "ds.use_liger_kernel": ds.use_liger_kernel,
        "ds.load_in_4bit": ds.load_in_4bit,
    }
    for name in (name for name, given in switches.items() if given):
        yield Conflict((size, name), "they have not been shown to work together", f"leave `{name}` out")


def optim_conflicts(optim: OptimConfig, ds: DsConfig) -> Iterator[Conflict]:
    """What DeepSpeed's Muon does not do, and would silently ignore."""
    if optim.optim != "muon":
        return
    if ds.lora.rank > 0:
        problem = "Muon orthogonalises the step of a matrix, and an adapter has only factors of one"
        yield Conflict(("optim.optim", "ds.lora.rank"), problem, "`optim.optim` adam")
    if ds.adam_offload:
        yield Conflict(("optim.optim", "ds.adam_offload"), "Muon runs on the GPU only", "leave one of them out")
    if ds.tensor_parallel_size > 1:
        fix = "`optim.optim` adam, or `ds.tensor_parallel_size` 1"
        yield Conflict(("optim.optim", "ds.tensor_parallel_size"), "Muon needs whole matrices", fix)
    if optim.muon.ns_steps != NS_STEPS:
        problem = f"the backend always does {NS_STEPS} Newton-Schulz iterations"
        yield Conflict(("optim.optim", "optim.muon.ns_steps"), problem, f"`optim.muon.ns_steps` {NS_STEPS}")
    if not optim.muon.nesterov:
        problem = "the backend always uses Nesterov momentum"
        yield Conflict(("optim.optim", "optim.muon.nesterov"), problem, "leave `optim.muon.nesterov` out")


def balance_conflicts(model: ModelConfig, aux_loss_coef: float) -> Iterator[Conflict]:
    """A balance loss that would be shown and not trained."""
    if model.gradient_checkpointing_enable and model.gradient_checkpointing_reentrant and aux_loss_coef > 0:
        yield Conflict(
            ("model.gradient_checkpointing_reentrant", "aux_loss_coef"),
            "reentrant checkpointing keeps no gradient of the routers, so the balance loss would not be trained",
            "leave `model.gradient_checkpointing_reentrant` out",
        )
