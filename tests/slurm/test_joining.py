"""A second job lends its node to a run of another one; it is pre-empted, comes back and is cancelled."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("submitit")

from openrlhf.launcher.slurm.states import read_states
from support.elastic_runs import check_trained
from support.mini_slurm import MiniSlurm
from support.slurm_runs import Desk, left_over, scancel, until
from support.stack_runs import make_workspace
from support.tiny_models import tiny_qwen3

pytestmark = [
    pytest.mark.proof,
    pytest.mark.stack,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.timeout(2400),
    pytest.mark.usefixtures("cluster"),
]

PROMPTS, SAMPLES = 480, 4
SLOW_REWARD = """
import pathlib, time

def reward_func(queries, prompts, labels):
    slow = pathlib.Path(__file__).parent / "slow"
    until = time.monotonic() + 4
    while slow.exists() and time.monotonic() < until:
        time.sleep(0.1)
    return {"rewards": [float(len(q) % 3) for q in queries]}
"""
ASYNC = ["--train.async_enable", "--train.partial_rollout_enable", "--train.max_staleness", "1"]
TAKE = ["sbatch", "--parsable", "--partition=high", "--nodelist=node2", "--exclusive", "--time=1", "--output=/dev/null"]

GONE = ": the run goes on without it"


class Watched:
    """The job whose run others join."""

    def __init__(self, desk: Desk, job: str) -> None:
        self.desk, self.job = desk, job

    @property
    def text(self) -> str:
        return self.desk.log(self.job)

    @property
    def steps(self) -> int:
        return self.text.count("\nstep ")

    def wait_for(self, text: str, seconds: float, times: int = 1) -> None:
        """Until the run's log has a text so many times."""
        until(lambda: self.text.count(text) >= times or read_states([self.job])[0].ended, seconds, text)
        assert self.text.count(text) >= times, self.text[-6000:]

    def further_steps(self, count: int) -> None:
        self.wait_for("\nstep ", 300, self.steps + count)


def test_a_job_that_may_be_pre_empted_lends_its_node_to_a_run(cluster: MiniSlurm, desk: Desk, tmp_path: Path) -> None:
    def disk_of(name: str) -> list[str]:
        """A job's own folder on its nodes, which the other job's nodes do not have."""
        return ["--env", f"SLURM_TMPDIR={cluster.local / name}"]

    folder = tmp_path / "work"
    workspace = make_workspace(folder, tiny_qwen3(tmp_path / "tiny"), prompts=PROMPTS, reward=SLOW_REWARD)
    slow = folder / "slow"
    slow.touch()
    own = ["--nodelist", "node1", *disk_of("a"), "--cpus-per-task", "4", "--parsable", "--"]
    run = Watched(desk, desk.launch("slurm", *own, *workspace.flags, *ASYNC).stdout.strip())
    run.wait_for("step 3 ", 600)
    moments = [run.steps]
    lend = ["--partition", "low", "--nodelist", "node2", *disk_of("b"), "--cpus-per-task", "4", "--parsable", "--"]
    lender = desk.launch("slurm", *lend, "join", str(folder / "checkpoints")).stdout.strip()
    run.wait_for("1 engines became 2: engine 0, engine 1", 400)
    run.further_steps(2)
    subprocess.run([*TAKE, "--wrap=sleep 5"], check=True, capture_output=True, timeout=60)
    run.wait_for(GONE, 120)
    run.further_steps(2)
    run.wait_for("1 engines became 2: engine 0, engine 1", 400, times=2)
    until(lambda: desk.log(lender).count("joined: engine 1") == 2, 20, "word of it to the second job")
    run.further_steps(2)
    scancel(lender)
    lent = desk.end(lender)
    assert (lent.state, lent.restarts) == ("CANCELLED", 1)
    run.wait_for(GONE, 120, times=2)
    moments.append(run.steps)
    run.further_steps(2)
    node1, node2, _ = cluster.local_folders()
    assert [path.name for path in node2.iterdir()] == ["b"]
    until(lambda: not list((node2 / "b").iterdir()), 20, "clean end of the second job")
    slow.unlink()
    state = desk.end(run.job)
    print(*[line for line in run.text.splitlines() if "engine" in line], sep="\n")
    assert (state.state, state.exit_code, state.restarts) == ("COMPLETED", 0, 0)
    assert all("engine 1 is gone" in line for line in run.text.splitlines() if GONE in line)
    check_trained(folder, moments, prompts=PROMPTS, samples=SAMPLES)
    assert left_over(cluster, run.job) == left_over(cluster, lender) == list((node1 / "a").iterdir()) == []
