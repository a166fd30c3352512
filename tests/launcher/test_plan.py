"""`openrlhf-launch plan`: its numbers recomputed from first principles, and what it prints."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.main import main
from openrlhf.launcher.plan.memory import (
    GIB,
    activation_bytes,
    gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
    persistent_bytes,
)
from openrlhf.launcher.plan.shape import read_shape
from support.cpu_time import small_programs

QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
PARAMETERS_4B = 4_022_468_096  # what the published checkpoint holds

QUICK_LAUNCH = (
    "--reward.remote_url examples/python/math_reward_func.py --data.prompt_dataset zhuzilin/dapo-math-17k"
    " --data.input_key prompt --data.label_key label --data.apply_chat_template --ds.packing_samples --ref.num_nodes 1"
    " --ref.num_gpus_per_node 4 --actor.num_nodes 1 --actor.num_gpus_per_node 4 --vllm.num_engines 2"
    " --vllm.tensor_parallel_size 2 --train.colocate_all --vllm.gpu_memory_utilization 0.7 --vllm.enable_sleep"
    " --ds.enable_sleep --vllm.sync_backend nccl --vllm.enforce_eager --algo.advantage.estimator reinforce_baseline"
    " --algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.init_coef 1e-5 --actor.entropy_coef 0.0"
    " --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop --rollout.batch_size 128"
    " --rollout.n_samples_per_prompt 8 --train.batch_size 1024 --algo.dynamic_filtering_enable"
    " --algo.dynamic_filtering_range 0.0 1.0 --train.dynamic_batch_enable --data.max_len 74240"
    " --rollout.max_new_tokens 64000 --ds.zero_stage 3 --ds.param_dtype bf16 --actor.gradient_checkpointing_enable"
    " --actor.adam.lr 5e-7 --ckpt.output_dir ./exp/Qwen3-4B-Thinking"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Qwen3-4B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_4B), encoding="utf-8")
    return folder


def plan_json(model: Path, flags: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    argv = ["plan", "--json", *options, "--", "--actor.model_name_or_path", str(model), *shlex.split(flags)]
    assert main(argv) == 0
    return json.loads(capsys.readouterr().out)


def part(plan: dict[str, Any], role: str, name: str) -> dict[str, Any]:
    return next(p for p in plan["memory"] if (p["role"], p["name"]) == (role, name))


def test_quick_launch_with_rows_over_two_gpus(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = QUICK_LAUNCH, f"{QUICK_LAUNCH} --ds.ring_attn_size 2"
    whole, cut = (plan_json(model, line, capsys, "--gpus", "8", "--gpu-memory", "80") for line in lines)
    for before, after in zip(whole["memory"], cut["memory"], strict=True):
        share = 2 if before["name"] == "activations" else 1
        assert after["bytes"] == pytest.approx(before["bytes"] / share, rel=1e-6), before
    assert max(cut["totals"]["actor + ref + engines"].values()) < 80 * GIB
    assert (cut["batches"]["data_parallel_ranks"], cut["batches"]["samples_per_rank"]) == (2, 512)


def test_quick_launch_on_8_gpus(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(model, QUICK_LAUNCH, capsys, "--gpus", "8", "--prompts", "17000")
    assert plan["parameters"] == {"actor": PARAMETERS_4B, "ref": PARAMETERS_4B}
    # ZeRO-3 in bf16 on 4 ranks: 2 bytes of weights and of gradients, 12 of fp32 weights and two moments, each / 4.
    for role, name, size in [
        ("actor", "parameters", 2 * PARAMETERS_4B / 4),
        ("actor", "gradients", 2 * PARAMETERS_4B / 4),
        ("actor", "optimizer", 12 * PARAMETERS_4B / 4),
        ("ref", "parameters", 2 * PARAMETERS_4B / 4),
        ("engines", "parameters", 2 * PARAMETERS_4B / 2),
        # 70 % of 80 GiB, less the weights and what a program on a GPU takes (1.5 GiB).
        ("engines", "kv_cache", 0.7 * 80 * GIB - PARAMETERS_4B - 1.5 * GIB),
    ]:
        assert part(plan, role, name)["bytes"] == pytest.approx(size, rel=0.01), (role, name)
    # A token's keys and values: 2 x 36 layers x 8 heads x 128 x 2 bytes, halved by TP 2.
    per_token = 2 * 36 * 8 * 128 * 2 / 2
    assert plan["kv_cache_tokens"] == pytest.approx((0.7 * 80 * GIB - PARAMETERS_4B - 1.5 * GIB) / per_token, rel=0.01)
    assert part(plan, "actor", "optimizer")["phases"] == ["training", "optimizer_step"]  # asleep otherwise
    assert part(plan, "engines", "kv_cache")["phases"] == ["generation"]
    (group,) = plan["placement"]
    assert (group["members"], group["devices"]) == ("actor + ref + engines", 4)
    assert plan["weight_sync"] == {
        "backend": "ipc",
        "bytes": 2 * PARAMETERS_4B,
        "buckets": math.ceil(2 * PARAMETERS_4B / 2**28),
        "engines": 2,
    }
    assert plan["batches"]["samples_per_rollout"] == 1024
    assert plan["batches"]["optimizer_steps_per_rollout"] == 1
    assert plan["batches"]["lr_horizon"] == 133
    assert plan["totals"]["actor + ref + engines"]["generation"] < 80 * GIB
    assert any("upper bounds" in text for text in plan["warnings"])


def test_a_run_that_does_not_fit_is_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = QUICK_LAUNCH.replace("--vllm.enable_sleep", "")
    plan = plan_json(model, flags, capsys, "--gpus", "8")
    assert any("training" in text and "do not fit on a GPU of 80.00 GiB" in text for text in plan["warnings"])
    plan = plan_json(model, QUICK_LAUNCH, capsys, "--gpus", "8", "--gpu-memory", "12")
    assert any("fewer than one sample of --data.max_len" in text for text in plan["warnings"])


def test_the_table_is_for_people(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--gpus", "8", "--", "--actor.model_name_or_path", str(model), *shlex.split(QUICK_LAUNCH)]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "actor + ref + engines                  4 devices   actor 1 x 4, ref 1 x 4, 2 engines x TP 2" in text
    assert "LR horizon         unknown: give --prompts, or --train.max_steps" in text
    assert "weight push: 7.49 GiB to each of 2 engines" in text


SIXTEEN = (  # without colocation: 4 train, a reference model takes the default of 8, 4 engines
    "--reward.remote_url f.py --data.prompt_dataset D --algo.advantage.estimator reinforce_baseline"
    " --rollout.n_samples_per_prompt 8 --actor.num_gpus_per_node 4 --vllm.num_engines 4"
)


def test_l01_the_plan_says_the_total_and_where_it_does_not_fit(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(model, SIXTEEN, capsys, "--gpus", "8")
    shares = {"actor": 4, "ref": 8, "engines": 4}
    assert plan["gpus"] == {"total": 16, "shares": shares, "per_node": 8, "nodes": 1, "needed": 2}
    assert (
        "the run takes 16 GPUs (actor: 4, ref: 8, engines: 4), 2 nodes of 8; it does not fit on 1 node of 8 GPUs: "
        "--train.colocate_all, or fewer GPUs per role"
    ) in plan["warnings"]
    plan = plan_json(model, SIXTEEN, capsys, "--gpus", "8", "--nodes", "2")
    assert [text for text in plan["warnings"] if "does not fit" in text] == []
    plan = plan_json(model, SIXTEEN.replace("--vllm", "--actor.num_nodes 2 --vllm"), capsys, "--gpus", "16")
    assert (plan["gpus"]["nodes"], plan["gpus"]["needed"], plan["gpus"]["total"]) == (2, 2, 20)


def test_l01_in_words(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--", "--actor.model_name_or_path", str(model), *shlex.split(SIXTEEN)]
    assert main(["plan", "--gpus", "8", *argv]) == 0
    text = capsys.readouterr().out
    assert "  total                                 16 GPUs      2 nodes of 8\n" in text
    assert "it does not fit on 1 node of 8 GPUs" in text
    assert main(["plan", "--gpus", "8", "--nodes", "1", *argv]) == 2
    assert "the run takes 16 GPUs (actor: 4, ref: 8, engines: 4) and 8 are there" in capsys.readouterr().err


def test_l01_engines_lie_on_one_node_each(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = SIXTEEN.replace("engines 4", "engines 3 --vllm.tensor_parallel_size 5 --algo.kl.init_coef 0")
    assert plan_json(model, flags, capsys, "--gpus", "8")["gpus"]["needed"] == 3  # 19 GPUs, and one engine per node
    argv = ["plan", "--gpus", "4", "--", "--actor.model_name_or_path", str(model), *shlex.split(flags)]
    assert main(argv) == 2
    assert "an engine lies on one node, and a node has 4 GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stage", "itemsize", "world", "expected"),
    [
        # (parameters, gradients, gradients inside the step, optimiser) in bytes per parameter
        (0, 2, 4, (2, 2, 6, 12)),
        (0, 4, 4, (4, 4, 4, 8)),
        (1, 2, 4, (2, 2, 1, 3)),
        (2, 2, 4, (2, 0.5, 1, 3)),
        (2, 4, 2, (4, 2, 2, 6)),
        (3, 2, 4, (0.5, 0.5, 1.5, 3)),
        (3, 4, 2, (2, 2, 4, 6)),
    ],
)
def test_zero_stages(stage: int, itemsize: int, world: int, expected: tuple[float, ...]) -> None:
    found = (
        parameter_bytes(1000, stage=stage, itemsize=itemsize, world=world),
        gradient_bytes(1000, stage=stage, itemsize=itemsize, world=world),
        gradient_bytes(1000, stage=stage, itemsize=itemsize, world=world, stepping=True),
        optimizer_bytes(1000, stage=stage, itemsize=itemsize, world=world),
    )
    assert tuple(size / 1000 for size in found) == expected


def test_gradients_rest_nowhere_but_on_stage_3(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = QUICK_LAUNCH.replace("--ds.enable_sleep", "")
    plan = plan_json(model, flags, capsys, "--gpus", "8")
    assert part(plan, "actor", "gradients")["phases"] == ["generation", "make_experience", "training"]
    plan = plan_json(model, f"{flags} --ds.zero_stage 2", capsys, "--gpus", "8")
    assert part(plan, "actor", "gradients")["phases"] == ["training"]
    assert part(plan, "actor", "gradients in fp32")["phases"] == ["optimizer_step"]


def test_stage_3_leaves_small_parameters_whole(model: Path) -> None:
    shape = read_shape(str(model))
    # norms of 2560 (two per layer, one at the end) and of 128 (two per layer)
    assert persistent_bytes(shape, stage=3, itemsize=2) == 2 * (36 * (2 * 2560 + 2 * 128) + 2560)
    assert persistent_bytes(shape, stage=2, itemsize=2) == 0
    assert shape.parameters_in_tensors(up_to=2560 * 1024) - shape.parameters_in_tensors(up_to=2560) == (
        36 * 2 * 2560 * 1024  # keys and values
    )


def test_muon_keeps_one_moment_of_its_matrices() -> None:
    assert optimizer_bytes(1000, stage=0, itemsize=4, world=1, matrices=600) == 600 * 4 + 400 * 8


def test_checkpointing_stores_one_layer_and_the_inputs(model: Path) -> None:
    shape = read_shape(str(model))
    plain = activation_bytes(shape, 1000, 2, checkpointing=False)
    lean = activation_bytes(shape, 1000, 2, checkpointing=True)
    assert lean == plain // 36 + 36 * 1000 * 2 * 2560


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (  # the quickstart's model
            QWEN3_4B
            | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
            | {"head_dim": 32, "intermediate_size": 192, "vocab_size": 261},
            123_648,
        ),
        (  # the same with untied embeddings
            QWEN3_4B
            | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
            | {"head_dim": 32, "intermediate_size": 192, "vocab_size": 261, "tie_word_embeddings": False},
            140_352,
        ),
        (
            {
                "model_type": "gpt2",
                "n_embd": 768,
                "n_layer": 12,
                "n_head": 12,
                "vocab_size": 50257,
                "n_positions": 1024,
            },
            124_439_808,
        ),
        (
            {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
            | {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
            8_030_261_248,
        ),
        (
            {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
            | {"num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
            494_032_768,
        ),
        (
            {"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
            | {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8}
            | {"num_experts_per_tok": 2},
            46_702_792_704,
        ),
    ],
)
def test_published_parameter_counts(config: dict[str, Any], parameters: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape = read_shape(str(tmp_path))
    assert shape.exact
    assert shape.parameters == parameters


def test_a_vision_model_counts_its_text_part_as_an_estimate(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}, "text_config": QWEN3_4B}), encoding="utf-8")
    shape = read_shape(str(tmp_path))
    assert shape.parameters == PARAMETERS_4B
    assert not shape.exact


@pytest.mark.parametrize(
    ("content", "message"), [(None, "is no local model"), ("{", "not JSON"), ("{}", "dimensions are incomplete")]
)
def test_models_that_cannot_be_read(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan", "--", "--actor.wrong", "1"], "--actor.wrong is not a flag"),
        (["plan", "--", *shlex.split(QUICK_LAUNCH)], "there is no model to train"),
        (
            ["plan", "--gpus", "8", "--", "--actor.model_name_or_path", "no/where", *shlex.split(QUICK_LAUNCH)],
            "no local",
        ),
        (["plam"], "did you mean 'plan'?"),
    ],
)
def test_mistakes(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "plan" in capsys.readouterr().out
    assert main([]) == 2


def test_the_plan_costs_little_and_loads_no_torch(model: Path) -> None:
    check = "import sys; from openrlhf.launcher.main import main; s = main(sys.argv[1:]);"
    check += "sys.exit(99 if {'torch', 'ray', 'vllm', 'transformers', 'deepspeed'} & set(sys.modules) else s)"
    argv = ["plan", "--gpus", "8", "--", "--actor.model_name_or_path", str(model), *shlex.split(QUICK_LAUNCH)]
    done = subprocess.run([sys.executable, "-c", check, *argv], capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert small_programs(check, *argv) < 8
