"""`kill -9` of every kind of process of a real run, while it samples and while weights travel."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.stack_runs import Run, Workspace, make_workspace, pids, running
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(600), pytest.mark.alarms("all_truncated")]

GROUPS = 4
SLOW_REWARD = """
import pathlib, time

def reward_func(queries, prompts, labels):
    with (pathlib.Path(__file__).parent / "calls").open("a") as calls:
        calls.write(".")
    time.sleep(0.5)
    return {"rewards": [float(len(q) % 3) for q in queries]}
"""
FLAGS = "--vllm.num_engines 2 --actor.num_gpus_per_node 2 --rollout.micro_batch_size 8 --train.micro_batch_size 8"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return make_workspace(tmp_path, tiny_qwen3(tmp_path / "tiny"), prompts=2000, reward=SLOW_REWARD)


def a_process(run: Run, kind: str) -> int:
    found = pids(run, kind)
    assert found, f"no {kind}:\n{run.text}"
    return found[-1]


def wait_until(run: Run, what: str, condition: Callable[[], bool], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert run.process.poll() is None, f"ended with {run.process.returncode} before {what}:\n{run.text}"
        assert time.monotonic() < deadline, f"no {what} within {timeout} s:\n{run.text}"
        time.sleep(0.02)


def into_the_second_generation(workspace: Workspace, run: Run) -> None:
    """Until the first reward call of the second step runs: its samples are there, their rewards are not."""
    calls = workspace.path / "calls"
    wait_until(run, "first step", lambda: "step 1 " in run.text, 300)
    wait_until(run, "reward call", lambda: calls.stat().st_size > GROUPS, 60)


def kill_during_generation(workspace: Workspace, run: Run, kind: str) -> None:
    into_the_second_generation(workspace, run)
    os.kill(a_process(run, kind), signal.SIGKILL)


def kill_during_push(workspace: Workspace, run: Run, kind: str) -> None:
    """An engine that stands still holds the push up, so that the kill falls into it."""
    into_the_second_generation(workspace, run)
    time.sleep(0.4)
    frozen = pids(run, "engine")[0]
    os.kill(frozen, signal.SIGSTOP)
    wait_until(run, "rewards", lambda: (workspace.path / "calls").stat().st_size == 2 * GROUPS, 60)
    time.sleep(3.0)
    assert "step 2 " not in run.text
    os.kill(a_process(run, kind), signal.SIGKILL)
    time.sleep(1.0)
    os.kill(frozen, signal.SIGCONT)


KILLS = {"generation": kill_during_generation, "push": kill_during_push}


@pytest.mark.parametrize("moment", list(KILLS))
@pytest.mark.parametrize("kind", ["engine", "engine actor", "agent worker", "reward worker"])
def test_the_run_goes_on(workspace: Workspace, kind: str, moment: str) -> None:
    with running(workspace, *FLAGS.split()) as run:
        KILLS[moment](workspace, run, kind)
        run.wait_for("step 5 ", timeout=240)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait(60) == 128 + signal.SIGTERM, run.text
    assert run.left_over() == []
    print(*[line for line in run.text.splitlines() if "WARNING" in line or line.startswith("step ")], sep="\n")


@pytest.mark.parametrize("moment", list(KILLS))
def test_a_lost_learner_rank_ends_the_run_by_name(workspace: Workspace, moment: str) -> None:
    with running(workspace, *FLAGS.split()) as run:
        KILLS[moment](workspace, run, "learner rank")
        assert run.wait(60) == 1, run.text
    assert "policy rank" in run.text
    assert run.left_over() == []
    print(run.text[-1500:])
