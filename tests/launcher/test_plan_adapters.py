"""What `openrlhf-launch plan` says of runs with adapters, and with a judge: models of seven billion weights."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from openrlhf.launcher.main import main
from openrlhf.launcher.plan.shape import read_shape
from openrlhf.learner.config import LoraConfig
from support.learner_models import tiny_config

SEVEN_B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
LORA_RUN = (
    "--reward.remote_url examples/python/math_reward_func.py --data.prompt_dataset d --actor.num_gpus_per_node 1"
    " --vllm.num_engines 1 --train.colocate_all --vllm.enable_sleep --ds.enable_sleep"
    " --algo.advantage.estimator reinforce_baseline --rollout.n_samples_per_prompt 8 --ds.lora.rank 16"
    " --actor.adam.lr 1e-5 --actor.gradient_checkpointing_enable --ckpt.output_dir out"
)


@pytest.mark.parametrize(
    ("card", "line", "fits"),
    [
        (80, "--vllm.gpu_memory_utilization 0.6", True),
        (80, "--vllm.gpu_memory_utilization 0.6 --ds.lora.rank 0", False),
        (24, "--ds.load_in_4bit --vllm.gpu_memory_utilization 0.7", True),
        (24, "--vllm.gpu_memory_utilization 0.7", False),
    ],
)
def test_a_7b_run_with_adapters_on_one_card(
    card: int, line: str, fits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B))
    flags = [*shlex.split(LORA_RUN), "--actor.model_name_or_path", str(tmp_path), *line.split()]
    assert main(["plan", "--gpus", "1", "--gpu-memory", str(card), "--json", "--", *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    lora = "lora.rank" not in line
    assert plan["parameters"] == {"actor": 7_615_616_512, **({} if lora else {"ref": 7_615_616_512})}
    sizes = {(part["role"], part["name"]): part["bytes"] for part in plan["memory"]}
    assert any("do not fit" in warning for warning in plan["warnings"]) is not fits
    if lora:
        a_layer = 16 * (2 * 3584 + 2 * (3584 + 512) + 2 * 3584 + 3 * (3584 + 18944))
        assert sizes["actor", "adapters"] == 2 * 28 * a_layer
        assert sizes["actor", "optimizer"] == 12 * 28 * a_layer
        assert plan["weight_sync"]["bytes"] == 2 * 7_615_616_512  # over CUDA IPC they are merged
        assert "log-probs by the policy without its adapters" in plan["forwards"]


def test_four_bits_are_half_a_byte_and_their_scales(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B))
    flags = [*shlex.split(LORA_RUN), "--actor.model_name_or_path", str(tmp_path), "--ds.load_in_4bit"]
    assert main(["plan", "--gpus", "1", "--gpu-memory", "24", "--json", "--", *flags]) == 0
    sizes = {(part["role"], part["name"]): part["bytes"] for part in json.loads(capsys.readouterr().out)["memory"]}
    matrices = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert sizes["actor", "parameters"] == pytest.approx(0.516 * matrices + 2 * (7_615_616_512 - matrices), rel=1e-3)
    assert sizes["engines", "parameters"] == 2 * 7_615_616_512


@pytest.mark.parametrize(
    ("arch", "targets"),
    [
        *((arch, ("all-linear",)) for arch in ("qwen3", "gpt2", "llama")),
        ("qwen3", ("q_proj", "down_proj")),
        ("llama", ("up_proj", "o_proj")),
        ("gpt2", ("c_attn", "c_proj")),
    ],
)
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_counted_as_peft_makes_them(
    arch: str, targets: tuple[str, ...], dora: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from openrlhf.learner.lora import add_adapters

    config = tiny_config(arch)
    model = AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(rank=3, target_modules=targets, dora=dora)
    add_adapters(model, lora)
    config.save_pretrained(tmp_path)
    real = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert read_shape(str(tmp_path)).adapter_parameters(lora) == real


def test_a_judge_takes_devices_and_memory_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B))
    judge = f"--reward.remote_url quality=judge --judge.rubric r.toml --judge.model_name_or_path {tmp_path}"
    judge += " --judge.num_engines 2 --judge.tensor_parallel_size 2"
    plans = []
    for words in ("", judge):
        flags = [*shlex.split(LORA_RUN), "--actor.model_name_or_path", str(tmp_path), *words.split()]
        assert main(["plan", "--gpus", "8", "--gpu-memory", "80", "--json", "--", *flags]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    before, plan = plans
    assert plan["gpus"]["shares"] == before["gpus"]["shares"] | {"judge": 4}
    assert {"members": "judge", "devices": 4, "detail": "2 engines x TP 2"} in plan["placement"]
    assert plan["parameters"]["judge"] == 7_615_616_512
    parts = {part["name"]: part["bytes"] for part in plan["memory"] if part["group"] == "judge"}
    assert parts["parameters"] == 7_615_616_512 * 2 // 2
    assert parts["kv_cache"] > 0
    assert plan["totals"]["judge"]["training"] == sum(parts.values())
