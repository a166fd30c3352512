"""Jobs on a real Slurm, with a stand-in for the trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("submitit")

from openrlhf.launcher.slurm.job import Job
from openrlhf.launcher.slurm.options import read_options
from openrlhf.launcher.slurm.runner import NodeSpec
from openrlhf.launcher.slurm.script import make_executor
from openrlhf.launcher.slurm.states import JobState, read_states, wait_for
from openrlhf.launcher.slurm.submit import _parser, main

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]

DRIVER = str(Path(__file__).parents[1] / "support" / "slurm_driver.py")
NASTY = ["a b", '{"k": "v w", "n": [1,2]}', "$HOME", "it's", "*", ";", "line\nbreak", "", "Grüße 你好", '"', "\\"]
FLAGS = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "p", "--reward.remote_url", "r.py"]


def submit(folder: Path, spec: NodeSpec, *options: str) -> str:
    """Submit a job of two nodes; its id."""
    words = ["--nodes", "2", "--cpus-per-task", "4", "--log-dir", str(folder / "logs dir"), "--time", "30", *options]
    executor = make_executor(read_options(_parser(), words))
    return executor.submit(Job(spec)).job_id


def driver(*arguments: str, checkpoints: str = "") -> NodeSpec:
    return NodeSpec(
        command=(sys.executable, DRIVER, *arguments), resume=("--ckpt.load_enable",), checkpoints=checkpoints
    )


def log_of(folder: Path, job: str, node: int = 0) -> str:
    path = folder / "logs dir" / job / f"{job}_{node}_log.out"
    return path.read_text() if path.exists() else ""


def end_of(folder: Path, job: str) -> JobState:
    (state,) = wait_for(job, pause=1)
    print(log_of(folder, job), log_of(folder, job, 1), sep="\n--- node 1\n")
    return state


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.5)


def left_over(job: str) -> list[str]:
    """Processes and folders of a job that still exist."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"OPENRLHF_NODE_RUN={job}.".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().decode())
        except OSError:
            continue
    return found + [str(p) for p in Path("/tmp").glob(f"r{job}")]


def test_status_and_arguments_reach_slurm_and_trainer_b105(tmp_path: Path) -> None:
    seen = tmp_path / "seen.json"
    job = submit(tmp_path, driver("arguments", str(seen), "17", *NASTY), "--env", "HF_HOME=/x y", "--job-name", "a b")
    state = end_of(tmp_path, job)
    assert (state.state, state.exit_code) == ("FAILED", 17)
    answer = json.loads(seen.read_text())
    assert answer["arguments"] == ["17", *NASTY]
    assert len(answer["nodes"]) == 2
    assert answer["HF_HOME"] == "/x y"
    assert left_over(job) == []


def test_warning_saves_and_requeues_in_the_same_job_b103(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    job = submit(tmp_path, driver("count", str(saves), "20", checkpoints=str(saves)))
    until((saves / "lives").exists, 600, "trainer")
    time.sleep(3)
    subprocess.run(["scancel", "--signal=USR2", job], check=True, timeout=60)
    state = end_of(tmp_path, job)
    assert (state.state, state.restarts) == ("COMPLETED", 1)
    lives = [line.split() for line in (saves / "lives").read_text().splitlines()]
    (saved,) = [p.name.removeprefix("global_step") for p in saves.glob("global_step*")]
    assert lives == [["0", job], [saved, job]]
    assert (saves / "done").read_text() == "20"
    assert left_over(job) == []


def test_cancel_leaves_nothing(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    job = submit(tmp_path, driver("count", str(saves), "600"))
    until((saves / "lives").exists, 600, "trainer")
    subprocess.run(["scancel", job], check=True, timeout=60)
    until(lambda: not left_over(job), 20, f"clean end of job {job}: {left_over(job)}")
    assert end_of(tmp_path, job).state == "CANCELLED"


def test_script_is_accepted_and_clean(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "2", "--gpus-per-node", "h100:2", "--job-name", "a b", "--log-dir", str(tmp_path / "l")]
    assert main([*options, "--test-only", "--", *FLAGS]) == 0
    assert "to start at" in capfd.readouterr().err
    assert main(["--nodes", "9", "--test-only", "--", *FLAGS]) != 0
    capfd.readouterr()
    assert main([*options, "--dry-run", "--", *FLAGS]) == 0
    (tmp_path / "job.sh").write_text(capfd.readouterr().out)
    subprocess.run(["shellcheck", str(tmp_path / "job.sh")], check=True, timeout=60)


def test_state_without_sacct_b102(tmp_path: Path) -> None:
    job = submit(tmp_path, driver("count", str(tmp_path / "s"), "1"), "--sbatch-arg=--hold")
    assert (read_states([job])[0].state, os.environ["SLURM_CONF"] != "") == ("PENDING", True)
    subprocess.run(["scancel", job], check=True, timeout=60)
    assert end_of(tmp_path, job).state == "CANCELLED"
