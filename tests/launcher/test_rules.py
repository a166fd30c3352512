"""Every rule between flags: the broken case names the flags and the fix, the mended one passes."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from openrlhf.launcher.command_line import check_config
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.config import EvaluationConfig, TrainPPOConfig
from openrlhf.launcher.flags import build, flags_of
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.placement import roles
from openrlhf.launcher.resolve import resolve
from openrlhf.launcher.rules.check import RL_RULES, check_rules, warnings_of
from openrlhf.launcher.rules.ranges import within
from openrlhf.launcher.rules.violation import Violation
from openrlhf.launcher.rules.warnings import WARNINGS
from openrlhf.learner.spec import Role
from support.broken_rl_commands import BASE, CASES, RLOO
from support.launcher_flags import parse_train_ppo

GPUS = Machine(gpus=8, nodes=None)
CPU = Machine(gpus=0)


def broken(line: str, machine: Machine = GPUS, base: str = BASE) -> list[Violation]:
    config, _ = resolve(parse_train_ppo(shlex.split(f"{base} {line}")), machine)
    return check_rules(config, machine)


def warned(line: str, machine: Machine = GPUS) -> list[str]:
    config, _ = resolve(parse_train_ppo(shlex.split(f"{BASE} {line}")), machine)
    return warnings_of(config, machine)


@pytest.mark.parametrize("line", ["", RLOO, f"{RLOO} --train.colocate_all --vllm.num_engines 8"])
@pytest.mark.parametrize("machine", [GPUS, CPU])
def test_a_plain_run_breaks_no_rule(line: str, machine: Machine) -> None:
    if machine is CPU:
        line = line.replace("engines 8", "engines 1")
    assert [str(v) for v in broken(line, machine)] == []


@pytest.mark.parametrize(("line", "flag", "words", "mended"), CASES, ids=[c[0].replace("--", "") for c in CASES])
def test_rule(line: str, flag: str, words: str, mended: str) -> None:
    found = [v for v in broken(line) if flag in dict(v.flags)]
    assert found, [str(v) for v in broken(line)]
    assert any(words in str(v) for v in found), [str(v) for v in found]
    assert all(f"--{flag}" in str(v) and ". Fix: " in str(v) for v in found)
    assert [str(v) for v in broken(mended)] == []


@pytest.mark.parametrize(
    ("line", "flag", "words"),
    [
        ("--ds.use_liger_kernel", "ds.use_liger_kernel", "GPU kernels only"),
        ("--ds.param_dtype fp16", "ds.param_dtype", "fp32 or bf16"),
    ],
)
def test_rule_of_a_cpu(line: str, flag: str, words: str) -> None:
    (violation,) = broken(line, CPU)
    assert flag in dict(violation.flags)
    assert words in str(violation)
    assert broken(line) == []


def test_parsers_of_answers_are_those_that_vllm_has(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"tool_parsers": {"hermes"}, "reasoning": set()}  # of the second kind none were found
    monkeypatch.setattr("openrlhf.launcher.rules.pipeline.parser_names", names.__getitem__)
    (violation,) = broken("--agent.tool_parser none_such --agent.reasoning_parser any")
    assert "--agent.tool_parser none_such: vLLM has no such parser. Fix: auto, or one of hermes" in str(violation)
    assert broken("--agent.tool_parser hermes --agent.reasoning_parser auto") == []


OWN_TESTS = {"installed", "required", "one_reward_model", "liger_needs_gpu", "fp16_needs_gpu", "tied"}
"""Rules that no line of the table can break: they are about what is missing, a CPU, or a model's configuration."""


@pytest.mark.parametrize(("tied", "wrong"), [(True, True), (False, False)])
def test_an_adapter_on_a_matrix_of_two_modules_is_refused(tmp_path: Path, tied: bool, wrong: bool) -> None:  # K04
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    line = f"--actor.model_name_or_path {tmp_path} --ds.lora.rank 8 --ds.lora.target_modules"
    assert bool(found := [str(v) for v in broken(f"{line} q_proj lm_head")]) is wrong
    assert all("are one matrix, and an engine would give both what lm_head gets" in t for t in found)
    assert broken(f"{line} q_proj") == []


def test_every_rule_is_broken_by_a_line_of_the_table() -> None:
    broken_rules: set[str] = set()
    for line, *_ in CASES:
        config, _ = resolve(parse_train_ppo(shlex.split(f"{BASE} {line}")), GPUS)
        broken_rules |= {rule.__name__ for rule in RL_RULES if list(rule(within(config), GPUS))}
    assert {rule.__name__ for rule in RL_RULES} - broken_rules == OWN_TESTS


