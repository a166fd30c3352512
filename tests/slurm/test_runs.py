"""Runs on a real Slurm, with a stand-in for the trainer: what reaches it, how it ends, what is left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("submitit")

from openrlhf.launcher.slurm.states import read_states
from support.mini_slurm import MiniSlurm
from support.slurm_runs import BIN, Desk, cancel_all, left_over, scancel, until

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]

ROOT = Path(__file__).parents[2]
START_SECONDS = 400.0
"""For Ray on all nodes; a busy machine needs minutes."""
NASTY = ["a b", '{"k": "v w", "n": [1,2]}', "a $HOME", "it's", "*", ";", "line\nbreak", "", "Grüße 你好", '"', "\\"]
ENVIRONMENT = {"NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false", "HF_HOME": "/a b", "RAY_DEDUP_LOGS": "1"}
TWO_NODES = ("--nodes", "2", "--nodelist", "node1,node2", "--cpus-per-task", "2", "--gpus-per-node", "h100:2")


@pytest.fixture(scope="module")
def neighbours(cluster: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Desk, str, str]]:
    """Two runs at once on the same two nodes: one that counts for long, one that reports and fails with 17."""
    desk = Desk(tmp_path_factory.mktemp("neighbours"))
    env = [word for name, value in ENVIRONMENT.items() for word in ("--env", f"{name}={value}")]
    names = [word for value in NASTY for word in ("--logger.wandb.run_name", value)]
    long = desk.submit(f"count {desk.notes} 900", *TWO_NODES)
    try:
        until(desk.notes.exists, START_SECONDS, "start of the first run")  # Ray limits its start: not all at once
        short = desk.submit(f"report {desk.folder}/seen.json 17", *TWO_NODES, *env, "--job-name", "a b", flags=names)
        yield desk, long, short
    finally:
        cancel_all()


def test_arguments_environment_and_exit_status_b105_b107(cluster: MiniSlurm, neighbours: tuple[Desk, str, str]) -> None:
    desk, _, short = neighbours
    state = desk.end(short)
    assert (state.state, state.exit_code) == ("FAILED", 17)
    seen = json.loads((desk.folder / "seen.json").read_text())
    assert [value for name, value in pairwise(seen["flags"]) if name.endswith("run_name")] == NASTY
    for worker in seen["workers"]:
        assert {name: worker[name] for name in ENVIRONMENT} == ENVIRONMENT
    assert left_over(cluster, short) == []
    assert re.search(rf"^{short} +FAILED +17 ", desk.launch("status", short).stdout, re.MULTILINE)


def test_two_runs_on_the_same_nodes_do_not_meet_b092_b096(neighbours: tuple[Desk, str, str]) -> None:
    desk, long, short = neighbours
    desk.end(short)
    seen = json.loads((desk.folder / "seen.json").read_text())
    devices = {(worker["node"], worker["CUDA_VISIBLE_DEVICES"]) for worker in seen["workers"]}
    assert devices == {(node, gpu) for node in ("node1", "node2") for gpu in ("2", "3")}  # the neighbour has 0 and 1
    assert "all 2 nodes are up: node1, node2" in desk.log(long)
    assert "all 2 nodes are up: node1, node2" in desk.log(short)
    first = [log.split("ports from ")[1].split(",")[0] for log in (desk.log(long), desk.log(short))]
    assert len(set(first)) == 2
    assert read_states([long])[0].state == "RUNNING"


def test_cancel_leaves_nothing_b106(cluster: MiniSlurm, neighbours: tuple[Desk, str, str]) -> None:
    desk, long, _ = neighbours
    with subprocess.Popen(["bash", "-c", "exec -a raylet sleep 600"]) as other:  # another user's, or another run's
        scancel(long)
        until(lambda: not left_over(cluster, long), 20, "clean end")
        assert other.poll() is None
        other.kill()
    assert desk.end(long).state == "CANCELLED"
    assert left_over(cluster, long) == []


@pytest.mark.proof
def test_a_warning_saves_and_requeues_under_the_same_id_b103(cluster: MiniSlurm, desk: Desk) -> None:
    job = desk.submit(f"count {desk.notes} 12", "--cpus-per-task", "2")
    until(desk.notes.exists, START_SECONDS, "trainer")
    time.sleep(3)
    scancel("--signal=USR2", job)  # as Slurm does before the time limit
    state = desk.end(job)
    assert (state.state, state.restarts) == ("COMPLETED", 1)
    first, resumed, last = desk.notes.read_text().splitlines()
    assert (first, last) == (f"0 {job}", "done 12")
    assert resumed.split()[1] == job
    assert 0 < int(resumed.split()[0]) < 12
    assert left_over(cluster, job) == []


def test_a_batch_script_of_one_s_own(cluster: MiniSlurm, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    site = desk.folder / "site.toml"
    site.write_text(f'python = "{desk.stand_in()}"\n')
    monkeypatch.setenv("OPENRLHF_SLURM_CONFIG", str(site))
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", f"count {desk.notes} 12")
    script = ROOT / "examples" / "scripts" / "train_ppo_ray_slurm.sh"
    less = ["--gpus-per-node=1", "--cpus-per-task=2", "--mem=0", "--time=10", f"--output={desk.folder}/job.out"]
    command = ["sbatch", "--parsable", *less, str(script), "--ckpt.path", str(desk.folder / "checkpoints")]
    job = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    until(desk.notes.exists, START_SECONDS, "trainer")
    scancel("--batch", "--signal=USR1", job)
    state = desk.end(job)
    print((desk.folder / "job.out").read_text()[-6000:])
    assert (state.state, state.restarts) == ("COMPLETED", 1)
    notes = desk.notes.read_text().splitlines()
    assert (notes[0], notes[-1]) == (f"0 {job}", "done 12")
    assert left_over(cluster, job) == []
    assert "all 2 nodes are up" in desk.launch("logs", job).stdout


def test_a_sweep_is_a_job_array(desk: Desk) -> None:
    words = ["--python", desk.stand_in(), "--env", f"STAND_IN=count {desk.notes} 3", "--cpus-per-task", "2"]
    lines = ["--set", "actor.adam.lr=1e-6,5e-7,1e-7", "--sweep-dir", str(desk.folder / "sweep dir")]
    lines += ["--array-parallelism", "2", "--parsable", "--wait"]
    done = desk.launch("sweep", *words, *lines, "--", *desk.flags, timeout=START_SECONDS)
    jobs = done.stdout.split()
    array = jobs[0].split("_")[0]
    assert jobs == [f"{array}_{i}" for i in range(3)]
    assert [s.state for s in read_states([array])] == ["COMPLETED"] * 3
    assert sorted(desk.notes.read_text().splitlines())[3:] == ["done 3"] * 3
    table = json.loads((desk.folder / "sweep dir" / "sweep.json").read_text())
    assert table["run001"] == {"actor.adam.lr": "5e-7"}
    assert (
        sorted(p.name for p in (desk.folder / "sweep dir").glob("run*/checkpoints/global_step2"))
        == ["global_step2"] * 3
    )


FAKE_APPTAINER = """#!/bin/sh
echo "$@" >> {calls}
while [ "$1" != {image} ]; do shift; done
shift
PATH={bin}:$PATH exec "$@"
"""
"""Runs what it is told to run in an image, without the image."""


def test_selfcheck_on_every_node_in_a_container(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, image = desk.folder / "calls", "/images/openrlhf.sif"
    (desk.folder / "bin").mkdir()
    (desk.folder / "bin" / "apptainer").write_text(FAKE_APPTAINER.format(calls=calls, image=image, bin=BIN))
    (desk.folder / "bin" / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{desk.folder / 'bin'}:{os.environ['PATH']}")
    where = ["--nodes", "2", "--cpus-per-task", "1", "--env", f"XDG_CACHE_HOME={desk.folder}"]
    inside = ["--container", image, "--container-mount", "/d:/d"]
    words = [*where, *inside, "--parsable", "--wait", "--", "selfcheck", "--only", "versions", "ranks"]
    job = desk.launch("slurm", *words, timeout=START_SECONDS).stdout.strip()
    for node in range(2):
        log = desk.log(job, node)
        assert re.search(r"^ok +versions +torch ", log, re.MULTILINE)
        assert re.search(r"^skipped ranks +needs 2 GPUs", log, re.MULTILINE)
    (state,) = read_states([job])
    assert (state.state, state.exit_code) == ("COMPLETED", 0)
    said = f"exec --nv --pwd {desk.folder} --bind /d:/d {image} python3 -u -m submitit.core._submit"
    assert [line.startswith(said) for line in calls.read_text().splitlines()] == [True, True]


def test_script_is_accepted_and_clean(desk: Desk) -> None:
    options = ["--nodes", "2", "--gpus-per-node", "h100:2", "--job-name", "a b", "--env", "A=it's", "--setup", "true"]
    asked = desk.launch("slurm", *options, "--test-only", "--", *desk.flags)
    assert "to start at" in asked.stderr
    refused = desk.launch("slurm", "--nodes", "9", "--test-only", "--", *desk.flags, check=False)
    assert refused.returncode != 0
    container = ["--container", "/images/a b.sif", "--container-mount", "/d:/d", "--module", "cuda/13.0"]
    apart = ["--het", "engines=--nodes 1 --gpus-per-node h100:1", "--nodes", "1"]
    sweep = ["--set", "actor.adam.lr=1,2"]
    script = desk.folder / "job.sh"
    for name, words in (("slurm", []), ("slurm", container), ("slurm", apart), ("sweep", sweep)):
        flags = [*desk.flags, *(["--actor.num_gpus_per_node", "2"] if words is apart else [])]
        script.write_text(desk.launch(name, *options, *words, "--dry-run", "--", *flags).stdout)
        subprocess.run(["sbatch", "--test-only", str(script)], check=True, timeout=60)
        subprocess.run(["shellcheck", str(script)], check=True, timeout=60)


def test_states_without_accounting_b102(desk: Desk) -> None:
    job = desk.submit(f"count {desk.notes} 1", "--sbatch-arg=--hold")
    assert subprocess.run(["sacct", "-j", job], capture_output=True, timeout=60, check=False).returncode != 0
    (state,) = read_states([job])
    assert (state.state, state.reason) == ("PENDING", "JobHeldUser")
    assert "it has no log yet" in desk.launch("logs", job, check=False).stderr
    scancel(job)
    assert desk.end(job).state == "CANCELLED"
