"""States of jobs, with and without sacct, and waiting for the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from openrlhf.launcher.slurm.states import (
    JobState,
    exit_status,
    from_sacct,
    plain_state,
    read_states,
    wait_for,
)
from openrlhf.launcher.slurm.watch import log_file, logs, status, table

RUNNING = (
    "JobId=7 JobName=x UserId=a(1) JobState=RUNNING Reason=None Restarts=1 ExitCode=0:0 "
    "NodeList=node[1-2] StdOut=/logs/7.out\n"
)


def programs(**outputs: str):
    def run(command: Sequence[str]) -> str:
        return outputs.get(command[0], "")

    return run


def test_state_without_sacct_b102() -> None:
    (state,) = read_states(["7"], programs(scontrol=RUNNING))
    assert state == JobState(job_id="7", state="RUNNING", restarts=1, nodes="node[1-2]", output="/logs/7.out")
    assert not state.ended


def test_state_with_squeue_or_sacct_alone() -> None:
    (state,) = read_states(["7"], programs(squeue="7|PENDING|Priority|\n"))
    assert (state.state, state.reason) == ("PENDING", "Priority")
    (state,) = read_states(["7"], programs(sacct="7|FAILED|17:0|node1\n"))
    assert (state.state, state.exit_code, state.status, state.ended) == ("FAILED", 17, 17, True)


def test_unknown_job() -> None:
    (state,) = read_states(["7"], programs())
    assert (state.state, state.ended) == ("UNKNOWN", False)


def test_many_jobs_are_asked_for_at_once() -> None:
    """A controller serves a whole cluster: three questions at most, however many jobs."""
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> str:
        asked.append(command)
        text = "".join(f"JobId={i} JobState=RUNNING ExitCode=0:0 NodeList=n1\n" for i in (7, 77, 8))
        return {"scontrol": text, "sacct": "9|FAILED|17:0|n1\n"}.get(command[0], "")

    states = read_states(["7", "8", "9", "10"], run)
    assert [(s.job_id, s.state) for s in states] == [
        ("7", "RUNNING"),
        ("8", "RUNNING"),
        ("9", "FAILED"),
        ("10", "UNKNOWN"),
    ]
    assert [command[0] for command in asked] == ["scontrol", "sacct", "squeue"]
    assert asked[0] == ["scontrol", "-o", "show", "job"]
    asked.clear()
    read_states(["7"], run)
    assert asked == [["scontrol", "-o", "show", "job", "7"]]
    asked.clear()
    assert read_states([], run) == []
    assert asked == []


def test_parts_of_a_heterogeneous_job() -> None:
    text = "".join(f"JobId={8 + i} HetJobId=8 HetJobOffset={i} JobState=RUNNING NodeList=n{i}\n" for i in range(2))
    assert [(s.job_id, s.nodes) for s in read_states(["8"], programs(scontrol=text))] == [("8", "n0"), ("8+1", "n1")]


def test_slurm_is_asked_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("openrlhf.launcher.slurm.states.time.sleep", slept.append)
    sequence = iter(["PENDING"] * 12 + ["RUNNING"] * 3 + ["COMPLETED"])
    wait_for("7", lambda job: [JobState(job_id=job, state=next(sequence))])
    assert slept[:3] == [3.0, 4.5, 6.75]
    assert max(slept) == slept[11] == 30.0
    assert slept[12:15] == [3.0, 4.5, 6.75]


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("openrlhf.launcher.slurm.watch.time", self)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def log_of_7(tmp_path: Path) -> Path:
    path = tmp_path / "7" / "7_0_log.out"
    path.parent.mkdir()
    path.write_text("first\n")
    return path


def ask(monkeypatch: pytest.MonkeyPatch, *states: str) -> list[float]:
    """Let jobs have these states, the last one for ever; returns when they were asked for."""
    clock, asked, sequence = Clock(monkeypatch), [], iter(states)

    def read(jobs: Sequence[str]) -> list[JobState]:
        asked.append(clock.now)
        return [JobState(job_id=job, state=next(sequence, states[-1])) for job in jobs]

    monkeypatch.setattr("openrlhf.launcher.slurm.watch.read_states", read)
    monkeypatch.setattr("openrlhf.launcher.slurm.watch.shutil.which", lambda name: f"/usr/bin/{name}")
    return asked


def test_logs_ask_rarely_and_end_with_the_job(
    log_of_7: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ask(monkeypatch, *["RUNNING"] * 12, "COMPLETED")
    assert logs(["-f", "7", "--log-dir", str(log_of_7.parents[1])]) == 0
    assert capsys.readouterr().out == "first\n"
    gaps = [b - a for a, b in pairwise(asked)]
    assert len(asked) == 13
    assert gaps[0] == 2.0
    assert gaps[-1] == 60.0


def test_logs_of_the_nodes_of_a_heterogeneous_job(tmp_path: Path) -> None:
    states = [JobState(job_id=name, state="RUNNING", nodes=f"n{i}") for i, name in enumerate(("7", "7+1", "7+2"))]
    (tmp_path / "7").mkdir()
    for number in (0, 2, 10):
        (tmp_path / "7" / f"7_{number}_log.out").touch()
    found = [log_file("7", node, tmp_path, states).name for node in ("0", "1", "n2")]
    assert found == ["7_0_log.out", "7_2_log.out", "7_10_log.out"]
    with pytest.raises(ValueError, match="there is no log"):
        log_file("7", "3", tmp_path, states)


def test_logs_of_a_preempted_job_go_on(log_of_7: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ask(monkeypatch, "PREEMPTED", "PENDING", "RUNNING", "COMPLETED")
    assert logs(["-f", "7", "--log-dir", str(log_of_7.parents[1])]) == 0
    assert len(asked) == 4


def test_unknown_jobs(log_of_7: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ask(monkeypatch, "UNKNOWN")
    folder = str(log_of_7.parents[1])
    assert logs(["8", "--log-dir", folder]) == 2
    assert (
        "Slurm knows no job 8: it was submitted to another cluster, or it ended too long ago" in capsys.readouterr().err
    )
    assert status(["8"]) == 1
    assert "Slurm knows no job 8" in capsys.readouterr().err
    assert status(["--log-dir", folder]) == 0  # its log is still there
    asked.clear()
    assert logs(["-f", "7", "--log-dir", folder]) == 0
    assert "Slurm knows no job 7" in capsys.readouterr().err
    assert 2 < len(asked) < 15
    monkeypatch.setattr("openrlhf.launcher.slurm.watch.shutil.which", lambda name: None)
    assert status(["8"]) == 2
    assert "there is no scontrol, sacct or squeue here" in capsys.readouterr().err


def test_array_tasks() -> None:
    text = "".join(f"JobId={8 + i} ArrayJobId=8 ArrayTaskId={i} JobState=COMPLETED ExitCode=0:0\n" for i in range(3))
    assert [s.job_id for s in read_states(["8"], programs(scontrol=text))] == ["8_0", "8_1", "8_2"]


def test_words_of_states_b102() -> None:
    assert plain_state("CANCELLED by 1000") == plain_state("CANCELLED+") == "CANCELLED"
    assert from_sacct("7|CANCELLED by 1000|0:15|n1\n")[0] == JobState(
        job_id="7", state="CANCELLED", exit_code=143, nodes="n1"
    )
    assert [exit_status(text) for text in ("0:0", "17:0", "0:9", "")] == [0, 17, 137, 0]


@pytest.mark.parametrize("last", ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"])
def test_wait_outlives_preemption_b102(last: str) -> None:
    sequence = iter(["PENDING", "RUNNING", "PREEMPTED", "PENDING", "REQUEUED", "RUNNING", last])
    told: list[str] = []
    (state,) = wait_for(
        "7",
        lambda job: [JobState(job_id=job, state=next(sequence))],
        pause=0,
        tell=lambda state: told.append(state.state),
    )
    assert state.state == last
    assert told == ["PENDING", "RUNNING", "PREEMPTED", "PENDING", "REQUEUED", "RUNNING", last]
    assert state.status == (0 if last == "COMPLETED" else 1)


def test_wait_believes_a_lasting_preemption() -> None:
    (state,) = wait_for("7", lambda job: [JobState(job_id=job, state="PREEMPTED")], pause=0.01, settle=0.05)
    assert state.state == "PREEMPTED"


def test_table_is_aligned() -> None:
    text = table([JobState(job_id="7", state="RUNNING", nodes="n[1-2]", reason="x")])
    assert text.splitlines() == [
        "JOB  STATE    EXIT  RESTARTS  NODES   REASON",
        "7    RUNNING  0     0         n[1-2]  x",
    ]
