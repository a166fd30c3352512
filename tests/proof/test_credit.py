"""Credit per turn and a curriculum on the real stack: what is recorded, resumed, replayed and exported."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from openrlhf.launcher.record.reader import Record
from openrlhf.launcher.replay.command import main as replay
from support.stack_runs import Workspace, make_workspace, running
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(900), pytest.mark.alarms("all_truncated")]

PROMPTS, PER_STEP, SAMPLES = 16, 4, 4
AGENT = '''
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Two(AgentInstanceBase):
    """Two turns, each worth its share of even characters; the score is whether the last one has any digit."""

    async def reset(self, states, **kwargs):
        self.turn = 0
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turn += 1
        text = states["action_text"]
        even = sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1)
        score = float(any(c.isdigit() for c in text))
        return {"rewards": even, "scores": score, "done": self.turn == 2, "environment_feedback": " again: "}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Two)
'''
FLAGS = "--actor.num_gpus_per_node 2 --rollout.micro_batch_size 8 --train.micro_batch_size 8 --actor.adam.lr 1e-3"


def make(folder: Path) -> Workspace:
    workspace = make_workspace(folder, tiny_qwen3(folder / "tiny"), prompts=PROMPTS)
    (folder / "agent.py").write_text(AGENT)
    workspace.without = ("reward.remote_url", "algo.advantage.estimator")
    return workspace


def flags(workspace: Workspace, *more: str) -> list[str]:
    agent = ["--train.agent_func_path", str(workspace.path / "agent.py")]
    return [*FLAGS.split(), *agent, "--algo.advantage.estimator", "group_norm", *more]


def test_turns_are_credited_one_by_one(tmp_path: Path) -> None:
    workspace = make(tmp_path)
    with running(workspace, *flags(workspace, "--algo.turn_rewards", "each")) as run:
        assert run.wait(400) == 0, run.text
    record = Record.open(tmp_path)
    assert record.complete_steps() == [1, 2, 3, 4]
    samples = record.samples(1)
    assert len(samples) == PER_STEP * SAMPLES
    for sample in samples:
        trajectory = sample.trajectory()
        earned = [turn.reward for turn in trajectory.turns]
        assert len(earned) == 2
        assert sum(e for e in earned if e is not None) == pytest.approx(trajectory.reward)
    assert any(len({round(a, 6) for a in sample.advantages if a}) == 2 for sample in samples)  # a credit for each turn
    assert replay([str(tmp_path), "--output_dir", str(tmp_path / "again")]) == 0
    for step, own in Record.open(tmp_path / "again").steps().items():
        assert own.metrics["train/policy_loss"] == record.steps()[step].metrics["train/policy_loss"]


def test_a_curriculum_goes_on_where_it_was(tmp_path: Path) -> None:
    """Stopped after two steps and resumed: the same prompts as a run that was not, and every try in the export."""
    drawn = {}
    for name in ("whole", "stopped"):
        workspace = make(tmp_path / name)
        export = tmp_path / name / "history.jsonl"
        own = ["--data.curriculum", "prioritised", "--data.curriculum_export", str(export), "--ckpt.save_steps", "100"]
        if name == "stopped":
            with running(workspace, *flags(workspace, *own)) as run:
                run.wait_for("step 2 ", 300)
                run.process.send_signal(signal.SIGUSR1)
                assert run.wait(120) in (0, 85), run.text
            own.append("--ckpt.load_enable")
        with running(workspace, *flags(workspace, *own)) as run:
            assert run.wait(400) == 0, run.text
        steps = Record.open(tmp_path / name).steps()
        assert sorted(steps) == [1, 2, 3, 4]
        record = Record.open(tmp_path / name)
        drawn[name] = [sorted(group.group_id for group in record.groups(step)) for step in steps]
        rows = [json.loads(line) for line in export.read_text().splitlines()]
        assert len(rows) == PROMPTS
        assert sum(row["tries"] for row in rows) == 4 * PER_STEP * SAMPLES
    assert drawn["whole"] == drawn["stopped"]
