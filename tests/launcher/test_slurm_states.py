"""States of jobs, with and without sacct, and waiting for the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from openrlhf.launcher.slurm.states import (
    JobState,
    exit_status,
    from_sacct,
    plain_state,
    read_states,
    wait_for,
)
from openrlhf.launcher.slurm.watch import table

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
