"""Rules of the pipeline: sync and async, sleep, weight transfer, kernels, engine arguments."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Literal

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.known_names import no_such
from openrlhf.launcher.machine import FLASH_INSTALL, Machine
from openrlhf.launcher.placement import engines_share
from openrlhf.launcher.redaction import redact_value
from openrlhf.launcher.rules.violation import Rule, Violation, broken, value_at
from openrlhf.launcher.supervised_config import TrainDPOConfig, TrainRMConfig
from openrlhf.launcher.terms import with_flags
from openrlhf.learner.config import ZERO_BACKEND
from openrlhf.rollout.config import VLLM_ENGINE
from openrlhf.rollout.vllm.arguments import RESERVED_ENGINE_ARGS, unknown_argument, wrong_type
from openrlhf.rollout.vllm.parsers import AUTO as AUTO_PARSER
from openrlhf.rollout.vllm.parsers import parser_names

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
DTYPES = ("fp32", "bf16", "fp16")

P = TrainPPOConfig
Found = Iterator[Violation]


def needs_async(c: P, m: Machine) -> Found:
    """Options that only the asynchronous pipeline has."""
    if c.train.async_enable:
        return
    asked = {
        "train.partial_rollout_enable": c.train.partial_rollout_enable,
        "train.async_queue_size": c.train.async_queue_size != TrainPPOConfig().train.async_queue_size,
        "train.max_staleness": c.train.max_staleness is not None,
    }
    for name, given in asked.items():
        if given:
            fix = f"add --train.async_enable, or leave --{name} out"
            yield broken(c, f"{name} train.async_enable", "only asynchronous training has it", fix)
    size = c.rollout.vllm_generate_batch_size
    if size is not None and size > c.rollout.batch_size:
        yield broken(
            c,
            "rollout.vllm_generate_batch_size rollout.batch_size train.async_enable",
            "sampling ahead of the rollout batch needs asynchronous training",
            f"add --train.async_enable, or --rollout.vllm_generate_batch_size {c.rollout.batch_size}",
        )


def recompute_needs_partial(c: P, m: Machine) -> Found:
    """A KV cache is only kept over a weight push by partial rollout."""
    if c.train.partial_rollout_recompute_kv and not c.train.partial_rollout_enable:
        yield broken(
            c,
            "train.partial_rollout_recompute_kv train.partial_rollout_enable",
            "without partial rollout no request outlives a weight push",
            "add --train.partial_rollout_enable",
        )


def engine_sleep(c: P, m: Machine) -> Found:
    """Engines sleep while the trainer has their GPUs."""
    if c.vllm.enable_sleep and c.train.async_enable:
        problem = "asynchronous engines never rest"
        yield broken(c, "vllm.enable_sleep train.async_enable", problem, "leave --vllm.enable_sleep out")
    elif c.vllm.enable_sleep and not c.train.colocate_all:
        problem = "engines on GPUs of their own have nobody to make room for"
        yield broken(c, "vllm.enable_sleep train.colocate_all", problem, "add --train.colocate_all")


def determinism(c: P, m: Machine) -> Found:
    """Bit-for-bit repetition has no race in it."""
    if c.train.full_determinism_enable and c.train.async_enable:
        problem = "which weights sample what depends on timing"
        yield broken(c, "train.full_determinism_enable train.async_enable", problem, "leave one of them out")


def transfer(c: P, m: Machine) -> Found:
    """Which weight transfer reaches the engines."""
    if c.vllm.sync_backend == "ipc" and not engines_share(c):
        problem = "CUDA IPC reaches engines on the trainer's own GPUs only"
        yield broken(c, "vllm.sync_backend train.colocate_all", problem, "--vllm.sync_backend nccl")
    if c.vllm.sync_backend == "gloo" and m.gpus:
        yield broken(c, "vllm.sync_backend", "gloo is for machines without a GPU", "--vllm.sync_backend auto")


def packing_attention(c: object, m: Machine) -> Found:
    """Packed samples are kept apart by flash attention on GPUs, by a block mask on CPUs."""
    attention = value_at(c, "ds.attn_implementation")
    if value_at(c, "ds.packing_samples") and m.gpus and "flash_attention" not in attention:
        problem = "on GPUs only flash attention keeps packed samples apart"
        fix = "--ds.attn_implementation flash_attention_2"
        if value_at(c, "ds.param_dtype") == "fp32":
            fix += " with --ds.param_dtype bf16"
        elif "flash_attention_2" not in m.flash_attention:
            fix = f"{FLASH_INSTALL['flash_attention_2']} (then {fix} is the default)"
        fix += ", or no packing (--train.dynamic_batch_enable implies it)"
        yield broken(c, "ds.packing_samples ds.attn_implementation", problem, fix)


def flash_attention(c: object, m: Machine) -> Found:
    """Flash attention that was asked for by name has its package and its dtype."""
    name = value_at(c, "ds.attn_implementation")
    if not m.gpus or name not in FLASH_INSTALL:
        return
    if value_at(c, "ds.param_dtype") == "fp32":
        fix = "--ds.attn_implementation sdpa or --ds.param_dtype bf16"
        yield broken(c, "ds.attn_implementation ds.param_dtype", "flash attention has no fp32 kernel", fix)
    if name not in m.flash_attention:
        fix = f"{FLASH_INSTALL[name]}, or --ds.attn_implementation sdpa"
        yield broken(c, "ds.attn_implementation", "its kernels are not installed", fix)


def attention_name(c: object, m: Machine) -> Found:
    """Attention of transformers, or a kernel of the hub."""
    name = value_at(c, "ds.attn_implementation")
    if name.strip() and name not in ATTENTION and "/" not in name:
        fix = f"--ds.attn_implementation with one of {', '.join(ATTENTION)}, or a hub kernel such as owner/name"
        yield broken(c, "ds.attn_implementation", no_such("attention", "ds.attn_implementation", name), fix)


def accumulation_dtype(c: object, m: Machine) -> Found:
    """A dtype that there is."""
    name = "ds.grad_accum_dtype"
    asked = value_at(c, name)
    if asked is not None and asked.strip() and asked not in DTYPES:
        yield broken(c, name, no_such("dtype", name, asked), f"--{name} with one of {', '.join(DTYPES)}")


def liger_needs_gpu(c: object, m: Machine) -> Found:
    """Liger's kernels are GPU kernels."""
    if value_at(c, "ds.use_liger_kernel") and not m.gpus:
        yield broken(c, "ds.use_liger_kernel", "it has GPU kernels only", "leave --ds.use_liger_kernel out")


