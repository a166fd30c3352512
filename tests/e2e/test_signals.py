"""INT and TERM end a real run in order, whatever it is doing: exit 130 / 143, nothing left.

In the default run it is `test_chaos.py` that ends so.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from support.stack_runs import Run, Workspace, make_workspace, running
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack")]

SLOW_REWARD = """
import time

def reward_func(queries, prompts, labels):
    time.sleep(30)
    return {"rewards": [1.0] * len(queries)}
"""
MOMENTS = {
    "start": "Started a local Ray",
    "load": "policy ready after",
    "generation": "start: ",
    "update": "step 2 ",
    "push": "step 3 ",
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    path = tmp_path_factory.mktemp("signals")
    return make_workspace(path, tiny_qwen3(path / "tiny"), prompts=2000)


def interrupt(run: Run, signum: signal.Signals, *, group: bool) -> None:
    if group:
        os.killpg(run.process.pid, signum)
    else:
        os.kill(run.process.pid, signum)


@pytest.mark.proof
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("moment", "signum", "group"),
    [(m, s, g) for m in MOMENTS for s in (signal.SIGINT, signal.SIGTERM) for g in (False, True)],
)
def test_signal_ends_the_run(workspace: Workspace, moment: str, signum: signal.Signals, group: bool) -> None:
    with running(workspace) as run:
        run.wait_for(MOMENTS[moment], timeout=300)
        time.sleep({"generation": 0.7, "update": 0.3, "push": 0.0}.get(moment, 0.2))
        interrupt(run, signum, group=group)
        assert run.wait(60) == 128 + signum, run.text
        assert run.left_over() == []
    assert f"{signum.name} received" in run.text
    assert "Traceback" not in run.text, run.text


@pytest.mark.proof
@pytest.mark.timeout(400)
@pytest.mark.parametrize("moment", MOMENTS)
def test_l16_nothing_outlives_a_killed_driver(workspace: Workspace, moment: str) -> None:
    with running(workspace) as run:
        run.wait_for(MOMENTS[moment], timeout=300)
        interrupt(run, signal.SIGKILL, group=False)
        run.wait(60)
        killed = time.monotonic()
        while run.left_over() and time.monotonic() - killed < 60:
            time.sleep(0.1)
        print(f"{moment}: all gone after {time.monotonic() - killed:.1f} s")
        assert run.left_over() == []
