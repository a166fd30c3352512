"""Configurations as TOML: what is written is what is read, and secrets are never written."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.launcher.commands import COMMANDS, TRAIN_PPO_RAY
from openrlhf.launcher.flags import build
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import parse
from openrlhf.launcher.resolve import resolve
from openrlhf.launcher.saved import config_toml, keep_run_name
from openrlhf.learner.checkpoint_dir import CheckpointStore
from support.launcher_flags import parse_train_ppo

REQUIRED = {"lora_combiner": ["--model_path", "a", "--lora_path", "b", "--output_path", "c"]}


@pytest.mark.parametrize("name", COMMANDS)
def test_defaults_survive_the_file(name: str, tmp_path: Path) -> None:
    command, path = COMMANDS[name], tmp_path / "config.toml"
    config = parse(command, REQUIRED.get(name, [])).config
    path.write_text(config_toml(command, config), encoding="utf-8")
    assert parse(command, ["--config", str(path)]).config == config


@pytest.mark.parametrize("gpus", [0, 8])
def test_a_resolved_configuration_resolves_to_itself(gpus: int, tmp_path: Path) -> None:
    path, machine = tmp_path / "config.toml", Machine(gpus=gpus)
    asked = parse_train_ppo(
        [
            *("--actor.model_name_or_path", 'a "b"\n\\', "--data.input_template", "Q\t{}\n"),
            *("--actor.eps_clip_low_high", "0.1", "0.3", "--train.dynamic_batch_enable"),
            *("--actor.policy_loss_type", "gspo", "--ds.lora.target_modules", "--train.async_enable"),
            *("--vllm.sync_backend", "nccl", "--ckpt.max_mem", "12.5", "--eval.dataset", "None"),
        ]
    )
    resolved, _ = resolve(asked, machine)
    path.write_text(config_toml(TRAIN_PPO_RAY, resolved), encoding="utf-8")
    again = parse_train_ppo(["--config", str(path)])
    assert again == resolved
    assert resolve(again, machine)[0] == resolved


def test_secrets_are_masked_and_not_read_back(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    config = parse_train_ppo(["--logger.wandb.key", "s3cret", "--reward.api_key", "s3cret"])
    text = config_toml(TRAIN_PPO_RAY, config)
    assert "s3cret" not in text
    assert text.count('"***"') == 2
    path.write_text(text, encoding="utf-8")
    again = parse_train_ppo(["--config", str(path), "--logger.wandb.key", "new"])
    assert (again.logger.wandb.key, again.reward.api_key) == ("new", None)


def test_a_resumed_run_keeps_its_name(tmp_path: Path) -> None:
    flags = ["--ckpt.path", str(tmp_path)]
    named = resolve(parse_train_ppo(flags), Machine(gpus=0))[0]
    store = CheckpointStore(tmp_path)
    for step, name in ((3, "older"), (12, "newer")):
        folder = store.begin(step) / "state"
        folder.mkdir()
        (folder / "config.toml").write_text(
            config_toml(TRAIN_PPO_RAY, build(named, {"logger.wandb.run_name": name})), encoding="utf-8"
        )
        store.commit(step)

    def name_of(*more: str) -> str:
        return keep_run_name(parse_train_ppo([*flags, *more])).logger.wandb.run_name

    assert name_of("--ckpt.load_enable") == "newer"
    assert name_of("--ckpt.load_enable", "--logger.wandb.run_name", "mine") == "mine"
    assert name_of() == "auto"
    assert name_of("--ckpt.load_enable", "--ckpt.path", str(tmp_path / "nothing")) == "auto"
