"""Real runs of two and more steps: the same seed twice, a resumed asynchronous run, sources of rewards x pipelines."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from report import read_events

from support.launcher_reward_model import tiny_reward_model
from support.learner_ranks import free_port
from support.stack_runs import Workspace, make_workspace, of_the_clock, start_run
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(900), pytest.mark.alarms("all_truncated")]

ESTIMATORS = ("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo")
PIPELINES = {
    "sync": [],
    "async": ["--train.async_enable"],
    "partial": ["--train.async_enable", "--train.partial_rollout_enable"],
}
SOURCES = ("single-turn", "multi-turn", "reward model", "HTTP reward")
# Every source in every pipeline; every estimator twice, each time with another source and pipeline.
COMBINATIONS = [
    (ESTIMATORS[(3 * i + j + 3 * (i > 1)) % 6], source, pipeline)
    for i, source in enumerate(SOURCES)
    for j, pipeline in enumerate(PIPELINES)
]

AGENT = '''
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Echo(AgentInstanceBase):
    """Two turns; the reward is the share of digits in the last answer."""

    async def reset(self, states, **kwargs):
        self.turn = 0
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turn += 1
        text = states["action_text"]
        reward = sum(c.isdigit() for c in text) / max(len(text), 1)
        return {"rewards": reward, "scores": reward, "done": self.turn == 2, "environment_feedback": " again: "}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Echo)
'''


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return make_workspace(tmp_path, tiny_qwen3(tmp_path / "tiny"), prompts=8)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_reward_model(tmp_path_factory.mktemp("reward") / "model")


@pytest.fixture(scope="module")
def reward_server(reward_model: str) -> Iterator[str]:
    """`serve_rm` with the tiny reward model; its URL."""
    port = free_port()
    command = [sys.executable, "-m", "openrlhf.cli.serve_rm", "--reward.model_name_or_path", reward_model]
    process = subprocess.Popen([*command, "--port", str(port), "--host", "127.0.0.1"])
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            break
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < deadline
            time.sleep(0.5)
    yield f"http://127.0.0.1:{port}/get_reward"
    process.terminate()
    assert process.wait(30) in (0, -signal.SIGTERM)


def finish(workspace: Workspace, flags: Sequence[str], *, code: int = 0) -> dict[str, list[float]]:
    """One run to its end; its metrics by name."""
    board = workspace.path / "tensorboard"
    run = start_run(workspace, *flags, "--logger.tensorboard_dir", str(board))
    assert run.wait(600) == code, run.text
    assert run.left_over() == []
    return {tag: [p.value for p in points] for tag, points in read_events(board).items()}


def test_full_determinism_gives_the_same_bits(tmp_path: Path) -> None:
    flags = (
        "--train.full_determinism_enable --vllm.num_engines 2 --actor.num_gpus_per_node 2 --ds.zero_stage 2 "
        "--rollout.micro_batch_size 8 --train.micro_batch_size 8"
    )
    runs, models = [], []
    model = tiny_qwen3(tmp_path / "tiny")
    for name in ("first", "second"):
        workspace = make_workspace(tmp_path / name, model, prompts=16)
        metrics = finish(workspace, flags.split())
        runs.append({tag: values for tag, values in metrics.items() if not of_the_clock(tag)})
        models.append(Path(workspace.path / "model_out" / "model.safetensors").read_bytes())
    print(f"{len(runs[0])} metrics x {len(runs[0]['train/reward'])} steps")
    assert len(runs[0]["train/reward"]) == 4
    assert runs[0] == runs[1]
    assert models[0] == models[1]


@pytest.mark.parametrize("partial", [False, True])
def test_a_resumed_asynchronous_run_keeps_the_bound(tmp_path: Path, partial: bool) -> None:
    workspace = make_workspace(tmp_path, tiny_qwen3(tmp_path / "tiny"), prompts=48)
    flags = [*PIPELINES["partial" if partial else "async"], "--logger.tensorboard_dir", str(tmp_path / "tensorboard")]
    run = start_run(workspace, *flags, "--ckpt.save_steps", "1000")
    run.wait_for("step 3 ", 300)
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait(120) == 85, run.text
    metrics = finish(workspace, [*flags, "--ckpt.save_steps", "1000", "--ckpt.load_enable"])
    assert len(metrics["train/reward"]) == 48 // 4
    assert max(metrics["rollout/staleness_max"]) <= 1
    print(f"staleness {metrics['rollout/staleness_max']}")


@pytest.mark.parametrize(("estimator", "source", "pipeline"), COMBINATIONS)
def test_two_steps(
    workspace: Workspace, reward_model: str, reward_server: str, estimator: str, source: str, pipeline: str
) -> None:
    (workspace.path / "agent.py").write_text(AGENT)
    rewards = {
        "single-turn": [],
        "multi-turn": ["--train.agent_func_path", str(workspace.path / "agent.py")],
        "reward model": ["--reward.num_gpus_per_node", "1", "--reward.model_name_or_path", reward_model],
        "HTTP reward": ["--reward.remote_url", reward_server],
    }[source]
    if source != "single-turn":
        workspace.without = ("reward.remote_url",)
    critic = ["--critic.num_gpus_per_node", "1"] if estimator == "gae" else []
    flags = ["--algo.advantage.estimator", estimator, *critic, *rewards, *PIPELINES[pipeline]]
    metrics = finish(workspace, flags)
    assert len(metrics["train/reward"]) == 2
    assert all(math.isfinite(value) for values in metrics.values() for value in values)
    assert max(metrics["rollout/sync_error"]) < 1e-4
    print(json.dumps({k: v for k, v in metrics.items() if k in ("train/reward", "train/actor_grad_norm")}))
