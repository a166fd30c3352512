"""Mistakes in a command line: every one is reported, with a suggestion, in one message."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.launcher.commands import COMMANDS, TRAIN_PPO_RAY
from openrlhf.launcher.parsing import UsageError, parse, wants_help
from support.cpu_time import small_programs
from support.launcher_flags import parse_train_ppo


def problems(*argv: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        parse(TRAIN_PPO_RAY, argv)
    return list(caught.value.problems)


def test_values_keep_their_types() -> None:
    config = parse_train_ppo(
        shlex.split(
            "--actor.eps_clip_low_high 0.2 0.27 --actor.adam.betas 0.9 0.99 --critic.freezing_steps -1"
            " --reward.clip_range -5 5 --ds.packing_samples --actor.entropy_coef None"
            " --rollout.max_new_tokens=64 --ckpt.max_mem inf"
        )
    )
    assert config.actor.eps_clip_low_high == (0.2, 0.27)
    assert config.actor.adam.betas == (0.9, 0.99)
    assert config.actor.adam.lr == 1e-6
    assert config.critic.adam.lr == 9e-6
    assert config.critic.freezing_steps == -1
    assert config.reward.clip_range == (-5.0, 5.0)
    assert config.ds.packing_samples is True
    assert config.actor.entropy_coef is None
    assert config.rollout.max_new_tokens == 64
    assert config.ckpt.max_mem == float("inf")


def test_both_forms_of_a_switch_that_is_on() -> None:
    assert parse_train_ppo(["--actor.muon.nesterov"]).actor.muon.nesterov is True
    assert parse_train_ppo(["--actor.muon.no_nesterov"]).actor.muon.nesterov is False
    assert parse_train_ppo(["--actor.muon.no_nesterov", "--actor.muon.nesterov"]).actor.muon.nesterov is True


def test_the_last_of_two_wins() -> None:
    assert parse_train_ppo(["--train.seed", "1", "--train.seed", "2"]).train.seed == 2


def test_an_auto_number() -> None:
    assert parse_train_ppo(["--actor.num_gpus_per_node", "auto"]) == parse_train_ppo([])
    assert parse_train_ppo(["--actor.num_gpus_per_node", "4"]).actor.num_gpus_per_node == 4


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rollout.temp", "1"], "abbreviations are not accepted; did you mean --rollout.temperature?"),
        (["--actor.eps-clip", "1"], "--actor.eps-clip is not a flag; did you mean --actor.eps_clip?"),
        (["--temprature", "1"], "--temprature is not a flag"),
        (["--vllm.max_num_seqs", "8"], "--vllm.engine_args"),
        (["--train.seed", "1.5"], "--train.seed takes a whole number, got '1.5'"),
        (["--train.seed"], "--train.seed takes 1 value, got none"),
        (["--train.seed", "1", "2"], "--train.seed takes 1 value, got 2: '1' '2'"),
        (["--actor.adam.lr", "fast"], "--actor.adam.lr takes a number, got 'fast'"),
        (["--actor.adam.lr", "nan"], "--actor.adam.lr takes a number, got 'nan'"),
        (["--actor.adam.betas", "0.9"], "--actor.adam.betas takes 2 values, got 1: '0.9'"),
        (["--reward.clip_range", "-5,5"], "separate them by a space, not a comma"),
        (["--ds.packing_samples", "True"], "is a switch and takes no value, got 'True': write it alone"),
        (["--actor.optim", "adm"], "takes one of adam, muon, got 'adm'; did you mean 'adam'?"),
        (["--actor.optim", "None"], "takes one of adam, muon, got 'None'"),
        (["train", "--train.seed", "1"], "'train' stands before the first flag"),
        (["--agent.timeout", "0"], "--agent.timeout must be more than 0 seconds, got 0.0"),
        (["--config", "/does/not/exist.toml"], "there is no file '/does/not/exist.toml'"),
        (["--config"], "--config takes the path of one TOML file"),
        (["--print_config=x"], "--print_config takes no value, got 'x'"),
        (
            ["--train.seed", "1", "-train.max_epochs", "2"],
            "'-train.max_epochs' is a flag when it starts with two dashes",
        ),
        (["--ds.packing_samples", "train.seed=1"], "'train.seed=1' is a flag when it starts with two dashes"),
        (["--train.seed", "1", "--", "--train.max_epochs", "2"], "leave '--' out"),
        (["--=3"], "the name is missing"),
    ],
)
def test_a_mistake_is_named_with_a_hint(argv: list[str], message: str) -> None:
    (problem,) = problems(*argv)
    assert message in problem


def test_all_mistakes_at_once() -> None:
    assert len(problems("--rollout.temp", "1", "--train.seed", "x", "--actor.optim", "sgd")) == 3
    assert problems("--agent.timeout", "0", "--agent.max_turns", "0", "--train.seed", "3") == [
        "--agent.timeout must be more than 0 seconds, got 0.0",
        "--agent.max_turns must be at least 1, got 0",
    ]


def test_required_flags() -> None:
    with pytest.raises(UsageError) as caught:
        parse(COMMANDS["lora_combiner"], ["--model_path", "a"])
    assert [p.split()[0] for p in caught.value.problems] == ["--lora_path", "--output_path"]


def test_configuration_file_and_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'use_ms = false\n[actor]\noptim = "muon"\n[actor.adam]\nlr = 1\nbetas = [0.8, 0.9]\n'
        '[data]\nlabel_key = "None"\n[ds]\npacking_samples = true\n[actor.muon]\nnesterov = true\n',
        encoding="utf-8",
    )
    # A switch that the file has on can still be given, and flags win wherever --config stands.
    config = parse_train_ppo(["--actor.adam.lr", "2e-6", "--ds.packing_samples", "--config", str(path)])
    assert (config.actor.optim, config.actor.adam.lr, config.actor.adam.betas) == ("muon", 2e-6, (0.8, 0.9))
    assert config.ds.packing_samples
    assert config.data.label_key is None


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_r03_configuration_file_with_a_byte_order_mark(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes('[data]\r\nlabel_key = "größe"\r\n'.encode(encoding))
    assert parse_train_ppo(["--config", str(path)]).data.label_key == "größe"


def test_mistakes_in_a_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[actor]\noptm = "muon"\neps_clip = "wide"\nnum_nodes = true\n[ds]\npacking_samples = 1\n', encoding="utf-8"
    )
    found = problems("--config", str(path))
    assert found[0].startswith(f"--config {path}: --actor.optm is not a flag; did you mean --actor.optim")
    assert found[1:] == [
        f"--config {path}: actor.eps_clip takes a number, got 'wide'",
        f"--config {path}: actor.num_nodes takes a whole number, got True",
        f"--config {path}: ds.packing_samples is a switch and takes true or false, got 1",
    ]
    for text, message in (
        ('pretrain = "x"', "pretrain is now actor.model_name_or_path"),
        ("bf16 = true", "bf16 was removed: bf16 is the default on GPUs"),
        ("[actor.muon]\nno_nesterov = true", "in a file write actor.muon.nesterov = false"),
        ("actor = 3", "actor is a table and takes no value; its keys are actor.num_nodes or"),
        ('[[actor]]\noptim = "muon"', "actor is a table and takes no value"),
        ("[train.seed]\na = 1", "--train.seed.a is not a flag; did you mean --train.seed"),
        ("[train]\nseed = 2031-01-01", "train.seed takes a whole number, got datetime.date(2031, 1, 1)"),
        ("[train]\nseed = 1.0", "train.seed takes a whole number, got '1.0'"),
        ("[actor.adam]\nlr = nan", "actor.adam.lr takes a number, got 'nan'"),
        ("print_config = true", "--print_config is not a flag"),
    ):
        path.write_text(text, encoding="utf-8")
        (problem,) = problems("--config", str(path))
        assert problem.startswith(f"--config {path}: ")
        assert message in problem
    path.write_text("[actor\n", encoding="utf-8")
    assert "not a TOML file" in problems("--config", str(path))[0]


def test_help_is_recognised() -> None:
    assert wants_help(["--train.seed", "1", "--help"])
    assert not wants_help(["--train.seed", "1"])


@pytest.mark.parametrize(
    ("argv", "status", "text"),
    [
        (["--help"], 0, "--algo.advantage.estimator"),
        (["--rollout.temp", "1"], 2, "did you mean --rollout.temperature?"),
        (["--pretrain", "x"], 2, "--pretrain is now --actor.model_name_or_path"),
    ],
)
def test_answers_cost_a_few_small_programs_and_load_no_torch(argv: list[str], status: int, text: str) -> None:
    check = "import sys; from openrlhf.cli.train_ppo_ray import main; s = main(sys.argv[1:]);"
    check += "heavy = {'torch', 'ray', 'vllm', 'transformers', 'deepspeed', 'datasets'} & set(sys.modules);"
    check += "sys.exit(99 if heavy else s)"
    command = [sys.executable, "-c", check, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, text in done.stdout + done.stderr) == (status, True), done.stderr
    assert small_programs(check, *argv) < 4