def tensor_parallel(c: object, m: Machine) -> Found:
    """What DeepSpeed's AutoTP computes in on GPUs."""
    name = "ds.tensor_parallel_size"
    if m.gpus and value_at(c, name) > 1 and value_at(c, "ds.param_dtype") != "bf16":
        yield broken(c, f"{name} ds.param_dtype", "tensor parallelism runs in bf16", "--ds.param_dtype bf16")


def sequence_parallel(c: object, m: Machine) -> Found:
    """What is of whole rows, where rows are cut over ranks."""
    size = "ds.ring_attn_size"
    if value_at(c, size) == 1:
        return
    if value_at(c, "ds.attn_implementation") in ("eager", "flex_attention"):
        problem = "rows are cut over ranks under sdpa and flash attention"
        yield broken(c, f"{size} ds.attn_implementation", problem, "leave --ds.attn_implementation out")
    if value_at(c, "train.share_prompt") == "on":
        problem = "prompts are shared in whole rows"
        yield broken(c, f"{size} train.share_prompt", problem, "--train.share_prompt auto, which then shares none")
    distill = "algo.distill.divergence" if isinstance(c, TrainPPOConfig) else "distill.divergence"
    if not isinstance(c, TrainRMConfig | TrainDPOConfig) and value_at(c, distill) is not None:
        problem = "what a teacher tells is of whole rows"
        yield broken(c, f"{size} {distill}", problem, f"--{size} 1")
    if isinstance(c, TrainPPOConfig):
        kept = {"top_p": c.rollout.top_p < 1, "top_k": c.rollout.top_k > 0, "min_p": c.rollout.min_p > 0}
        for name in (f"rollout.{name}" for name, given in kept.items() if given):
            problem = "the tokens that sampling keeps are found in whole rows"
            yield broken(c, f"{size} {name}", problem, f"leave --{name} out")


