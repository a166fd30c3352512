"""The desk of a run, where it takes orders about its engines, and the commands that give them."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.main import main as launch
from openrlhf.launcher.scaling import join
from openrlhf.launcher.scaling.desk import Desk, NotYetError, Order, RunningRun, ask, find_desk, read_run
from openrlhf.launcher.scaling.join import MAX_JOINS, Joining, node_environment, own_folder
from openrlhf.launcher.slurm import folders
from openrlhf.launcher.slurm.runner import EndedError, Signals

ABOUT = RunningRun(pid=1, host="h", ray="10.0.0.1:6379", token="secret", gpus=False, width=1)


@pytest.mark.parametrize("text", ['{"engine": 3}', '{"engines": "3"}', "[", "3"])
def test_orders_that_are_none_are_answered(text: str, tmp_path: Path) -> None:
    own = Desk(tmp_path, ABOUT)
    (own.place / "order-1.json").write_text(text)
    assert list(own.orders()) == []
    assert "not an order" in json.loads((own.place / "answer-1.json").read_text())["error"]
    assert list(own.orders()) == []


def test_a_desk_is_for_its_user_alone_and_replaces_one_of_a_killed_run(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    first = Desk(folder, ABOUT)
    (first.place / "order-old.json").write_text("{}")
    own = Desk(folder, ABOUT)
    assert list(own.orders()) == []
    assert own.place.stat().st_mode & 0o777 == 0o700
    assert "secret" not in repr(read_run(find_desk(tmp_path)))
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / ".openrlhf-engines").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="belongs to another user"):
        Desk(tmp_path / "else", ABOUT)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["scale", "RUN", "--engines", "0"], 2, "--engines 0: a run needs one engine at least"),
        (["scale", "RUN", "--engines", "2", "--timeout", "0"], 2, "--timeout 0: give more than 0 seconds"),
        (["scale", "RUN", "--engines", "2"], 1, "no run goes on in"),
        (["join", "RUN", "--engines", "0"], 2, "--engines 0: give 1 at least"),
        (["join", "RUN"], 1, "no run goes on in"),
    ],
)
def test_mistakes_on_the_command_line_are_told(
    words: list[str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], own_signals: None
) -> None:
    try:
        code = launch([str(tmp_path) if word == "RUN" else word for word in words])
    except SystemExit as stop:
        code = stop.code
    assert (code, said in capsys.readouterr().err) == (status, True)


def test_several_runs_in_a_folder_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Desk(tmp_path / name, ABOUT)
    with pytest.raises(ValueError, match="several runs go on in"):
        find_desk(tmp_path)
    assert find_desk(tmp_path / "a").parent.name == "a"


def test_who_waits_for_an_answer_hears_of_the_runs_end(tmp_path: Path) -> None:
    own = Desk(tmp_path, ABOUT)
    threading.Timer(0.2, own.close).start()
    with pytest.raises(ValueError, match="has ended"):
        ask(own.place, Order(engines=2), timeout=30)
    silent = Desk(tmp_path, ABOUT)
    with pytest.raises(TimeoutError, match=r"did not answer within 0\.1 s"):
        ask(silent.place, Order(engines=2), timeout=0.1)
    assert list(silent.orders()) == []


def test_a_machine_has_a_folder_of_its_own_and_the_next_one_removes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder of the run may lie where only the nodes of its own job have one."""
    monkeypatch.setattr(folders, "ROOM", 10_000)
    job = {"SLURM_JOB_ID": "7", "SLURM_TMPDIR": str(tmp_path)}
    mine = own_folder(job)
    elsewhere = own_folder({"TMPDIR": str(tmp_path)})
    assert mine.path == tmp_path / "r7"
    assert len(elsewhere.path.name) == len("r") + 9
    assert mine.path.stat().st_mode & 0o777 == 0o700
    mine._lock.close()  # type: ignore[union-attr]  # killed
    again = own_folder(job | {"SLURM_JOB_ID": "8"})
    assert {path.name for path in tmp_path.iterdir()} == {"r8", elsewhere.path.name}
    again.close()
    elsewhere.close()
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_joins_has_the_runs_token_or_the_users_own_rules() -> None:
    users = {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "elsewhere", "HOME": "/h"}
    own = node_environment(users, "token", "mark")
    assert (own["RAY_AUTH_MODE"], own["RAY_AUTH_TOKEN"], own["OPENRLHF_NODE_RUN"]) == ("token", "token", "mark")
    theirs = node_environment(users, "", "mark")
    assert (theirs["RAY_AUTH_MODE"], "RAY_AUTH_TOKEN" in theirs, "RAY_ADDRESS" in theirs) == ("disabled", False, False)


