"""Real runs, replayed from their records without engines: the exported weights are the same, bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from openrlhf.launcher.record.reader import Record
from openrlhf.launcher.replay.command import main
from support.stack_runs import make_workspace, running
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(900), pytest.mark.alarms("all_truncated")]

COMMON = (
    "--train.max_epochs 2 --train.batch_size 8 --train.max_steps 12 --actor.num_gpus_per_node 2 "
    "--rollout.micro_batch_size 4 --train.micro_batch_size 4"
)
RUNS = {
    "adam": "--actor.adam.lr 1e-3 --reward.normalize_enable",
    "muon": "--actor.optim muon --actor.muon.lr 1e-2",
    "a KL penalty that adapts": "--algo.kl.init_coef 0.05 --algo.kl.target 1 --ref.num_gpus_per_node 1",
    "beside sampling": "--train.async_enable --train.partial_rollout_enable",
    "a critic": "--algo.advantage.estimator gae --critic.num_gpus_per_node 1",
}


def weights(folder: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))).hexdigest()


@pytest.mark.parametrize("name", RUNS)
def test_replayed_weights_are_those_of_the_run(name: str, tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path, tiny_qwen3(tmp_path / "tiny"), prompts=16)
    with running(workspace, *COMMON.split(), *RUNS[name].split()) as run:
        assert run.wait(400) == 0, run.text
    record = Record.open(tmp_path)
    assert record.complete_steps() == [1, 2, 3]
    assert main([str(tmp_path), "--output_dir", str(tmp_path / "again")]) == 0
    assert weights(tmp_path / "again" / "model") == weights(tmp_path / "model_out")
    again = Record.open(tmp_path / "again")
    for step, own in again.steps().items():
        told = record.steps()[step].metrics
        assert own.metrics["train/policy_loss"] == told["train/policy_loss"]
        assert own.metrics["train/kl_coef"] == told["train/kl_coef"]
