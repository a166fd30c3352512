"""From what the user wrote to what runs: `auto` values, implied options and what GPU options mean without a GPU.

Pure: configuration and machine in, configuration and one line per surprise out. Whether the result is allowed is
decided by the rules (`rules/`), not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from openrlhf.launcher.config import ALL, AUTO_NAME, AUTO_RANKS, TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.machine import FLASH_INSTALL, Machine
from openrlhf.launcher.placement import SECTIONS, engines_share
from openrlhf.launcher.rules.violation import setting, value_at
from openrlhf.launcher.supervised_config import ServeRMConfig, SupervisedConfig, TrainDPOConfig, TrainRMConfig
from openrlhf.rollout.config import VLLM_ENGINE
from openrlhf.rollout.sync_check import FP32_TOLERANCE, noise_bits
from openrlhf.rollout.vllm.adapters import no_room_for_adapter

C = TypeVar("C")
P = TrainPPOConfig

RANKS_PER_NODE = 8
ALL_LINEAR = "all-linear"
FLASH = "flash_attention_2"
ENGINE_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Change:
    """A field that gets another value; `note` where the user should know."""

    path: str
    value: Any
    note: str = ""


Resolver = Callable[[Any, Machine], Iterator[Change]]


def resolve(config: P, machine: Machine, *, now: datetime | None = None) -> tuple[P, list[str]]:
    """Replace everything automatic in an RL configuration; the notes are one line each."""
    steps: Sequence[Resolver] = (
        _base_reference,
        _ranks,
        _ds_device,
        _engine_device,
        _sync,
        _lora_push,
        _engine_dtype,
        _packing,
        _models,
        _implied,
    )
    config, notes = _apply(config, machine, steps)
    return _named(config, "ppo_", now), notes


def resolve_supervised(
    config: SupervisedConfig, machine: Machine, *, prefix: str, now: datetime | None = None
) -> tuple[SupervisedConfig, list[str]]:
    """Replace everything automatic in the configuration of a supervised trainer."""
    config, notes = _apply(config, machine, (_ds_device, _supervised_packing, _supervised_device))
    return _named(config, prefix, now), notes


def resolve_serve_rm(config: ServeRMConfig, machine: Machine) -> tuple[ServeRMConfig, list[str]]:
    """Replace everything automatic in the configuration of the reward server."""
    return _apply(config, machine, (_ds_device,))


def _apply(config: C, machine: Machine, steps: Sequence[Resolver]) -> tuple[C, list[str]]:
    notes: list[str] = []
    for step in steps:
        changes = list(step(config, machine))
        config = build(config, {c.path: c.value for c in changes})
        notes += [c.note for c in changes if c.note]
    return config, notes


def _named(config: Any, prefix: str, now: datetime | None) -> Any:
    if config.logger.wandb.run_name != AUTO_NAME:
        return config
    stamp = (now or datetime.now()).strftime("%m%dT%H:%M")
    return build(config, {"logger.wandb.run_name": prefix + stamp})


def _base_reference(c: P, m: Machine) -> Iterator[Change]:
    """Flags of a reference model that is not loaded."""
    if not c.base_is_reference:
        return
    why = "is not needed: with --ds.lora.rank the actor's base model is the reference, on the actor's own ranks"
    default = TrainPPOConfig()
    names = ["ref.num_nodes", "ref.num_gpus_per_node", "ref.offload"]
    if not c.has_teacher:  # else it says that the base teaches
        names.append("ref.model_name_or_path")
    for name in names:
        if value_at(c, name) != value_at(default, name):
            yield Change(name, value_at(default, name), f"{setting(name, value_at(c, name))} {why}")
    if c.train.colocate_actor_ref and not c.train.colocate_all:
        yield Change("train.colocate_actor_ref", False, f"--train.colocate_actor_ref {why}")


def _ranks(c: P, m: Machine) -> Iterator[Change]:
    per_node = min(RANKS_PER_NODE, m.gpus) if m.gpus else 1
    for role in SECTIONS.values():
        if getattr(c, role).num_gpus_per_node == AUTO_RANKS:
            yield Change(f"{role}.num_gpus_per_node", per_node)


def _ds_device(c: Any, m: Machine) -> Iterator[Change]:
    dtype = c.ds.param_dtype
    if dtype == "auto":
        dtype = "bf16" if m.gpus else "fp32"
        yield Change("ds.param_dtype", dtype)
    attention = c.ds.attn_implementation
    if attention == "auto":
        yield _attention(dtype, m)
    if m.gpus:
        return
    if attention.startswith("flash_attention"):
        note = f"no GPU: --ds.attn_implementation {attention} becomes sdpa"
        yield Change("ds.attn_implementation", "sdpa", note)
    if c.ds.enable_sleep:
        note = "no GPU: --ds.enable_sleep is off, the states are in host memory anyway"
        yield Change("ds.enable_sleep", False, note)
    if c.ds.adam_offload:
        note = "no GPU: --ds.adam_offload is off, the optimiser is in host memory anyway"
        yield Change("ds.adam_offload", False, note)


def _attention(dtype: str, m: Machine) -> Change:
    """What `--ds.attn_implementation auto` is."""
    if not m.gpus or dtype == "fp32":  # flash attention has 16-bit kernels only
        return Change("ds.attn_implementation", "sdpa")
    if FLASH in m.flash_attention:
        return Change("ds.attn_implementation", FLASH)
    note = f"flash-attn is not installed: --ds.attn_implementation becomes sdpa; {FLASH_INSTALL[FLASH]}"
    return Change("ds.attn_implementation", "sdpa", note)


def _engine_device(c: P, m: Machine) -> Iterator[Change]:
    if m.gpus:
        return
    eager = "no GPU: --vllm.enforce_eager changes nothing, engines on CPUs are always eager"
    yield Change("vllm.enforce_eager", True, eager if c.vllm.enforce_eager else "")
    if c.vllm.enable_sleep:
        note = "no GPU: --vllm.enable_sleep is off, there is no GPU memory to free"
        yield Change("vllm.enable_sleep", False, note)
    if c.vllm.gpu_memory_utilization != TrainPPOConfig().vllm.gpu_memory_utilization:
        note = "no GPU: --vllm.gpu_memory_utilization is replaced by the variable VLLM_CPU_KVCACHE_SPACE (GiB)"
        yield Change("vllm.gpu_memory_utilization", TrainPPOConfig().vllm.gpu_memory_utilization, note)
    for name in ("colocate_all", "colocate_actor_ref", "colocate_critic_reward"):
        if getattr(c.train, name):
            yield Change(f"train.{name}", True, f"no GPU: --train.{name} changes nothing, all parts share the CPUs")
    for role in ("ref", "reward"):
        if getattr(c, role).offload:
            note = f"no GPU: --{role}.offload is off, the model is in host memory anyway"
            yield Change(f"{role}.offload", False, note)


def _sync(c: P, m: Machine) -> Iterator[Change]:
    asked = c.vllm.sync_backend
    shared = engines_share(c)
    if not m.gpus:
        note = "" if asked in ("auto", "gloo") else f"no GPU: --vllm.sync_backend {asked} becomes gloo"
        yield Change("vllm.sync_backend", "gloo", note)
    elif shared and asked == "nccl":
        note = "--vllm.sync_backend nccl becomes ipc: NCCL cannot reach an engine on the trainer's own GPU"
        yield Change("vllm.sync_backend", "ipc", note)
    elif asked == "auto":
        yield Change("vllm.sync_backend", "ipc" if shared else "nccl")


def _lora_push(c: P, m: Machine) -> Iterator[Change]:
    """An adapter alone where the bytes of a push matter and the engines can serve it."""
    if c.vllm.lora_push != "auto":
        return
    backend = c.vllm.sync_backend
    if c.ds.lora.rank == 0:
        yield Change("vllm.lora_push", "merged")
    elif backend == "ipc" or (backend == "gloo" and m.nodes in (1, None)):
        why = "weights stay on the device" if backend == "ipc" else "weights stay on the host"
        yield Change("vllm.lora_push", "merged", f"--vllm.lora_push auto is merged: {why}, so their bytes cost little")
    else:
        problem = adapter_problem(c)
        choice = "merged" if problem else "adapter"
        reason = problem or f"weights travel over {backend}, and an adapter is a few percent of them"
        yield Change("vllm.lora_push", choice, f"--vllm.lora_push auto is {choice}: {reason}")


def adapter_problem(c: P) -> str:
    """Why the engines cannot serve the adapter that is trained; empty when they can."""
    if c.vllm.engine_class != VLLM_ENGINE:
        return "only vLLM's engines are known to serve adapters"
    if c.ds.lora.dora:
        return "vLLM serves no DoRA adapters"
    return no_room_for_adapter(c.actor.model_name_or_path or "", adapter_targets(c), c.ds.lora.rank)


def adapter_targets(c: P) -> tuple[str, ...]:
    """The modules that --ds.lora.target_modules names; none: all linear layers."""
    return tuple(name for name in c.ds.lora.target_modules if name != ALL_LINEAR)


def _engine_dtype(c: P, m: Machine) -> Iterator[Change]:
    dtype = ENGINE_DTYPES[c.ds.param_dtype] if c.vllm.dtype == "auto" else c.vllm.dtype
    yield Change("vllm.dtype", dtype)
    if c.vllm.sync_tolerance is None and noise_bits(dtype, ENGINE_DTYPES[c.ds.param_dtype]) is None:
        yield Change("vllm.sync_tolerance", FP32_TOLERANCE)  # else the trainer measures it


def _packing(c: P, m: Machine) -> Iterator[Change]:
    packs = c.ds.packing_samples or c.train.dynamic_batch_enable or c.data.max_images_per_prompt > 0
    if c.ds.ring_attn_size > 1 and not packs:
        yield Change("ds.packing_samples", True, "--ds.ring_attn_size switches --ds.packing_samples on")
    if not c.train.dynamic_batch_enable:
        return
    if not c.ds.packing_samples and c.data.max_images_per_prompt <= 0:  # a packed row loses the places of its images
        yield Change("ds.packing_samples", True, "--train.dynamic_batch_enable switches --ds.packing_samples on")
    if c.rollout.max_tokens_per_gpu is None:
        yield Change("rollout.max_tokens_per_gpu", c.train.max_tokens_per_gpu)


def _supervised_packing(c: SupervisedConfig, m: Machine) -> Iterator[Change]:
    if c.train.dynamic_batch_enable and not c.ds.packing_samples:
        yield Change("ds.packing_samples", True, "--train.dynamic_batch_enable switches --ds.packing_samples on")


def _supervised_device(c: SupervisedConfig, m: Machine) -> Iterator[Change]:
    if isinstance(c, TrainRMConfig) and c.model.compute_fp32_loss_enable:
        note = "--model.compute_fp32_loss_enable changes nothing: losses are always computed in fp32"
        yield Change("model.compute_fp32_loss_enable", True, note)
    if isinstance(c, TrainDPOConfig) and c.ref.offload and not m.gpus:
        note = "no GPU: --ref.offload is off, the model is in host memory anyway"
        yield Change("ref.offload", False, note)


def _models(c: P, m: Machine) -> Iterator[Change]:
    if not c.has_critic:
        return
    if c.actor.gradient_checkpointing_enable and not c.critic.gradient_checkpointing_enable:
        yield Change("critic.gradient_checkpointing_enable", True)
        yield Change("critic.gradient_checkpointing_reentrant", c.actor.gradient_checkpointing_reentrant)
    if c.critic.model_name_or_path is not None:
        return
    if c.has_reward_model and c.reward.model_name_or_path is not None:
        yield Change("critic.model_name_or_path", c.reward.model_name_or_path)
    elif c.actor.model_name_or_path is not None:
        note = "the critic starts from --actor.model_name_or_path; --critic.model_name_or_path chooses another model"
        yield Change("critic.model_name_or_path", c.actor.model_name_or_path, note)


def _implied(c: P, m: Machine) -> Iterator[Change]:
    mode = c.actor.loss.agg_mode
    if mode not in (None, c.actor.loss_agg_mode) and not c.actor.agg_mode_conflicts:
        note = f"--actor.policy_loss_type {c.actor.policy_loss_type} sets --actor.loss_agg_mode {mode}"
        yield Change("actor.loss_agg_mode", mode, note)
    if c.algo.advantage.row.teacher and c.algo.kl.init_coef == TrainPPOConfig().algo.kl.init_coef:
        yield Change("algo.kl.init_coef", 0.0)  # the reference is the teacher, and its KL is what is trained
    if c.reward.choose_by is not None and not {c.reward.choose_by, ALL} & set(c.data.extra_keys):
        yield Change("data.extra_keys", (*c.data.extra_keys, c.reward.choose_by))
    if c.train.async_enable and c.train.max_staleness is None:
        yield Change("train.max_staleness", c.train.async_queue_size)
