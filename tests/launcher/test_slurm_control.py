"""The line between the head and the other nodes of a run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from openrlhf.launcher.slurm import control
from openrlhf.launcher.slurm.control import GREETING_BYTES, Head, Line, find_head

NODES = ("n0", "n1", "n2")
ADDRESS = "10.0.0.1:6379"


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def head(port: int) -> Iterator[Head]:
    head = Head(port, "secret", NODES)
    yield head
    head.end()


Join = Callable[[int], Line]


@pytest.fixture
def join(head: Head, port: int) -> Iterator[Join]:
    """Lets node `index` greet the head; its end of the line."""
    lines: list[Line] = []

    def greet(index: int) -> None:
        line, welcome = find_head(lambda: ["127.0.0.1"], [port], "secret", index, 20)
        lines.append(line)
        assert welcome == {"address": ADDRESS}

    def join(index: int) -> Line:
        run_beside(lambda: greet(index), lambda: poll(head))
        return lines[-1]

    yield join
    for line in lines:
        line.close()


def run_beside(work: Callable[[], object], here: Callable[[], object]) -> None:
    """`work` in a thread, `here` again and again until it is done."""
    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        here()
    thread.join()


def poll(head: Head) -> None:
    head.poll(0.05, lambda: {"address": ADDRESS})


def answer(line: Line) -> None:
    message = line.receive(10)
    assert message == {"ping": True}
    line.send(pong=True)


def test_nodes_come_and_leave(head: Head, join: Join) -> None:
    assert head.missing == ["n1", "n2"]
    first = join(1)
    assert head.missing == ["n2"]
    second = join(2)
    assert head.missing == []
    first.close()
    second.send(failed="its Ray ended with 1")
    for _ in range(3):
        poll(head)
    assert head.lost == {"n1": "n1 closed the connection", "n2": "its Ray ended with 1"}


def test_the_end_is_told(head: Head, join: Join) -> None:
    line = join(1)
    head.end()
    assert line.receive(5) == {"end": True}
    with pytest.raises(ConnectionError, match="the head closed the connection"):
        line.receive(5)


def test_another_job_s_node_is_turned_away(head: Head, port: int) -> None:
    refusals: list[TimeoutError] = []

    def call() -> None:
        try:
            find_head(lambda: ["127.0.0.1"], [port], "other", 1, 1.0)
        except TimeoutError as error:
            refusals.append(error)

    run_beside(call, lambda: poll(head))
    assert "the head did not answer within 1 s (at 127.0.0.1" in str(refusals[0])
    assert head.missing == ["n1", "n2"]


def test_probe_finds_the_silent_node(head: Head, join: Join) -> None:
    first, _ = join(1), join(2)
    run_beside(lambda: answer(first), lambda: head.probe(1.0))
    assert head.lost == {"n2": "it did not answer for 1 s"}


def test_probe_is_over_when_all_have_answered(head: Head, join: Join) -> None:
    line = join(1)
    thread = threading.Thread(target=answer, args=(line,))
    thread.start()
    head.probe(1000.0)  # pytest's time-out ends a wait that goes on
    thread.join()
    assert head.lost == {}


def test_what_came_with_an_answer_is_read_too(head: Head, join: Join) -> None:
    line = join(1)
    line.socket.sendall(b'{"pong": true}\n{"failed": "its Ray ended with 7"}\n')
    poll(head)
    assert head.lost == {"n1": "its Ray ended with 7"}


def test_silent_callers_hold_up_nobody(head: Head, join: Join, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of the cluster's ports opens connections and says nothing, or no end of nonsense."""
    callers = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    callers[1].sendall(b"x" * 3 * GREETING_BYTES)
    callers[2].sendall(b'{"proof": "no", "index": 1, "nonce": ""}\n')
    callers[3].sendall(b"[[" * 500 + b"\n")
    callers[4].sendall(b"\xff\n")
    monkeypatch.setattr(control, "GREETING_TIMEOUT", 1000.0)  # who waits for a caller fails by pytest's time-out
    assert join(1).peer == "the head"
    assert head.missing == ["n2"]
    for caller in callers[1:5]:
        caller.settimeout(10)
        while caller.recv(1000):
            pass
    monkeypatch.setattr(control, "GUESTS", 4)
    callers += [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    assert join(2).peer == "the head"
    assert head.missing == []
    for caller in callers:
        caller.close()


def test_a_caller_s_time_is_bounded(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "GREETING_TIMEOUT", 0.2)
    head = Head(port, "secret", NODES)
    with socket.create_connection(("127.0.0.1", port)) as caller:
        caller.settimeout(0.05)
        said = b""
        while not said.endswith(b"bye"):
            poll(head)
            try:
                said += caller.recv(1000) or b"bye"
            except TimeoutError:
                continue
    assert b"nonce" in said
    head.end()


def test_all_nodes_are_told(head: Head, join: Join) -> None:
    lines = [join(1), join(2)]
    lines[0].close()
    head.tell(up=True)
    assert lines[1].receive(5) == {"up": True}
