"""Supervised training on two nodes of a real Slurm: it is warned, loses a node, is pre-empted, runs out of time.

What it trained is then what two ranks on this machine train without any of that, bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

pytest.importorskip("submitit")

from openrlhf.launcher.slurm.states import JobState, read_states
from support.mini_slurm import MiniSlurm
from support.slurm_runs import BIN, MARK, Desk, exposed, left_over, scancel, until
from support.supervised_runs import write_data
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.timeout(1500), pytest.mark.usefixtures("cluster")]

NODES = ("--nodes", "2", "--cpus-per-task", "2", "--env", "OMP_NUM_THREADS=1", "--env", "WANDB_MODE=offline")
START_SECONDS = 400.0
KEYS = {"flag": token_hex(20), "variable": token_hex(12)}


class Runs:
    """The trainers on the same model and data, in one folder. steps: of each run, long enough to be interrupted.

    slow: a step takes a tenth of a second, else a third of that.
    """

    def __init__(self, folder: Path, steps: int, *, slow: bool = False) -> None:
        self.folder = folder
        self.model = tiny_qwen3(folder / "model")
        self.epochs, self.batch, self.micro_batch = (steps, 16, 1) if slow else (steps // 4, 4, 2)
        write_data(folder, rows=16)

    def flags(self, kind: str, name: str, *more: str) -> list[str]:
        data: dict[str, Any] = {"data.dataset": self.folder / "pairs.jsonl", "data.prompt_key": "prompt"}
        if kind == "sft":
            data = {"data.dataset": self.folder / "sft.jsonl", "data.input_key": "input", "data.output_key": "output"}
        flags = {
            "model.model_name_or_path": self.model,
            **data,
            "data.max_len": 64,
            "train.batch_size": self.batch,
            "train.micro_batch_size": self.micro_batch,
            "train.max_epochs": self.epochs,
            "adam.lr": 1e-3,
            "ckpt.path": self.folder / f"checkpoints-{name}",
            "ckpt.output_dir": self.folder / name,
            "ckpt.save_steps": 20,
        }
        return [*(w for k, v in flags.items() for w in (f"--{k}", str(v))), "--data.apply_chat_template", *more]

    def straight(self, kind: str) -> bytes:
        """The weights of a run on this machine that nothing interrupts."""
        name = f"straight-{kind}"
        if not (self.folder / name / "model.safetensors").exists():
            command = [str(BIN / "torchrun"), "--nproc-per-node", "2", "-m", f"openrlhf.cli.train_{kind}"]
            environ = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
            words = [*command, *self.flags(kind, name)]
            done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=900, check=False)
            assert done.returncode == 0, done.stderr
        return self.weights(name)

    def weights(self, name: str) -> bytes:
        return (self.folder / name / "model.safetensors").read_bytes()

    def submit(self, desk: Desk, kind: str, name: str, *options: str, more: Sequence[str] = ()) -> str:
        """The job's id, once it has trained some steps."""
        words = [*NODES, *options, "--parsable", "--", f"train_{kind}", *self.flags(kind, name, *more)]
        job = desk.launch("slurm", *words).stdout.strip()
        until(lambda: "step 30 " in desk.log(job) or going_on(job) is None, START_SECONDS, "thirtieth step")
        return job


def going_on(job: str) -> str | None:
    """The state of a job that has not ended."""
    (state,) = read_states([job])
    return None if state.ended else state.state


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("supervised"), 240)


@pytest.fixture(scope="module")
def long_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("long"), 600)


@pytest.fixture(scope="module")
def slow_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("slow"), 1600, slow=True)


def check_resumed(
    cluster: MiniSlurm, desk: Desk, runs: Runs, job: str, kind: str, name: str, *, restarts: int = 1
) -> JobState:
    """The job ended well in a further life, with the weights of a run that nothing interrupted."""
    state = desk.end(job)
    assert (state.state, state.exit_code) == ("COMPLETED", 0)
    assert 1 <= state.restarts <= restarts
    assert "resumed from" in desk.log(job)
    assert runs.weights(name) == runs.straight(kind)
    until(lambda: not left_over(cluster, job), 20, "clean end")
    return state