def test_adapters_need_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    assert broken("--ds.lora.rank 8") == []
    monkeypatch.setattr("openrlhf.launcher.rules.adapters.find_spec", lambda name: None)
    (violation,) = broken("--ds.lora.rank 8")
    assert "pip install 'openrlhf-learner[lora]'" in str(violation)


def test_what_a_run_cannot_do_without() -> None:
    found = broken("", base="")
    flags = [name for v in found for name, _ in v.flags]
    assert "actor.model_name_or_path" in flags
    assert "data.prompt_dataset" in flags
    assert "vllm.num_engines" in flags
    assert "reward.remote_url" in flags


def test_a_filter_needs_scores() -> None:
    base = BASE.replace("--reward.remote_url f.py", "--reward.model_name_or_path R")
    (violation,) = broken(f"{RLOO} --algo.dynamic_filtering_enable", base=base)
    assert "scores come from" in str(violation)


def test_l05_one_reward_model_at_a_time(tmp_path: Path) -> None:
    """Help and rule say the same, and a folder may have a comma in its name."""
    base = BASE.replace("--reward.remote_url f.py", "--reward.model_name_or_path R,S")
    (violation,) = broken(RLOO, base=base)
    assert "rewards of several are on different scales" in str(violation)
    assert "serve each" in str(violation)
    text = flags_of(TrainPPOConfig())["reward.model_name_or_path"].help
    assert "their scales differ" in text
    assert "eparated by commas" not in text
    (tmp_path / "R,S").mkdir()
    base = BASE.replace("--reward.remote_url f.py", f"--reward.model_name_or_path {tmp_path}/R,S")
    assert broken(RLOO, base=base) == []


def test_all_violations_at_once() -> None:
    line = "--algo.advantage.estimator rloo --vllm.enable_sleep --actor.dual_clip 0 --eval.steps 3 --ds.zero_stage 9"
    assert len(broken(line)) == 5


@pytest.mark.timeout(20)
def test_huge_numbers_are_answered_at_once() -> None:
    line = "--rollout.batch_size 99999999999999 --train.batch_size 7777777777777 --actor.num_gpus_per_node 65535"
    assert any("the last optimiser step" in text and "even steps" not in text for text in warned(line))
    assert broken(f"{line} --ds.tensor_parallel_size 4 --rollout.n_samples_per_prompt 99999999999999999999")


def test_gpus_of_all_roles_together() -> None:
    machine = Machine(gpus=8, nodes=1)
    (violation,) = broken(RLOO, machine)  # actor 8, reference 8, engine 1
    assert "takes 17 GPUs (actor: 8, ref: 8, engines: 1) and 8 are there" in str(violation)
    assert broken(f"{RLOO} --train.colocate_all --vllm.num_engines 8", machine) == []


def test_evaluation_works_with_every_reward_source() -> None:
    base = BASE.replace("--reward.remote_url f.py", "--reward.model_name_or_path R")
    assert broken(f"{RLOO} --eval.dataset E --eval.steps 5", base=base) == []


@pytest.mark.parametrize(
    ("line", "words", "silent"),
    [
        ("--algo.kl.use_loss", "use k2 or k3", "--algo.kl.use_loss --algo.kl.estimator k3"),
        ("--algo.kl.estimator k3", "without --algo.kl.use_loss", "--algo.kl.estimator k3 --algo.kl.init_coef 0"),
        (r"--data.input_template 'Q:{}\nA:'", "backslash followed by n", "--data.input_template Q:{}"),
        ("--train.colocate_all --train.async_enable", "engines get their own", "--train.async_enable"),
        ("--train.batch_size 100", "--train.batch_size 128", ""),
        ("--train.batch_size 256", "fewer than --train.batch_size 256", ""),
        ("--train.micro_batch_size 3", "--train.batch_size 120 or 144", "--train.micro_batch_size 4"),
        ("--eval.dataset E", "never evaluated", "--eval.dataset E --eval.steps 5"),
        ("--algo.advantage.is_correction_type icepop", "no effect", ""),
        (
            "--actor.drpo_delta 1",
            "no effect without --actor.policy_loss_type drpo",
            "--actor.drpo_delta 1 --actor.policy_loss_type drpo",
        ),
        (
            "--actor.drpo_delta 1",
            "no effect without --actor.policy_loss_type drpo",
            "--actor.drpo_delta 1 --actor.loss_path mine.py",
        ),
        (
            "--actor.clip_cov_range 0 1",
            "no effect without --actor.clip_cov_share",
            "--actor.clip_cov_range 0 1 --actor.clip_cov_share 1e-3",
        ),
        (
            "--ref.sync_alpha 0.5 --algo.kl.init_coef 0.1",
            "no effect without --ref.sync_steps",
            "--ref.sync_steps 2 --ref.sync_alpha 0.5 --algo.kl.init_coef 0.1",
        ),
        ("--train.ema_beta 0.9", "no effect without --train.enable_ema", "--train.ema_beta 0.9 --train.enable_ema"),
        (f"{RLOO} --critic.adam.lr 1e-5", "no effect without --algo.advantage.estimator gae", "--critic.adam.lr 1e-5"),
        (
            "--ds.lora.rank 8",
            "--actor.adam.lr 1e-06 is a rate for full training",
            "--ds.lora.rank 8 --actor.adam.lr 1e-5 --critic.adam.lr 9e-5",
        ),
        ("--ds.enable_sleep --ds.adam_offload", "in host memory already", "--ds.enable_sleep"),
        ("--train.colocate_all", "the engines keep 95% of every GPU", "--train.colocate_all --vllm.enable_sleep"),
    ],
)
def test_warning(line: str, words: str, silent: str) -> None:
    assert any(words in text for text in warned(line)), warned(line)
    assert warned(silent) == []


