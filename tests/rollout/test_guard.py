"""Waits inside a communicator end: by abort, by silence, and never as a success."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from openrlhf.rollout.weights.guard import GuardedGroup, bounded


class Nccl:
    """Like vLLM's communicator: a wait without end, which `destroy` ends silently; then messages are swallowed."""

    def __init__(self, hangs_at: int = 99) -> None:
        self.sent, self.hangs_at = 0, hangs_at
        self.destroyed = threading.Event()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        if self.destroyed.is_set():
            return
        self.sent += 1
        if self.sent == self.hangs_at:
            assert self.destroyed.wait(30)

    def destroy(self) -> None:
        self.destroyed.set()


MESSAGE = torch.zeros(1)


def send(group: GuardedGroup, messages: int) -> None:
    for _ in range(messages):
        group.broadcast(MESSAGE, 0)


def test_messages_go_through() -> None:
    nccl = Nccl()
    group = GuardedGroup(nccl, timeout_s=5)
    with group.transfer():
        for _ in range(3):
            group.broadcast(MESSAGE, 0)
    assert nccl.sent == 3
    assert not nccl.destroyed.is_set()


@pytest.mark.parametrize("messages_after", [0, 2])
def test_silence_aborts_and_garbage_is_no_success(messages_after: int) -> None:
    nccl = Nccl(hangs_at=2)
    group = GuardedGroup(nccl, timeout_s=0.2)
    with pytest.raises(RuntimeError, match=r"the other side did not answer within 0\.2 s"), group.transfer():
        send(group, 2 + messages_after)
    assert nccl.sent == 2
    assert nccl.destroyed.is_set()  # else the message would still wait
    with pytest.raises(RuntimeError, match="did not answer"):
        group.broadcast(MESSAGE, 0)


def test_an_abort_from_another_thread_gives_its_reason() -> None:
    nccl = Nccl(hangs_at=1)
    group = GuardedGroup(nccl, timeout_s=30)
    threading.Timer(0.05, group.abort, ["engine 1 died"]).start()
    with pytest.raises(RuntimeError, match="engine 1 died"), group.transfer():
        group.broadcast(MESSAGE, 0)
    assert nccl.destroyed.is_set()


def test_slow_but_steady_is_no_silence() -> None:
    group = GuardedGroup(Nccl(), timeout_s=0.6)
    with group.transfer():
        for _ in range(4):
            time.sleep(0.2)
            group.broadcast(MESSAGE, 0)


def test_an_error_of_the_sender_stays_what_it_is() -> None:
    group = GuardedGroup(Nccl(), timeout_s=5)
    with pytest.raises(ValueError, match="the stream broke"), group.transfer():
        raise ValueError("the stream broke")


def test_calls_beside_the_group_end_with_it() -> None:
    group = GuardedGroup(Nccl(), timeout_s=5)
    assert group.while_alive(lambda: 3) == 3
    released = threading.Event()
    threading.Timer(0.05, group.abort, ["gone"]).start()
    with pytest.raises(RuntimeError, match="gone"):
        group.while_alive(lambda: released.wait(30))
    released.set()


def test_a_meeting_is_bounded() -> None:
    assert bounded("meet", lambda: 3) == 3
    with pytest.raises(KeyError):
        bounded("meet", lambda: {}["nobody"])
    released = threading.Event()
    with pytest.raises(RuntimeError, match=r"could not meet the engines within 0\.05 s"):
        bounded("meet the engines", lambda: released.wait(30), timeout_s=0.05)
    released.set()