@pytest.fixture
def own_signals() -> Any:
    """Puts handlers back that a command installs."""
    handlers: dict[int, Callable[..., Any] | int | None] = {
        s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    }
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


class Machine:
    """A machine that joined a run whose desk is in a folder. answers: what the run says to each order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, answers: Sequence[Any] = ()) -> None:
        for name in ("POLL", "AGAIN"):
            monkeypatch.setattr(join, name, 0.0)
        self.asked: list[Order] = []
        self.answers = list(answers)
        self.code: int | None = None
        self.desk = Desk(path, ABOUT)
        self.signals = Signals()
        self.joining = Joining(self.desk.place, ABOUT, self.signals, "")
        ray: Any = self
        self.joining.ray = ray
        monkeypatch.setattr(join, "ask", self.ask)

    def ask(self, place: Path, order: Order, *, timeout: float, alive: Any) -> Any:
        self.asked.append(order)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"joined": answer}

    def poll(self) -> int | None:
        return self.code

    def is_up(self) -> None: ...


def test_a_machine_asks_again_until_the_run_sees_it_and_not_after_a_refusal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, tmp_path, [NotYetError("no room"), NotYetError("no room"), ["engine 3"]])
    assert machine.joining._join(1) == ["engine 3"]
    assert machine.asked == [Order(more=1, on=machine.joining.name)] * 3
    machine.answers = [ValueError("their number is fixed")]
    with pytest.raises(ValueError, match="their number is fixed"):
        machine.joining._join(1)
    machine.answers = [NotYetError("no room")]
    monkeypatch.setattr(join, "UP_SECONDS", -1.0)
    with pytest.raises(NotYetError, match="no room"):
        machine.joining._join(1)


def test_engines_that_are_lost_on_a_machine_join_again_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, tmp_path, [["engine 2", "engine 3"], *[["engine 3"]] * MAX_JOINS])
    machine.desk.tell(replace(ABOUT, engines=("engine 0", "engine 2")))
    with pytest.raises(EndedError, match=f"lost {MAX_JOINS} times") as end:
        machine.joining._stay(2)
    assert end.value.code == join.LOST_EXIT
    assert [order.more for order in machine.asked] == [2, *[1] * (MAX_JOINS - 1)]


@pytest.mark.parametrize(
    ("what", "code", "why"),
    [
        ("told", 0, "told to end"),
        ("warned", 85, "told to end"),
        ("Ray", 91, "Ray on this machine ended with 7"),
        ("run", 0, "has ended"),
    ],
)
def test_what_ends_a_machines_part(
    what: str, code: int, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, tmp_path)
    assert machine.joining._check() == ABOUT
    machine.signals.ended_by = signal.SIGTERM if what == "told" else 0
    machine.signals.warned = what == "warned"
    if what in ("Ray", "run"):
        machine.code = 7
    if what == "run":
        machine.desk.close()
    with pytest.raises(EndedError, match=why) as end:
        machine.joining._check()
    assert end.value.code == code


@pytest.mark.parametrize(
    ("gpus", "engines", "room"), [(True, 5, "4 engines of 2 GPUs"), (False, 4, "3 engines of 1 cores")]
)
def test_a_job_lends_what_it_was_granted(
    gpus: bool, engines: int, room: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n3", "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "3"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    joining = Joining(tmp_path, replace(ABOUT, gpus=gpus, width=2 if gpus else 1), Signals(), "")
    assert (joining.host, joining.gpus, joining.cpus) == ("n3", 8 if gpus else 0, 3)
    with pytest.raises(ValueError, match=f"--engines {engines}: .* room for {room}"):
        joining.take_part(engines)
