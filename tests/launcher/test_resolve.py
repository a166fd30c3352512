"""What `auto`, implied and GPU-only options become."""

from __future__ import annotations

import datetime
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.commands import TRAIN_DPO, TRAIN_RM, TRAIN_SFT
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import values_of
from openrlhf.launcher.machine import FLASH_ATTENTION, Machine, detect_machine, installed_flash_attention
from openrlhf.launcher.parsing import parse
from openrlhf.launcher.placement import roles
from openrlhf.launcher.resolve import resolve, resolve_supervised
from openrlhf.learner.spec import Role
from support.launcher_flags import parse_train_ppo

CPU, GPUS = Machine(gpus=0), Machine(gpus=8)


def resolved(machine: Machine, *argv: str) -> tuple[TrainPPOConfig, list[str]]:
    return resolve(parse_train_ppo(argv), machine)


def test_defaults_on_a_cpu() -> None:
    config, notes = resolved(CPU)
    assert notes == []
    assert config.actor.num_gpus_per_node == config.ref.num_gpus_per_node == 1
    assert (config.ds.param_dtype, config.ds.attn_implementation) == ("fp32", "sdpa")
    assert (config.vllm.sync_backend, config.vllm.dtype, config.vllm.sync_tolerance) == ("gloo", "float32", 1e-3)


def test_defaults_on_gpus() -> None:
    config, notes = resolved(GPUS)
    assert notes == []
    assert config.actor.num_gpus_per_node == 8
    assert (config.ds.param_dtype, config.ds.attn_implementation) == ("bf16", "flash_attention_2")
    assert (config.vllm.sync_backend, config.vllm.dtype, config.vllm.sync_tolerance) == ("nccl", "bfloat16", None)
    assert resolved(Machine(gpus=4))[0].actor.num_gpus_per_node == 4


@pytest.mark.parametrize(
    ("trainer", "engine", "given", "expected"),
    [
        ("fp32", "float32", None, 1e-3),
        ("fp32", "bfloat16", None, None),
        ("bf16", "float32", None, None),
        ("bf16", "auto", None, None),
        ("bf16", "auto", "0.02", 0.02),
        ("fp32", "auto", "0.02", 0.02),
    ],
)
def test_the_sync_tolerance_is_a_number_in_fp32_and_where_the_user_gives_one(
    trainer: str, engine: str, given: str | None, expected: float | None
) -> None:
    argv = ["--ds.param_dtype", trainer, "--vllm.dtype", engine]
    config, _ = resolved(CPU, *argv, *(() if given is None else ("--vllm.sync_tolerance", given)))
    assert config.vllm.sync_tolerance == expected


@pytest.mark.parametrize(
    ("argv", "note"),
    [
        (["--vllm.sync_backend", "nccl"], "--vllm.sync_backend nccl becomes gloo"),
        (["--vllm.sync_backend", "ipc"], "--vllm.sync_backend ipc becomes gloo"),
        (["--ds.attn_implementation", "flash_attention_3"], "flash_attention_3 becomes sdpa"),
        (["--ds.enable_sleep"], "--ds.enable_sleep is off"),
        (["--vllm.enable_sleep"], "--vllm.enable_sleep is off"),
        (["--vllm.enforce_eager"], "--vllm.enforce_eager changes nothing"),
        (["--vllm.gpu_memory_utilization", "0.5"], "VLLM_CPU_KVCACHE_SPACE"),
        (["--ds.adam_offload"], "--ds.adam_offload is off"),
        (["--ref.offload"], "--ref.offload is off"),
        (["--reward.offload"], "--reward.offload is off"),
    ],
)
def test_gpu_options_on_a_cpu_get_one_line_each(argv: list[str], note: str) -> None:
    (line,) = resolved(CPU, *argv)[1]
    assert note in line
    assert resolved(GPUS, *argv)[1] == []


def test_values_that_fit_a_cpu_are_kept() -> None:
    config, notes = resolved(CPU, "--ds.param_dtype", "bf16", "--ds.attn_implementation", "eager")
    assert (config.ds.param_dtype, config.ds.attn_implementation, notes) == ("bf16", "eager", [])


@pytest.mark.parametrize(
    ("argv", "backend"),
    [
        ([], "nccl"),
        (["--train.colocate_all"], "ipc"),
        (["--train.colocate_all", "--vllm.sync_backend", "nccl"], "ipc"),
        (["--train.colocate_all", "--train.async_enable"], "nccl"),
        (["--vllm.sync_backend", "ipc"], "ipc"),
    ],
)
def test_weight_transfer_on_gpus(argv: list[str], backend: str) -> None:
    assert resolved(GPUS, *argv)[0].vllm.sync_backend == backend