def test_a_warned_run_resumes_bit_for_bit_and_shows_no_secret_b103(cluster: MiniSlurm, desk: Desk, runs: Runs) -> None:
    key = ["--logger.wandb.key", KEYS["flag"]]
    job = runs.submit(desk, "sft", "warned", "--env", f"HF_TOKEN={KEYS['variable']}", more=key)
    places = [desk.folder, runs.folder, cluster.root, *cluster.local_folders(), Path.home() / ".netrc"]
    found = exposed(KEYS.values(), places)
    shown = desk.folder / "shown"
    shown.write_text(KEYS["variable"])
    assert exposed(KEYS.values(), places) == [*found, str(shown)]  # it would be seen
    shown.unlink()
    scancel("--signal=USR2", job)  # as Slurm does before the time limit
    check_resumed(cluster, desk, runs, job, "sft", "warned")
    assert "all 2 nodes are up: node1, node2" in desk.log(job)
    assert "warned: asking the trainer to save and end" in desk.log(job)
    (table,) = [line for line in desk.launch("status", job).stdout.splitlines() if line.startswith(job)]
    assert table.split()[1:4] == ["COMPLETED", "0", "1"]
    assert [*found, *exposed(KEYS.values(), places)] == []


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["sft", "rm", "dpo"])
def test_the_loss_of_a_node(repaired: MiniSlurm, desk: Desk, long_runs: Runs, kind: str) -> None:
    job = long_runs.submit(desk, kind, f"{kind}-lost")
    assert read_states([job])[0].nodes == "node[1-2]"
    repaired.kill_node("node2")
    state = check_resumed(repaired, desk, long_runs, job, kind, f"{kind}-lost")
    assert "node2 left the run" in desk.log(job)
    assert state.nodes == "node[1,3]"


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["sft", "rm", "dpo"])
def test_a_higher_partition_takes_the_nodes(cluster: MiniSlurm, desk: Desk, long_runs: Runs, kind: str) -> None:
    job = long_runs.submit(desk, kind, f"{kind}-taken", "--partition", "low")
    words = ["sbatch", "--parsable", "--partition=high", "--nodes=3", "--exclusive", "--time=1", "--output=/dev/null"]
    subprocess.run([*words, "--wrap=sleep 5"], capture_output=True, text=True, check=True, timeout=60)
    check_resumed(cluster, desk, long_runs, job, kind, f"{kind}-taken")
    assert "warned: asking the trainer to save and end" in desk.log(job)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["sft", "rm", "dpo"])
def test_a_run_longer_than_its_time_limit(cluster: MiniSlurm, desk: Desk, slow_runs: Runs, kind: str) -> None:
    limit = ["--time", "3", "--signal-delay", "60", "--max-restarts", "20"]  # Slurm warns up to a minute earlier
    job = slow_runs.submit(desk, kind, f"{kind}-long", *limit)
    check_resumed(cluster, desk, slow_runs, job, kind, f"{kind}-long", restarts=20)
    assert "warned: asking the trainer to save and end" in desk.log(job)


@pytest.mark.proof
def test_checkpoints_on_disks_of_the_nodes_end_the_job_before_its_first_step(
    cluster: MiniSlurm, desk: Desk, runs: Runs
) -> None:
    own = ["--ckpt.path", str(cluster.local / "checkpoints")]
    words = [*NODES, "--wait", "--", "train_sft", *runs.flags("sft", "local", *own)]
    done = desk.launch("slurm", *words, timeout=START_SECONDS, check=False)
    job = done.stdout.split()[1]
    assert done.returncode == 1
    assert "is another folder on " in desk.log(job)
    assert "Give an absolute path on a file system that all nodes share" in desk.log(job)
    assert "step 1 " not in desk.log(job)
    assert left_over(cluster, job) == []


@pytest.mark.proof
def test_a_killed_rank_of_another_node_ends_the_job(cluster: MiniSlurm, desk: Desk, runs: Runs) -> None:
    job = runs.submit(desk, "sft", "killed")
    ranks = [pid for pid, environ in processes_of(job) if b"\0RANK=1\0" in b"\0" + environ]
    os.kill(ranks[0], signal.SIGKILL)
    state = desk.end(job)
    assert (state.state, state.restarts) == ("FAILED", 0)
    assert state.exit_code in (1, 137)  # of the first rank, which lost its partner, or of the killed one
    until(lambda: not left_over(cluster, job), 20, "clean end")


def processes_of(job: str) -> list[tuple[int, bytes]]:
    """Process ids and environments of a job's processes."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environ = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if f"{MARK}={job}.".encode() in environ:
            found.append((int(entry.name), environ))
    return found


@pytest.mark.proof
def test_a_reward_server_is_a_job(cluster: MiniSlurm, desk: Desk, runs: Runs) -> None:
    runs.straight("rm")
    flags = ["--reward.model_name_or_path", str(runs.folder / "straight-rm"), "--host", "0.0.0.0", "--port", "5317"]
    job = desk.launch("slurm", "--parsable", "--", "serve_rm", *flags, "--api_key", KEYS["flag"]).stdout.strip()
    until(lambda: "reward server: --reward.remote_url http://node1:5317/get_reward" in desk.log(job), 120, "server")
    body = json.dumps({"query": ["sort 321 123"], "prompts": ["sort 321"], "labels": [""]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS['flag']}"}
    request = urllib.request.Request(f"http://{cluster.network}.1:5317/get_reward", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert len(json.load(answer)["rewards"]) == 1
    assert exposed(KEYS.values(), [desk.folder, cluster.root, *cluster.local_folders()]) == []
    scancel(job)
    assert desk.end(job).state == "CANCELLED"
    until(lambda: not left_over(cluster, job), 20, "clean end")
