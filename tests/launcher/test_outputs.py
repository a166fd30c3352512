"""The folders of a run: said, held, tried before anything starts, and never emptied of what a run did not write."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.commands import TRAIN_PPO_RAY, TRAIN_SFT
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.outputs import absolute, hold_merged, hold_outputs, outputs, ray_owns, try_export_settings
from openrlhf.launcher.supervised_config import LoraCombinerConfig, TrainSFTConfig
from openrlhf.learner.checkpoint_dir import CheckpointStore
from openrlhf.learner.folders.lock import FolderInUseError
from openrlhf.learner.folders.publish import publish
from support import folder_writers
from support.launcher_flags import parse_train_ppo


def configuration(**flags: Any) -> TrainPPOConfig:
    return absolute(build(TrainPPOConfig(), {name.replace("__", "."): value for name, value in flags.items()}))


def test_l03_paths_are_those_of_the_driver_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = configuration(
        ckpt__output_dir="~/x", ckpt__path="./a/../c", logger__tensorboard_dir="logs", logger__wandb__run_name="r"
    )
    assert config.ckpt.output_dir == f"{tmp_path}/home/x"
    assert config.ckpt.path == f"{tmp_path}/c"
    with hold_outputs(TRAIN_PPO_RAY, config):
        pass
    assert capsys.readouterr().err.splitlines() == [
        "this run writes",
        f"  model:       {tmp_path}/home/x",
        f"  checkpoints: {tmp_path}/c",
        f"  logs:        {tmp_path}/logs/r",
        f"  record:      {tmp_path}/logs/r/record",
    ]
    assert (tmp_path / "home" / "x" / "config.toml").is_file()


@pytest.mark.parametrize(
    ("path", "emptied"),
    [
        ("/tmp/ray/session_2026-01-01_00-00-00_000000_1/runtime_resources/working_dir_files/_ray_pkg_0a/ckpt", True),
        ("/scratch/r7/session_2026-01-01_00-00-00_000000_1/runtime_resources/working_dir_files/_ray_pkg_0a", True),
        ("/tmp/ray/out", True),
        ("/tmp/rayleigh/out", False),
        ("/data/session_notes/out", False),
    ],
)
def test_x05_a_folder_that_ray_empties_is_warned_about(
    path: str, emptied: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ray_owns(Path(path)) is emptied
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    config = configuration(ckpt__output_dir=str(tmp_path / "ray" / "out"), ckpt__path=str(tmp_path / "ok"))
    with hold_outputs(TRAIN_PPO_RAY, config):
        pass
    assert [r.getMessage() for r in caplog.records] == [
        f"--ckpt.output_dir {tmp_path}/ray/out lies in a folder of Ray's, which Ray empties: what is written there "
        "will be lost. Give an absolute path outside of it"
    ]


def test_l14_the_configuration_lies_beside_export_and_logs_from_the_start(tmp_path: Path) -> None:
    config = configuration(
        ckpt__output_dir=f"{tmp_path}/out",
        ckpt__path=f"{tmp_path}/c",
        logger__tensorboard_dir=f"{tmp_path}/logs",
        logger__wandb__run_name="r",
        logger__wandb__key="s3cret",
        train__seed=7,
    )
    with hold_outputs(TRAIN_PPO_RAY, config):
        for folder in ("out", "logs/r"):
            text = (tmp_path / folder / "config.toml").read_text()
            assert "s3cret" not in text
            again = parse_train_ppo(["--config", f"{tmp_path}/{folder}/config.toml"])
            assert build(again, {"logger.wandb.key": "s3cret"}) == config
    assert not (tmp_path / "c").exists()  # nothing was saved there


def test_l14_a_configuration_of_the_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text("mine")
    with hold_outputs(TRAIN_PPO_RAY, configuration(ckpt__output_dir=".", ckpt__path="./c")):
        assert (tmp_path / "openrlhf_config.toml").is_file()
    assert (tmp_path / "config.toml").read_text() == "mine"


def test_x01_defaults_and_the_working_folder_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").write_text("mine")
    store = CheckpointStore(tmp_path / "ckpt" / "checkpoints_sft")
    (store.begin(5) / "w").write_text("weights")
    store.commit(5)
    for config in (TrainSFTConfig(), build(TrainSFTConfig(), {"ckpt.output_dir": "."})):
        with hold_outputs(TRAIN_SFT, absolute(config)), publish(config.ckpt.output_dir) as fresh:
            folder_writers.write_model(fresh, 1)
    assert (tmp_path / "notes.md").read_text() == "mine"
    assert (tmp_path / "ckpt" / "checkpoints_sft" / "global_step5" / "w").read_text() == "weights"
    assert (tmp_path / "config.json").read_text() == (tmp_path / "ckpt" / "config.json").read_text() == "config.json 1"


@pytest.mark.parametrize("flag", ["--ckpt.output_dir", "--ckpt.path", "--logger.tensorboard_dir"])
def test_x04_a_second_live_run_is_refused_before_it_starts(tmp_path: Path, flag: str) -> None:
    paths = {"--ckpt.output_dir": "out", "--ckpt.path": "c", "--logger.tensorboard_dir": "logs/r"}
    config = configuration(
        ckpt__output_dir=f"{tmp_path}/out",
        ckpt__path=f"{tmp_path}/c",
        logger__tensorboard_dir=f"{tmp_path}/logs",
        logger__wandb__run_name="r",
    )
    command = [sys.executable, folder_writers.__file__, "holds", str(tmp_path / paths[flag])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(FolderInUseError, match=rf"{flag} .*process {process.pid} on"), ExitStack() as held:
            held.enter_context(hold_outputs(TRAIN_PPO_RAY, config))
        process.kill()
    with hold_outputs(TRAIN_PPO_RAY, config):  # what was taken by the refused run was given back
        pass


def test_x01_a_model_that_the_run_reads_is_never_replaced(tmp_path: Path) -> None:
    with publish(tmp_path) as fresh:  # an export of ours, which an export may replace
        folder_writers.write_model(fresh, 1)
    config = configuration(ckpt__output_dir=str(tmp_path), actor__model_name_or_path=str(tmp_path))
    with pytest.raises(ValueError, match=r"is the folder of a model that this run reads"), ExitStack() as held:
        held.enter_context(hold_outputs(TRAIN_PPO_RAY, config))
    for path in ("model_path", "lora_path"):
        merged = build(LoraCombinerConfig(), {path: str(tmp_path), "output_path": f"{tmp_path}/../{tmp_path.name}"})
        with pytest.raises(ValueError, match=r"--output_path .* is the folder of a model"), ExitStack() as held:
            held.enter_context(hold_merged(merged))


def test_x01_a_merge_into_a_folder_with_another_model_is_refused_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    merged = build(LoraCombinerConfig(), {"model_path": "a", "lora_path": "b", "output_path": str(tmp_path)})
    with pytest.raises(ValueError, match=r"--output_path .* holds files that no run wrote"), ExitStack() as held:
        held.enter_context(hold_merged(merged))
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_x02_what_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for flag in ("ckpt__output_dir", "ckpt__path"):
        paths = {"ckpt__output_dir": f"{tmp_path}/o", "ckpt__path": f"{tmp_path}/c", flag: f"{tmp_path}/file/x"}
        with pytest.raises(ValueError, match=rf"--{flag.replace('__', '.')} .* cannot be written"), ExitStack() as held:
            held.enter_context(hold_outputs(TRAIN_PPO_RAY, configuration(**paths)))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_x03_the_export_is_tried_without_a_model(tmp_path: Path) -> None:
    class Broken:
        name_or_path = ""

        def save_pretrained(self, folder: str) -> None:
            raise OSError(30, "Read-only file system")

    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match=r"--ckpt.output_dir .* cannot be written: .*Read-only"):
        try_export_settings(str(tmp_path / "out"), str(tmp_path / "m"), Broken())
    assert not (tmp_path / "out").exists()


def test_the_critic_has_a_folder_of_its_own(tmp_path: Path) -> None:
    config = configuration(
        ckpt__output_dir=f"{tmp_path}/out/",
        critic__model_name_or_path="m",
        critic__save_value_network=True,
        algo__advantage__estimator="gae",
    )
    assert [str(o.path) for o in outputs(config) if o.model] == [f"{tmp_path}/out", f"{tmp_path}/out_critic"]
    assert os.path.isabs(config.ckpt.path)
