"""What an engine is started with: plain data that crosses process borders. Imports no ML library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SyncBackend = Literal["gloo", "nccl", "ipc"]

RESERVED_ENGINE_ARGS = {
    "model": "--actor.model_name_or_path",
    "dtype": "--vllm.dtype",
    "tensor_parallel_size": "--vllm.tensor_parallel_size",
    "enforce_eager": "--vllm.enforce_eager",
    "gpu_memory_utilization": "--vllm.gpu_memory_utilization",
    "enable_prefix_caching": "--vllm.enable_prefix_caching",
    "enable_sleep_mode": "--vllm.enable_sleep",
    "max_model_len": "--data.max_len",
    "seed": "--train.seed",
    "weight_transfer_config": "--vllm.sync_backend",
    "logprobs_mode": "no flag: training needs processed log-probs",
    "skip_tokenizer_init": "no flag: the engine needs the end-of-sequence token",
}
"""Engine arguments that `--vllm.engine_args` may not set, and where they are set instead."""

NOT_TRAINED_ON = {"video": 0, "audio": 0}
"""Other inputs of models that take images."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Everything one engine is started with.

    executor: how vLLM runs its workers when tensor_parallel_size > 1: "mp" (one machine) or "ray".
    block_size: tokens per KV-cache block; None leaves it to vLLM. On CPU vLLM's own default is 128, so that shorter
    prompts never share a prefix: 32 there.
    full_determinism: on GPUs, results that do not depend on which requests share a step (slower).
    max_images_per_prompt: 0 for text-only. suppressed_token_ids: never sampled (those that stand for images).
    engine_args: further vLLM arguments, as given by the user.
    """

    model: str
    name: str = "engine-0"
    dtype: str = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
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
    max_images_per_prompt: int = 0
    suppressed_token_ids: tuple[int, ...] = ()
    max_num_seqs: int | None = None
    block_size: int | None = None
    trust_remote_code: bool = False
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in self.engine_args:
            if key in RESERVED_ENGINE_ARGS:
                raise ValueError(f"--vllm.engine_args must not set {key!r}; use {RESERVED_ENGINE_ARGS[key]}")

    @property
    def num_workers(self) -> int:
        """Ranks this engine takes in the weight group."""
        return self.tensor_parallel_size

    def vllm_args(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's AsyncEngineArgs, without the weight-transfer configuration (an object)."""
        text_only = self.max_images_per_prompt == 0
        args: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enforce_eager": self.enforce_eager,
            "enable_prefix_caching": self.enable_prefix_caching,
            "seed": self.seed,
            "trust_remote_code": self.trust_remote_code,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            # 0 keeps image inputs (and their warm-up) out of multimodal models that train on text alone.
            "limit_mm_per_prompt": {"image": self.max_images_per_prompt, **({} if text_only else NOT_TRAINED_ON)},
            "block_size": self.block_size or (32 if self.device == "cpu" else None),
        }
        if self.device == "cuda":
            args["gpu_memory_utilization"] = self.gpu_memory_utilization
            args["enable_sleep_mode"] = self.enable_sleep
        else:
            # vLLM 0.32 (`_bookkeeping_sync`) rewinds the generator of a seeded request when a step held only a part of
            # its prompt; generators on CPU can't rewind and the engine dies. Goes when vLLM leaves them alone.
            args["enable_chunked_prefill"] = False
            args["skip_mm_profiling"] = True  # measures device memory
        if self.tensor_parallel_size > 1:
            args["distributed_executor_backend"] = self.executor
        if self.max_model_len is not None:
            args["max_model_len"] = self.max_model_len
        if self.max_num_seqs is not None:
            args["max_num_seqs"] = self.max_num_seqs
        return {**args, **self.engine_args}

    def environment(self) -> dict[str, str]:
        """Defaults of environment variables that must be set before vLLM is imported; the user's values win.

        CPU: one OpenMP thread (more of them spin against each other on small models), no core binding (engines would
        all bind to the same cores), a small fixed KV cache (else a large part of the machine's memory).
        VLLM_ENABLE_V1_MULTIPROCESSING=0 saves a worker process when there is one worker. Eager engines on CPU switch
        torch.compile off altogether: vLLM compiles its sampler helpers even then, 20 s at the first request.
        vLLM's warnings are about settings chosen here on purpose; its errors are raised as exceptions too.
        """
        env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        if self.device == "cpu":
            env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
            if self.enforce_eager:
                env["TORCHDYNAMO_DISABLE"] = "1"
        elif self.full_determinism:
            env["VLLM_BATCH_INVARIANT"] = "1"
        if self.sync_backend == "ipc":
            env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # CUDA IPC handles go to the workers pickled
        if self.tensor_parallel_size == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        return env


def parse_engine_args(text: str) -> dict[str, Any]:
    """The value of `--vllm.engine_args`. Raises ValueError unless it is a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--vllm.engine_args must be a JSON object, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"--vllm.engine_args must be a JSON object, got {text!r}")
    for key in value:
        if key in RESERVED_ENGINE_ARGS:
            raise ValueError(f"--vllm.engine_args must not set {key!r}; use {RESERVED_ENGINE_ARGS[key]}")
    return value


def resolve_sync_backend(requested: str, *, has_gpu: bool, colocated: bool) -> SyncBackend:
    """What `--vllm.sync_backend` means on this machine.

    colocated: every engine shares its GPUs with a trainer rank (--train.colocate_all without --train.async_enable);
    then "nccl" means CUDA IPC too, since nccl can't connect two processes on one GPU. Without a GPU: gloo.
    Raises ValueError for "ipc" when engines have GPUs of their own.
    """
    if not has_gpu:
        return "gloo"
    if requested in ("auto", "nccl"):
        return "ipc" if colocated else "nccl"
    if requested == "ipc":
        if not colocated:
            raise ValueError(
                "--vllm.sync_backend ipc needs engines on the trainer's GPUs: "
                "add --train.colocate_all (without --train.async_enable), or use --vllm.sync_backend nccl"
            )
        return "ipc"
    if requested == "gloo":
        return "gloo"
    raise ValueError(f"--vllm.sync_backend must be auto, nccl, ipc or gloo, got {requested!r}")
