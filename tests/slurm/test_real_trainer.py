"""The trainer itself on two nodes of a real Slurm: engines and ranks on both."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

pytest.importorskip("submitit")

from openrlhf.launcher.slurm.states import read_states, wait_for
from support.example_scripts import SCRIPTS, one_step, write_inputs
from support.mini_slurm import MiniSlurm
from support.slurm_runs import BIN, Desk, exposed, left_over, scancel, until
from support.stack_runs import make_workspace, of_the_clock
from support.tiny_models import tiny_qwen3

pytestmark = [
    pytest.mark.proof,
    pytest.mark.stack,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.timeout(3000),
    pytest.mark.usefixtures("cluster"),
]

NODES = ("--nodes", "2", "--cpus-per-task", "4")
SPREAD = ["--actor.num_nodes", "2", "--actor.num_gpus_per_node", "1", "--vllm.num_engines", "2"]
SMALL = ["--rollout.micro_batch_size", "8", "--train.micro_batch_size", "8"]
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


def metrics_of(board: Path) -> list[dict[str, Any]]:
    """What a run logged by step, without what the clock says."""
    (file,) = board.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "time" and not of_the_clock(k)} for row in rows]


def test_ranks_and_engines_on_two_nodes(cluster: MiniSlurm, desk: Desk, tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "work", tiny_qwen3(tmp_path / "tiny"), prompts=8)
    flags = [*workspace.flags, *SPREAD, *SMALL, "--logger.tensorboard_dir", str(tmp_path / "board")]
    done = desk.launch("slurm", *NODES, "--wait", "--", *flags, timeout=900, check=False)
    job = done.stdout.split()[1]
    print(done.stdout, done.stderr, desk.log(job), desk.log(job, 1))
    assert done.returncode == 0
    assert "COMPLETED" in done.stderr
    rows = [row for row in metrics_of(tmp_path / "board") if "train/reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["rollout/sync_error"] for row in rows) < 1e-4
    assert json.loads((workspace.path / "model_out" / "config.json").read_text())["model_type"] == "qwen3"
    assert left_over(cluster, job) == []


def places_of(job: str) -> dict[str, set[str]]:
    """The node runner's number -> which actors run below it."""
    found: dict[str, set[str]] = {}
    for entry in Path("/proc").iterdir():
        try:
            mark = re.search(
                rb"OPENRLHF_NODE[A-Z_]*=" + job.encode() + rb"\.\d+\.(\d+)", (entry / "environ").read_bytes()
            )
            name = re.match(rb"ray::(\w+)", (entry / "cmdline").read_bytes())
        except OSError:
            continue
        if mark and name:
            found.setdefault(mark[1].decode(), set()).add(name[1].decode())
    return found


def test_engines_and_agents_on_nodes_of_their_own(cluster: MiniSlurm, desk: Desk, tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "work", tiny_qwen3(tmp_path / "tiny"), prompts=8)
    flags = [*workspace.flags, *SMALL, "--actor.num_gpus_per_node", "1", "--vllm.num_engines", "1"]
    parts = ["--het", "engines=--nodes 1 --cpus-per-task 4", "--het", "agents=--nodes 1 --cpus-per-task 2"]
    job = desk.launch("slurm", "--cpus-per-task", "4", *parts, "--parsable", "--", *flags).stdout.strip()
    until(lambda: "step 1 " in desk.log(job) or read_states([job])[0].ended, 600, "first step")
    places = places_of(job)
    states = wait_for(job, pause=0.5, longest=1.0)
    print(desk.log(job), desk.log(job, 1), desk.log(job, 2), places)
    assert [state.state for state in states] == ["COMPLETED"] * 3
    assert "all 3 nodes are up: node1, node2, node3" in desk.log(job)
    assert "[node2] node 1 of 3" in desk.launch("logs", job, "--node", "node2").stdout
    assert places["1"] >= {"EngineActor"}
    assert places["2"] >= {"AgentActor"}
    assert places["0"] >= {"PolicyActor"}
    assert sum(len(actors & {"EngineActor", "AgentActor", "PolicyActor"}) for actors in places.values()) == 3
    assert left_over(cluster, job) == []


def test_an_evaluation_is_a_job_that_shows_no_secret(cluster: MiniSlurm, desk: Desk, tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "work", tiny_qwen3(tmp_path / "tiny"), prompts=8)
    keys = {"flag": token_hex(12), "variable": token_hex(12)}
    prompts = workspace.flags[workspace.flags.index("--data.prompt_dataset") + 1]
    flags = [*workspace.flags, "--vllm.num_engines", "1", "--eval.dataset", prompts, "--logger.wandb.key", keys["flag"]]
    own = ["--cpus-per-task", "4", "--env", f"HF_TOKEN={keys['variable']}", "--parsable"]
    job = desk.launch("slurm", *own, "--", "eval", "--json", "--", *flags).stdout.strip()
    found: list[str] = []
    while not read_states([job])[0].ended:
        found += exposed(keys.values(), [tmp_path, cluster.root, *cluster.local_folders(), Path.home() / ".netrc"])
    state = desk.end(job)
    assert (state.state, state.restarts) == ("COMPLETED", 0)
    (metrics,) = [json.loads(line) for line in desk.log(job).splitlines() if line.startswith('{"eval/')]
    assert metrics["eval/eval_num_samples"] > 0
    assert found == []
    assert left_over(cluster, job) == []


