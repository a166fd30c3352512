"""What an engine is started with: plain data that crosses process borders. Imports no ML library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from openrlhf.rollout.config import VLLM_ENGINE

SyncBackend = Literal["gloo", "nccl", "ipc"]


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Everything one engine is started with.

    engine: its class, as module:Class (an `InferenceEngine`).
    cpu_threads: of each worker, where it runs on a CPU.
    executor: how vLLM runs its workers when tensor_parallel_size > 1: "mp" (one machine) or "ray".
    block_size: tokens per KV-cache block; None leaves it to vLLM. On CPU vLLM's own default is 128, so that shorter
    prompts never share a prefix: 32 there.
    full_determinism: on GPUs, results that do not depend on which requests share a step (slower).
    lora_rank: that of the adapter which the engine serves and which pushes bring; 0: it serves a whole model.
    lora_targets: modules that the adapter is on, by the ends of their names; none: all linear layers.
    max_images_per_prompt: 0 for text-only. suppressed_token_ids: never sampled (those that stand for images).
    stats: whether the engine measures its caches and queues (`EngineHealth.totals`).
    engine_args: further arguments of the engine itself, as given by the user.
    """

    model: str
    engine: str = VLLM_ENGINE
    name: str = "engine-0"
    dtype: str = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    cpu_threads: int = 1
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    executor: Literal["mp", "ray"] = "mp"
    enforce_eager: bool = True
    gpu_memory_utilization: float = 0.95
    enable_prefix_caching: bool = False
    enable_sleep: bool = False
    full_determinism: bool = False
    seed: int = 0
    sync_backend: SyncBackend = "gloo"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    max_images_per_prompt: int = 0
    suppressed_token_ids: tuple[int, ...] = ()
    max_num_seqs: int | None = None
    block_size: int | None = None
    trust_remote_code: bool = False
    stats: bool = False
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        """Ranks this engine takes in the weight group."""
        return self.tensor_parallel_size
