"""What vLLM is started with: arguments and environment, from our own settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.vllm.arguments import caches_prefixes, environment, vllm_args


def test_engine_args_reach_vllm() -> None:
    spec = EngineSpec(model="m", engine_args={"max_num_seqs": 256, "max_num_batched_tokens": 64})
    args = vllm_args(spec)
    assert args["max_num_seqs"] == 256
    assert args["max_num_batched_tokens"] == 64


def test_engine_args_cannot_contradict_a_flag() -> None:
    with pytest.raises(ValueError, match=r"must not set 'dtype'; use `engine\.dtype`"):
        vllm_args(EngineSpec(model="m", engine_args={"dtype": "float16"}))
    with pytest.raises(ValueError, match="processed log-probs"):
        vllm_args(EngineSpec(model="m", engine_args={"logprobs_mode": "raw_logprobs"}))


@pytest.mark.parametrize(
    ("name", "value"), [("enable_prefix_caching", True), ("enforce_eager", False), ("dtype", "bfloat16")]
)
def test_a_flag_is_vllms_argument(name: str, value: object) -> None:
    assert vllm_args(EngineSpec(model="m"))[name] != value
    assert vllm_args(EngineSpec(model="m", **{name: value}))[name] == value  # pyright: ignore[reportArgumentType]


def test_log_probs_are_always_those_of_the_sampling_distribution() -> None:  # B026
    assert vllm_args(EngineSpec(model="m"))["logprobs_mode"] == "processed_logprobs"


def test_cpu_engines_take_small_cache_blocks_and_no_gpu_settings() -> None:
    cpu = vllm_args(EngineSpec(model="m", gpu_memory_utilization=0.7, enable_sleep=True))
    assert cpu["block_size"] == 32
    assert "gpu_memory_utilization" not in cpu
    assert "enable_sleep_mode" not in cpu
    assert cpu["enable_chunked_prefill"] is False
    gpu = vllm_args(EngineSpec(model="m", device="cuda", gpu_memory_utilization=0.7, enable_sleep=True))
    assert "enable_chunked_prefill" not in gpu
    assert (gpu["block_size"], gpu["gpu_memory_utilization"], gpu["enable_sleep_mode"]) == (None, 0.7, True)


def test_executor_only_with_tensor_parallelism() -> None:
    assert "distributed_executor_backend" not in vllm_args(EngineSpec(model="m"))
    spec = EngineSpec(model="m", tensor_parallel_size=2, executor="ray")
    assert vllm_args(spec)["distributed_executor_backend"] == "ray"
    assert spec.num_workers == 2
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment(spec)


def test_environment_of_a_cpu_engine() -> None:
    env = environment(EngineSpec(model="m"))
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert int(env["MALLOC_TRIM_THRESHOLD_"]) > int(env["MALLOC_MMAP_THRESHOLD_"]) > 500 << 20  # an embedding fits
    assert "MALLOC_TRIM_THRESHOLD_" not in environment(EngineSpec(model="m", device="cuda"))
    assert env["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in environment(EngineSpec(model="m", enforce_eager=False))
    assert "OMP_NUM_THREADS" not in environment(EngineSpec(model="m", device="cuda"))
    assert env["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    bound = EngineSpec(model="m", engine_args={"numa_bind": True})  # vLLM starts a bound core by another program
    assert environment(bound)["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in environment(EngineSpec(model="m", device="cuda"))


def test_images_are_limited_and_other_inputs_left_out() -> None:
    assert vllm_args(EngineSpec(model="m"))["limit_mm_per_prompt"] == {"image": 0}
    limits = vllm_args(EngineSpec(model="m", max_images_per_prompt=2))["limit_mm_per_prompt"]
    assert limits == {"image": 2, "video": 0, "audio": 0}


def test_full_determinism_makes_gpu_engines_batch_invariant() -> None:
    assert environment(EngineSpec(model="m", device="cuda", full_determinism=True))["VLLM_BATCH_INVARIANT"] == "1"
    for other in (EngineSpec(model="m", device="cuda"), EngineSpec(model="m", full_determinism=True)):
        assert "VLLM_BATCH_INVARIANT" not in environment(other)


@pytest.mark.parametrize(
    ("config", "shared"),
    [
        ({"model_type": "llama"}, True),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, True),
        ({"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2_vl_text"}}, True),
        ({"model_type": "qwen3_next", "layer_types": ["full_attention", "linear_attention"]}, False),
        ({"model_type": "x", "text_config": {"layer_types": ["linear_attention"]}}, False),
        ({"model_type": "falcon_h1", "mamba_d_ssm": 64}, False),
        ({"model_type": "jamba", "layers_block_type": ["attention", "mamba"]}, False),
        (None, False),
    ],
)
def test_groups_share_their_prompt_on_a_cpu_where_the_model_allows_it(
    tmp_path: Path, config: dict[str, object] | None, shared: bool
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    spec = EngineSpec(model=str(tmp_path))
    assert vllm_args(spec)["enable_prefix_caching"] is caches_prefixes(spec) is shared
    assert not caches_prefixes(replace(spec, device="cuda"))
    assert caches_prefixes(replace(spec, enable_prefix_caching=True))