def fp16_needs_gpu(c: object, m: Machine) -> Found:
    """Half precision on a CPU."""
    if value_at(c, "ds.param_dtype") == "fp16" and not m.gpus:
        yield broken(c, "ds.param_dtype", "no GPU: a CPU trains in fp32 or bf16", "--ds.param_dtype fp32 or bf16")


def engine_arguments(c: P, m: Machine) -> Found:
    """Engine arguments are a JSON object without arguments that have flags."""
    name = "vllm.engine_args"
    try:
        arguments = json.loads(c.vllm.engine_args)
    except json.JSONDecodeError as error:
        yield broken(c, name, f"not JSON: {error}", f"--{name} '{{\"max_num_seqs\": 256}}'")
        return
    if not isinstance(arguments, dict):
        yield broken(c, name, "it must be a JSON object", f"--{name} '{{\"max_num_seqs\": 256}}'")
        return
    for key, value in arguments.items() if c.vllm.engine_class == VLLM_ENGINE else ():
        place = with_flags(RESERVED_ENGINE_ARGS.get(key, ""))
        if place.startswith("--"):
            yield broken(c, f"{name} {place[2:]}", f"{key!r} has a flag of its own", f"use {place}")
        elif place:
            yield broken(c, name, f"{key!r} has {place}", "leave it out")
        elif problem := unknown_argument(key) or wrong_type(key, redact_value(key, value)):
            yield broken(c, name, problem, "the arguments are those of vLLM's AsyncEngineArgs, with underscores")


def engine_class(c: P, m: Machine) -> Found:
    """The engines' class can be imported."""
    if not _importable(c.vllm.engine_class):
        yield broken(c, "vllm.engine_class", "no such class", f"module:Class, as in {VLLM_ENGINE}")


def answer_parsers(c: P, m: Machine) -> Found:
    """Parsers of answers are vLLM's."""
    kinds: dict[str, Literal["tool_parsers", "reasoning"]] = {
        "agent.tool_parser": "tool_parsers",
        "agent.reasoning_parser": "reasoning",
    }
    for name, kind in kinds.items():
        given, known = value_at(c, name), parser_names(kind)
        if given and c.vllm.engine_class != VLLM_ENGINE:
            yield broken(c, f"{name} vllm.engine_class", "the parsers are vLLM's", f"leave out --{name}")
        elif given and known and given not in {AUTO_PARSER, *known}:
            yield broken(c, name, "vLLM has no such parser", f"auto, or one of {', '.join(sorted(known))}")


def backend(c: object, m: Machine) -> Found:
    """The learner's backend can be imported."""
    if not _importable(value_at(c, "ds.backend")):
        yield broken(c, "ds.backend", "no such function", f"module:function, as in {ZERO_BACKEND}")


def _importable(place: str) -> bool:
    """Whether module:name can be imported, as far as can be seen without doing so."""
    module, colon, name = place.partition(":")
    try:
        return bool(colon and name.isidentifier() and importlib.util.find_spec(module))
    except (ImportError, ValueError):
        return False


RULES: tuple[Rule, ...] = (
    needs_async,
    recompute_needs_partial,
    engine_sleep,
    determinism,
    transfer,
    attention_name,
    flash_attention,
    packing_attention,
    accumulation_dtype,
    liger_needs_gpu,
    tensor_parallel,
    sequence_parallel,
    fp16_needs_gpu,
    engine_arguments,
    engine_class,
    answer_parsers,
    backend,
)
