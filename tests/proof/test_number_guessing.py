"""Number guessing in three turns improves with the real command line, through both kinds of agent."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import report
import run as quickstart

from support.number_guessing import MAX_NEW_TOKENS, make_player, success, write_games

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(1800)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
AGENTS = {"turns": "agent_func_number_guessing.py", "server": "agent_func_number_guessing_server.py"}
GAMES, SAMPLES, STEPS = 16, 16, 70


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("player") / "warm_start"
    make_player(folder)
    return folder


def command(paths: quickstart.Paths, agent: str, train: Path, held_out: Path) -> list[str]:
    """The quickstart's command with an agent in place of its reward function."""
    flags: dict[str, object] = {
        "train.agent_func_path": EXAMPLES / AGENTS[agent],
        "rollout.batch_size": GAMES,
        "rollout.n_samples_per_prompt": SAMPLES,
        "rollout.max_new_tokens": MAX_NEW_TOKENS,
        "train.batch_size": 128,
        "train.micro_batch_size": 64,
        "actor.adam.lr": 5e-4,
        "actor.lr_scheduler": "constant_with_warmup",
        "eval.steps": STEPS // 2,
    }
    extra = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    parts = quickstart.train_command(paths, train, held_out, extra)
    place = parts.index("--reward.remote_url")
    del parts[place : place + 2]
    if agent == "server":  # the server applies the template to each conversation itself
        parts.remove("--data.apply_chat_template")
    return parts


@pytest.mark.parametrize("agent", list(AGENTS))
def test_number_guessing_improves(agent: str, player: Path, tmp_path: Path) -> None:
    paths = quickstart.Paths(output=tmp_path, seed=1)
    paths.warm_start.symlink_to(player)
    paths.run.mkdir()
    train = write_games(tmp_path / "train.jsonl", GAMES * STEPS, seed=1)
    held_out = write_games(tmp_path / "eval.jsonl", 64, seed=2)
    before = success(player)
    done = subprocess.run(
        command(paths, agent, train, held_out), capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    after, greedy = success(paths.model), success(paths.model, rounds=1, greedy=True)
    rewards = [round(p.value, 3) for p in report.require(report.read_events(paths.tensorboard), report.REWARD)]
    print(f"{agent}: success {before:.3f} -> {after:.3f}, greedy {greedy:.3f}; reward by step {rewards[::10]}")
    assert len(rewards) == STEPS
    assert before <= 0.65
    assert after >= 0.75