def test_the_example_script_trains_a_step(
    cluster: MiniSlurm, desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = SCRIPTS / "train_ppo_ray_slurm.sh"
    places = write_inputs(tmp_path) | {"MODEL": tiny_qwen3(tmp_path / "tiny")}
    for name, value in (places | {"PATH": f"{BIN}:{os.environ['PATH']}"}).items():
        monkeypatch.setenv(name, value)
    less = ["--gpus-per-node=0", "--cpus-per-task=4", "--mem=0", "--time=20", f"--output={tmp_path}/job.out"]
    spread = ["--vllm.num_engines", "2"]
    command = ["sbatch", "--parsable", *less, str(script), *one_step(script), *spread]
    job = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    state = desk.end(job)
    log = (tmp_path / "job.out").read_text()
    print(log)
    assert state.state == "COMPLETED"
    assert "done: 1 steps, 1 optimiser steps" in log
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3"
    assert left_over(cluster, job) == []


class Quickstart:
    """The quickstart's task in a folder: one warm start for all runs, which differ in where they run only."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(QUICKSTART))
        import run

        self.folder, self.script = folder, run
        self.paths = run.Paths(output=folder, seed=1)
        self.train, self.held_out = run.prepare(self.paths, 40)

    def flags(self, name: str, *extra: str) -> list[str]:
        """Flags of a run with two ranks and two engines and everything it writes in `name`."""
        own = ["--vllm.num_engines", "2", "--logger.tensorboard_dir", str(self.folder / name / "board")]
        own += ["--ckpt.path", str(self.folder / name / "checkpoints"), "--ckpt.save_steps", "15"]
        own += ["--ckpt.output_dir", str(self.folder / name / "model"), *extra]
        return self.script.train_command(self.paths, self.train, self.held_out, own)[3:]

    def accuracy(self, name: str) -> float:
        return self.script.judge(self.folder / name / "model", self.held_out)

    def metrics(self, name: str) -> list[dict[str, Any]]:
        return metrics_of(self.folder / name / "board")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    """With a run on this machine, which the others must equal."""
    quickstart = Quickstart(tmp_path_factory.mktemp("quickstart"))
    command = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *quickstart.flags("local")]
    environ = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False, env=environ)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    before = quickstart.script.judge(quickstart.paths.warm_start, quickstart.held_out)
    print(f"accuracy before {before:.3f}, after 40 steps here {quickstart.accuracy('local'):.3f}")
    return quickstart


def test_the_quickstart_on_two_nodes_equals_the_local_run(
    cluster: MiniSlurm, desk: Desk, quickstart: Quickstart
) -> None:
    flags = quickstart.flags("slurm", "--actor.num_nodes", "2", "--actor.num_gpus_per_node", "1")
    done = desk.launch("slurm", *NODES, "--wait", "--", *flags, timeout=1500, check=False)
    job = done.stdout.split()[1]
    print(done.stderr, desk.log(job)[-5000:])
    assert done.returncode == 0
    here, there = quickstart.metrics("local"), quickstart.metrics("slurm")
    assert len([row for row in there if "train/reward" in row]) == 40
    assert there == here
    assert quickstart.accuracy("slurm") == quickstart.accuracy("local") >= 0.75
    assert left_over(cluster, job) == []


def test_a_warned_run_resumes_bit_for_bit(cluster: MiniSlurm, desk: Desk, quickstart: Quickstart) -> None:
    flags = quickstart.flags("warned", "--actor.num_nodes", "2", "--actor.num_gpus_per_node", "1")
    job = desk.launch("slurm", *NODES, "--parsable", "--", *flags).stdout.strip()
    until(lambda: "step 6 " in desk.log(job), 900, "sixth step")
    scancel("--signal=USR2", job)
    state = desk.end(job)
    assert (state.state, state.exit_code, state.restarts) == ("COMPLETED", 0, 1)
    assert "resumed from" in desk.log(job)
    assert quickstart.metrics("warned") == quickstart.metrics("local")
    for name in ("local", "warned"):
        assert (quickstart.folder / name / "model" / "model.safetensors").is_file()
    read = [(quickstart.folder / name / "model" / "model.safetensors").read_bytes() for name in ("local", "warned")]
    assert read[0] == read[1]
    assert left_over(cluster, job) == []


def test_a_failing_trainer_fails_the_job_with_its_status(cluster: MiniSlurm, desk: Desk, tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "work", tiny_qwen3(tmp_path / "tiny"), reward="def reward_func(): 1/0\n")
    done = desk.launch("slurm", *NODES, "--wait", "--", *workspace.flags, *SPREAD, *SMALL, timeout=900, check=False)
    job = done.stdout.split()[1]
    assert done.returncode == 1
    assert "reward_func" in desk.log(job)
    assert left_over(cluster, job) == []
    shutil.rmtree(workspace.path)


def test_checkpoints_on_disks_of_the_nodes_end_the_job_before_its_first_step(
    cluster: MiniSlurm, desk: Desk, tmp_path: Path
) -> None:
    workspace = make_workspace(tmp_path / "work", tiny_qwen3(tmp_path / "tiny"))
    own = ["--ckpt.path", str(cluster.local / "checkpoints"), "--ckpt.save_steps", "1"]
    flags = [*workspace.flags, *SPREAD, *SMALL, *own]
    done = desk.launch("slurm", *NODES, "--wait", "--", *flags, timeout=900, check=False)
    job = done.stdout.split()[1]
    assert done.returncode == 1
    assert "is another folder on " in desk.log(job)
    assert "file system that all nodes share" in desk.log(job)
    assert "step 1 " not in desk.log(job)
    assert left_over(cluster, job) == []
    shutil.rmtree(workspace.path)
