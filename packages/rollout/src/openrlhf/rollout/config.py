"""Configuration of the engines (`--vllm.*`) and of sampling (`--rollout.*`). Imports no ML library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VLLM_ENGINE = "openrlhf.rollout.vllm.engine:VllmEngine"


@dataclass
class VllmConfig:
    """The vLLM engines that sample, and how the trained weights reach them."""

    num_engines: int | None = None
    """Number of vLLM engines. RL training needs at least one."""
    tensor_parallel_size: int = 1
    """Tensor-parallel degree of each engine: that many devices per engine (on CPU: that many worker processes)."""
    sync_backend: Literal["auto", "nccl", "ipc", "gloo"] = "auto"
    """How weights travel from the trainer to the engines. auto: CUDA IPC where every engine shares its GPUs with the
    trainer (--train.colocate_all without --train.async_enable), else nccl; gloo on machines without a GPU, where
    engines on the trainer's host read the weights in shared memory."""
    sync_with_ray: bool = False
    """Push weights through ray.util.collective. Not supported: the engines' own weight transfer is always used."""
    enable_prefix_caching: bool = False
    """Keep the KV cache of shared prompt prefixes; it is emptied at every weight push. Without a GPU it is kept
    anyway, unless the model has other layers than attention."""
    enforce_eager: bool = False
    """Run the engines without CUDA graphs and without compilation."""
    enable_sleep: bool = False
    """Free the engines' GPU memory while the trainer works. Needs --train.colocate_all."""
    gpu_memory_utilization: float = 0.95
    """Fraction of each GPU's memory that an engine may take. On CPU the KV cache has a fixed size instead
    (environment variable VLLM_CPU_KVCACHE_SPACE, in GiB)."""
    sync_tolerance: float | None = None
    """Largest mean absolute log-prob difference between trainer and engine after a weight push; above it the run
    stops. None: 1e-3 in fp32; in bf16 and fp16 twice what rounding every layer to one bit less does to the
    trainer's log-probs, measured at every push."""
    sync_bucket_mb: int = 256
    """Weights travel in buckets of about this many MiB, one message per bucket; a larger tensor is a message of its
    own, and over CUDA IPC it sets the size of the buffer."""
    lora_push: Literal["auto", "adapter", "merged"] = "auto"
    """How trained adapters (--ds.lora.rank) reach the engines. merged: added into their weights, which travel whole,
    and engines sample as fast as without adapters. adapter: alone, once the model was sent, a few percent of the bytes;
    the engines compute them beside the model. auto: adapter where weights travel over nccl, or over gloo between
    nodes, and the engines can serve it, else merged."""
    stats_enable: bool = False
    """Log what the engines measure of their caches and queues, as engine/...: use of the KV cache, hits of cached
    prefixes, running and waiting requests. Takes some time of every iteration."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the engines. auto: that of the trainer."""
    engine_args: str = "{}"
    """Further vLLM engine arguments as a JSON object, for example '{"max_num_seqs": 256}'."""
    engine_class: str = VLLM_ENGINE
    """Class of the engines as module:Class. Another inference engine is chosen here; it is given the other --vllm.*
    options."""


@dataclass
class RolloutConfig:
    """How much is sampled per step, and with which sampling parameters."""

    batch_size: int = 1024
    """Prompts per rollout batch."""
    n_samples_per_prompt: int = 1
    """Samples per prompt: the group size of the group estimators."""
    vllm_generate_batch_size: int | None = None
    """Prompts in flight at a time. More than --rollout.batch_size means oversampling and needs --train.async_enable.
    None: --rollout.batch_size."""
    micro_batch_size: int = 1
    """Samples per forward pass when log-probs and values of a rollout batch are computed."""
    max_tokens_per_gpu: int | None = None
    """Token budget per device of those forward passes with --train.dynamic_batch_enable, counted as
    --train.max_tokens_per_gpu is. None: that value."""
    max_new_tokens: int | None = None
    """Most tokens one generation call may produce (each turn of an agent). None: up to --data.max_len."""
    temperature: float = 1.0
    """Sampling temperature. The trainer divides its logits by it too."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this; 1 is off. The trainer's log-probs are over
    the tokens that top_p, top_k and min_p keep."""
    top_k: int = -1
    """Sample from the k most likely tokens; -1 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest one; 0 is off."""
    max_failed_fraction: float = 0.1
    """End the run when more than this fraction of a rollout batch's samples failed (reward function, agent or engine
    error)."""