@pytest.mark.parametrize("rule", [*RL_RULES, *WARNINGS], ids=lambda rule: rule.__name__)
def test_a_rule_says_what_it_guards(rule: object) -> None:
    assert rule.__doc__


@pytest.mark.parametrize(
    ("line", "installed", "words"),
    [
        ("--ds.param_dtype fp32", GPUS.flash_attention, ["has no fp32 kernel", "--ds.attn_implementation sdpa"]),
        ("", frozenset(), ["pip install flash-attn --no-build-isolation", "--ds.attn_implementation sdpa"]),
    ],
    ids=["f", "g"],
)
def test_flash_attention_by_name(line: str, installed: frozenset[str], words: list[str]) -> None:
    machine = replace(GPUS, flash_attention=installed)
    (violation,) = broken(f"{RLOO} --ds.attn_implementation flash_attention_2 {line}", machine)
    assert all(word in str(violation) for word in words)
    assert broken(f"{RLOO} --ds.attn_implementation flash_attention_2", replace(GPUS, gpus=0)) == []


@pytest.mark.parametrize(
    ("line", "installed", "words"),
    [
        ("", frozenset(), "pip install flash-attn --no-build-isolation (then"),
        ("--ds.param_dtype fp32", GPUS.flash_attention, "flash_attention_2 with --ds.param_dtype bf16"),
    ],
    ids=["g", "f"],
)
def test_packing_without_flash_attention(line: str, installed: frozenset[str], words: str) -> None:
    (violation,) = broken(f"{RLOO} --ds.packing_samples {line}", replace(GPUS, flash_attention=installed))
    assert words in str(violation)


def test_environments_in_toml_go_with_one_reward_source() -> None:
    table = "--train.agent_func_path table.toml"
    assert broken(f"{RLOO} {table}") == []
    (violation,) = broken(f"{RLOO} {table} --reward.model_name_or_path R")
    assert "several sources" in str(violation)
    config = build(TrainPPOConfig(), {"train.agent_func_path": "table.toml", "reward.model_name_or_path": "R"})
    assert config.has_reward_model
    assert not build(config, {"train.agent_func_path": "agent.py"}).has_reward_model


def test_an_evaluation_alone_asks_for_its_data_and_for_no_prompts() -> None:
    asked = EvaluationConfig.of(TrainPPOConfig())
    config, violations, _ = check_config(TRAIN_PPO_RAY, asked, Machine(gpus=0))
    assert isinstance(config, EvaluationConfig)
    names = {name for violation in violations for name, _ in violation.flags}
    assert names == {
        "actor.model_name_or_path",
        "eval.dataset",
        "vllm.num_engines",
        "reward.model_name_or_path",
        "reward.remote_url",
        "train.agent_func_path",
    }


def test_an_evaluation_alone_has_no_learner_but_a_reward_model() -> None:
    flags = {"algo.kl.init_coef": 0.1, "algo.advantage.estimator": "gae", "reward.model_name_or_path": "R"}
    config = build(TrainPPOConfig(), flags)
    assert len(roles(config)) == 4
    assert roles(EvaluationConfig.of(config)) == (Role.REWARD,)
