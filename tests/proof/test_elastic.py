"""Engines leave and join a real run, by order and with a machine of their own; what is trained does not change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.elastic_runs import check_trained
from support.stack_runs import Run, make_workspace, running
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(1200), pytest.mark.alarms("all_truncated")]

PROMPTS, SAMPLES = 320, 4
SLOW_REWARD = """
import pathlib, time

def reward_func(queries, prompts, labels):
    if (pathlib.Path(__file__).parent / "slow").exists():
        time.sleep(0.7)
    return {"rewards": [float(len(q) % 3) for q in queries]}
"""
FLAGS = "--vllm.num_engines 2 --train.async_enable --train.partial_rollout_enable --train.max_staleness 1"
LORA = "--ds.lora.rank 4 --vllm.lora_push adapter"
LAUNCH = [sys.executable, "-m", "openrlhf.launcher.main"]


def scale(path: Path, engines: int) -> subprocess.CompletedProcess[str]:
    command = [*LAUNCH, "scale", str(path), "--engines", str(engines), "--timeout", "300"]
    return subprocess.run(command, capture_output=True, text=True, timeout=320, check=False)


def further_steps(run: Run, count: int) -> None:
    """Until the run has made so many more steps."""
    done = run.text.count("\nstep ")
    run.wait_for(f"\nstep {done + count} ", timeout=300)


@contextmanager
def joining(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A further Ray node of the run, as on another machine."""
    command = [*LAUNCH, "join", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.mark.parametrize("flags", ["", LORA], ids=["weights", "adapters"])
def test_engines_leave_and_join(flags: str, tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path, tiny_qwen3(tmp_path / "tiny"), prompts=PROMPTS, reward=SLOW_REWARD)
    slow = tmp_path / "slow"
    slow.touch()
    with running(workspace, *FLAGS.split(), *flags.split()) as run:
        run.wait_for("step 3 ", timeout=300)
        moments = [run.text.count("\nstep ")]
        left = scale(tmp_path, 1)
        assert (left.returncode, left.stdout) == (0, "the run has 1 engines: engine 0\n"), left.stderr + run.text
        further_steps(run, 2)
        came = scale(tmp_path, 3)
        assert came.stdout == "the run has 3 engines: engine 0, engine 1, engine 2\n", came.stderr + run.text
        moments.append(run.text.count("\nstep "))
        further_steps(run, 2)
        refused = scale(tmp_path, 99)
        assert refused.returncode == 1
        assert "96 more engines were asked for: the cluster has room for" in refused.stderr
        print(refused.stderr)
        if not flags:
            with joining(tmp_path) as node:
                assert node.stdout is not None
                assert "joined: engine 3\n" in node.stdout, run.text
                further_steps(run, 2)
                os.kill(node.pid, signal.SIGTERM)
                assert node.wait(60) == 0
            run.wait_for("engine 3 is gone", timeout=120)
            further_steps(run, 2)
        slow.unlink()
        assert run.wait(600) == 0, run.text
    assert run.left_over() == []
    check_trained(tmp_path, moments, prompts=PROMPTS, samples=SAMPLES)
    print(*[line for line in run.text.splitlines() if "engine" in line], sep="\n")