def test_how_adapters_reach_the_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # is read from vLLM's source, which the launcher's own environment lacks
    monkeypatch.setattr("openrlhf.rollout.vllm.adapters.serves_adapters", lambda name: name == "Qwen3ForCausalLM")
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    lora = ["--ds.lora.rank", "8", "--actor.model_name_or_path", str(tmp_path)]

    def choice(machine: Machine, *argv: str) -> tuple[str, str]:
        config, notes = resolved(machine, *argv)
        return config.vllm.lora_push, " ".join(note for note in notes if "lora_push" in note)

    assert choice(GPUS) == ("merged", "")
    assert choice(GPUS, *lora, "--vllm.lora_push", "adapter") == ("adapter", "")
    for machine, argv, chosen, words in [
        (GPUS, lora, "adapter", "is adapter: weights travel over nccl"),
        (GPUS, [*lora, "--train.colocate_all"], "merged", "is merged: weights stay on the device"),
        (CPU, lora, "merged", "is merged: weights stay on the host"),
        (Machine(gpus=0, nodes=2), lora, "adapter", "is adapter: weights travel over gloo"),
        (GPUS, [*lora[:-1], "A"], "merged", "is merged: 'A' is no folder"),
        (GPUS, [*lora, "--vllm.engine_class", "support.stub_engine:StubEngine"], "merged", "only vLLM's engines"),
    ]:
        found = choice(machine, *argv)
        assert found[0] == chosen
        assert words in found[1]


