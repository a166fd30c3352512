"""Nodes that die or are taken away for another job, and time that runs out: a real Slurm, a stand-in trainer."""

from __future__ import annotations

import subprocess
import time

import pytest

pytest.importorskip("submitit")

from openrlhf.launcher.slurm.states import read_states
from support.mini_slurm import MiniSlurm
from support.slurm_runs import Desk, left_over, until

pytestmark = [pytest.mark.proof, pytest.mark.xdist_group("slurm"), pytest.mark.timeout(1500)]

START_SECONDS = 400.0


def test_the_loss_of_a_node_requeues_the_run(repaired: MiniSlurm, desk: Desk) -> None:
    job = desk.submit(f"count {desk.notes} 100", "--nodes", "2", "--cpus-per-task", "2")
    until(desk.notes.exists, START_SECONDS, "trainer")
    time.sleep(5)
    first = read_states([job])[0]
    assert first.nodes == "node[1-2]"
    killed_at = time.monotonic()
    repaired.kill_node("node2")
    until(lambda: "node2 left the run" in desk.log(job), 60, "word of the lost node")
    print(f"noticed after {time.monotonic() - killed_at:.0f} s")
    until(lambda: len(desk.notes.read_text().splitlines()) == 2, START_SECONDS, "second life")
    print(f"second life after {time.monotonic() - killed_at:.0f} s")
    state = desk.end(job)
    assert (state.state, state.restarts, state.nodes) == ("COMPLETED", 1, "node[1,3]")
    second = desk.notes.read_text().splitlines()[1].split()
    assert int(second[0]) >= 2
    assert second[1] == job
    assert left_over(repaired, job) == []


def test_without_requeue_the_loss_of_a_node_ends_the_run(repaired: MiniSlurm, desk: Desk) -> None:
    job = desk.submit(f"count {desk.notes} 900", "--nodes", "2", "--cpus-per-task", "2", "--max-restarts", "0")
    until(desk.notes.exists, START_SECONDS, "trainer")
    killed_at = time.monotonic()
    repaired.kill_node("node2")
    state = desk.end(job)
    print(f"ended after {time.monotonic() - killed_at:.0f} s as {state.state}, status {state.status}")
    assert state.status != 0
    assert "no requeue: it was restarted 0 times, --max-restarts is 0" in desk.log(job)
    until(lambda: not left_over(repaired, job), 20, "clean end")


def test_the_loss_of_the_head_requeues_the_run(repaired: MiniSlurm, desk: Desk) -> None:
    job = desk.submit(f"count {desk.notes} 60", "--nodes", "2", "--cpus-per-task", "2")
    until(desk.notes.exists, START_SECONDS, "trainer")
    time.sleep(5)
    killed_at = time.monotonic()
    repaired.kill_node("node1")
    until(lambda: "the head is gone" in desk.log(job, 1), 60, "word of the lost head")
    state = desk.end(job)
    print(f"ended after {time.monotonic() - killed_at:.0f} s on {state.nodes}")
    assert (state.state, state.restarts, state.nodes) == ("COMPLETED", 1, "node[2-3]")
    until(lambda: not left_over(repaired, job), 20, "clean end")


def test_a_higher_partition_takes_the_nodes(cluster: MiniSlurm, desk: Desk) -> None:
    job = desk.submit(f"count {desk.notes} 60", "--nodes", "3", "--cpus-per-task", "8", "--partition", "low")
    until(desk.notes.exists, START_SECONDS, "trainer")
    time.sleep(5)
    words = ["sbatch", "--parsable", "--partition=high", "--nodes=3", "--exclusive", "--time=1", "--output=/dev/null"]
    other = subprocess.run([*words, "--wrap=sleep 5"], capture_output=True, text=True, check=True, timeout=60)
    until(lambda: read_states([other.stdout.strip()])[0].ended, 120, "end of the other job")
    state = desk.end(job)
    assert (state.state, state.restarts) == ("COMPLETED", 1)
    first, second, last = desk.notes.read_text().splitlines()
    assert (first, last) == (f"0 {job}", "done 60")
    assert int(second.split()[0]) >= 5
    assert second.split()[1] == job
    assert "warned: asking the trainer to save and end" in desk.log(job)
    assert left_over(cluster, job) == []


def test_a_run_longer_than_its_time_limit(cluster: MiniSlurm, desk: Desk) -> None:
    job = desk.submit(f"count {desk.notes} 150", "--time", "3", "--signal-delay", "75", "--cpus-per-task", "2")
    state = desk.end(job)
    lives = [line.split() for line in desk.notes.read_text().splitlines()]
    print(lives)
    assert state.state == "COMPLETED"
    assert 1 <= state.restarts <= 3
    assert lives[0] == ["0", job]
    assert lives[-1] == ["done", "150"]
    assert len(lives) == state.restarts + 2
    assert {life[1] for life in lives[:-1]} == {job}