def test_dynamic_batches_imply_packing() -> None:
    config, notes = resolved(GPUS, "--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "4096")
    assert config.ds.packing_samples
    assert config.rollout.max_tokens_per_gpu == 4096
    assert notes[0] == "--train.dynamic_batch_enable switches --ds.packing_samples on"
    config, _ = resolved(GPUS, "--train.dynamic_batch_enable", "--data.max_images_per_prompt", "1")
    assert not config.ds.packing_samples
    assert config.rollout.max_tokens_per_gpu == config.train.max_tokens_per_gpu


def test_rows_that_are_cut_imply_packing() -> None:
    config, notes = resolved(GPUS, "--ds.ring_attn_size", "2")
    assert config.ds.packing_samples
    assert notes[0] == "--ds.ring_attn_size switches --ds.packing_samples on"


def test_with_adapters_the_reference_needs_nothing() -> None:
    lora = ("--ds.lora.rank", "8", "--actor.model_name_or_path", "A", "--algo.advantage.estimator", "reinforce")
    config, notes = resolved(GPUS, *lora, "--ref.num_gpus_per_node", "4", "--train.colocate_actor_ref")
    assert config.base_is_reference
    assert Role.REFERENCE not in roles(config)
    assert (config.ref.num_gpus_per_node, config.train.colocate_actor_ref) == (8, False)
    assert [before for note in notes for before, found, _ in [note.partition(" is not needed")] if found] == [
        "--ref.num_gpus_per_node 4",
        "--train.colocate_actor_ref",
    ]
    named, notes = resolved(GPUS, *lora, "--ref.model_name_or_path", "A")
    assert named.base_is_reference
    assert notes[0].startswith("--ref.model_name_or_path A is not needed")


def test_the_base_can_be_the_teacher() -> None:
    line = "--ds.lora.rank 8 --actor.model_name_or_path A --ref.model_name_or_path A"
    config, notes = resolved(GPUS, *line.split(), "--algo.advantage.estimator", "on_policy_distill")
    assert config.base_is_reference
    assert config.ref.model_name_or_path == "A"
    assert not [note for note in notes if "is not needed" in note]


@pytest.mark.parametrize(
    "line", ["--ref.model_name_or_path T", "--ref.remote_url http://h/v1", "--algo.kl.init_coef 0", "--ds.lora.rank 0"]
)
def test_another_model_is_no_base(line: str) -> None:
    config, notes = resolved(GPUS, "--actor.model_name_or_path", "A", "--ds.lora.rank", "8", *line.split())
    assert not config.base_is_reference
    assert not [note for note in notes if "is not needed" in note]
    assert (Role.REFERENCE in roles(config)) is ("T" in line or "lora" in line)


def test_where_a_critic_starts() -> None:
    actor = ["--actor.model_name_or_path", "A"]
    config, (note,) = resolved(GPUS, *actor, "--reward.remote_url", "f.py")
    assert config.critic.model_name_or_path == "A"
    assert "the critic starts from --actor.model_name_or_path" in note
    config, notes = resolved(GPUS, *actor, "--reward.model_name_or_path", "R")
    assert (config.critic.model_name_or_path, notes) == ("R", [])
    config, _ = resolved(GPUS, *actor, "--critic.model_name_or_path", "C")
    assert config.critic.model_name_or_path == "C"
    config, _ = resolved(GPUS, *actor, "--algo.advantage.estimator", "rloo")
    assert config.critic.model_name_or_path is None


def test_checkpointing_of_the_actor_holds_for_the_critic() -> None:
    config, _ = resolved(GPUS, "--actor.gradient_checkpointing_enable", "--actor.gradient_checkpointing_reentrant")
    assert config.critic.gradient_checkpointing_enable
    assert config.critic.gradient_checkpointing_reentrant
    assert not resolved(GPUS, "--critic.gradient_checkpointing_enable")[0].actor.gradient_checkpointing_enable


def test_gspo_implies_the_mean_per_sequence() -> None:
    config, (note,) = resolved(GPUS, "--actor.policy_loss_type", "gspo")
    assert config.actor.loss_agg_mode == "seq-mean-token-mean"
    assert "--actor.loss_agg_mode seq-mean-token-mean" in note


def test_staleness_is_the_queue_size() -> None:
    assert resolved(GPUS, "--train.async_enable", "--train.async_queue_size", "3")[0].train.max_staleness == 3
    assert resolved(GPUS)[0].train.max_staleness is None


def test_run_name() -> None:
    now = datetime.datetime(2031, 1, 31, 9, 30)
    assert resolve(TrainPPOConfig(), CPU, now=now)[0].logger.wandb.run_name == "ppo_0131T09:30"
    assert resolved(CPU, "--logger.wandb.run_name", "mine")[0].logger.wandb.run_name == "mine"


def test_machine(tmp_path: Path) -> None:
    assert detect_machine({}, tmp_path) == Machine(gpus=0, nodes=None)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert detect_machine({}, tmp_path).gpus == 3
    assert detect_machine({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path).gpus == 2
    assert detect_machine({"CUDA_VISIBLE_DEVICES": ""}, tmp_path).gpus == 0
    assert detect_machine({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, tmp_path).gpus == 1


def test_machine_amd(tmp_path: Path) -> None:
    (tmp_path / "dev/dri").mkdir(parents=True)
    for name in ("kfd", "dri/renderD128", "dri/renderD129", "dri/card0"):
        (tmp_path / "dev" / name).touch()
    assert detect_machine({}, tmp_path).gpus == 2
    assert detect_machine({"HIP_VISIBLE_DEVICES": "1"}, tmp_path).gpus == 1


@pytest.mark.parametrize(
    ("command", "line", "path", "value", "words"),
    [
        (TRAIN_SFT, "--train.dynamic_batch_enable", "ds.packing_samples", True, "switches --ds.packing_samples on"),
        (
            TRAIN_RM,
            "--model.compute_fp32_loss_enable",
            "model.compute_fp32_loss_enable",
            True,
            "always computed in fp32",
        ),
        (TRAIN_DPO, "--ref.offload", "ref.offload", False, "in host memory anyway"),
    ],
)
def test_supervised_changes_are_announced(command: Any, line: str, path: str, value: Any, words: str) -> None:
    config, notes = resolve_supervised(parse(command, line.split()).config, CPU, prefix="x")
    assert values_of(config)[path] == value
    assert [note for note in notes if words in note]


WITHOUT_FLASH = Machine(gpus=8, flash_attention=frozenset())


def attention(machine: Machine, *argv: str) -> tuple[str, list[str]]:
    config, notes = resolved(machine, *argv)
    sft, sft_notes = resolve_supervised(parse(TRAIN_SFT, argv).config, machine, prefix="x")
    assert (sft.ds.attn_implementation, sft_notes) == (config.ds.attn_implementation, notes)
    return config.ds.attn_implementation, notes


def test_flash_attention_has_no_fp32_kernel() -> None:
    assert attention(GPUS, "--ds.param_dtype", "fp32") == ("sdpa", [])
    assert attention(GPUS, "--ds.param_dtype", "fp16")[0] == "flash_attention_2"


def test_without_flash_attn_auto_is_sdpa() -> None:
    name, (note,) = attention(WITHOUT_FLASH)
    assert (name, note) == (
        "sdpa",
        "flash-attn is not installed: --ds.attn_implementation becomes sdpa; "
        "pip install flash-attn --no-build-isolation",
    )
    assert attention(WITHOUT_FLASH, "--ds.param_dtype", "fp32") == ("sdpa", [])
    assert attention(WITHOUT_FLASH, "--ds.attn_implementation", "eager") == ("eager", [])
    assert attention(WITHOUT_FLASH, "--ds.attn_implementation", "flash_attention_2") == ("flash_attention_2", [])


def test_installed_kernels_are_those_of_this_environment(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert detect_machine({}, tmp_path).flash_attention == installed_flash_attention()
    for name, distribution in FLASH_ATTENTION.items():
        there = any(d.name.lower().replace("_", "-") == distribution for d in importlib.metadata.distributions())
        assert (name in installed_flash_attention()) == there
