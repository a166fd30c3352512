"""Bounds for what nccl itself would wait for without end: a peer that never comes, a message that never arrives.

Plain torch, no vLLM: both ends of an nccl push use it. A wait inside nccl can't be given a time-out; it ends when the
communicator is aborted by another thread. The communicator is unusable afterwards: the next push makes a new one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from openrlhf.rollout.weights.group import GROUP_TIMEOUT_S

T = TypeVar("T")


class Communicator(Protocol):
    """What is used of vLLM's PyNcclCommunicator. `destroy` aborts what is under way, from any thread."""

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None: ...

    def destroy(self) -> None: ...


class GuardedGroup:
    """A communicator whose transfers end: with `abort`, or by themselves after `timeout_s` without a new message.

    vLLM calls it like the communicator itself. After an abort vLLM's own object swallows further messages silently, and
    what was received last is garbage; here both are an error.
    """

    def __init__(self, communicator: Communicator, *, timeout_s: float = GROUP_TIMEOUT_S) -> None:
        self._communicator = communicator
        self._timeout_s = timeout_s
        self._heard = 0.0
        self._aborted = ""
        self._lock = threading.Lock()

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """One message. Raises RuntimeError after an abort."""
        self._heard = time.monotonic()
        self._check()
        try:
            self._communicator.broadcast(tensor, src, stream)
        except Exception:
            self._check()  # the reason of the abort says more than what it broke
            raise
        self._heard = time.monotonic()

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Surrounds one push: its waits are bounded. Raises RuntimeError at its end when it was aborted meanwhile."""
        over = threading.Event()
        self._heard = time.monotonic()
        watch = threading.Thread(target=self._watch, args=(over,), name="weight-group-watch", daemon=True)
        watch.start()
        try:
            yield
        except Exception as error:
            if self._aborted:
                raise RuntimeError(self._aborted) from error
            raise
        finally:
            over.set()
            watch.join()
        self._check()

    def abort(self, reason: str) -> None:
        """End what is under way on this side, from any thread; the transfer then raises RuntimeError with `reason`."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = reason
        self._communicator.destroy()

    def destroy(self) -> None:
        """Leave the group."""
        self.abort("the weight group was left")

    def while_alive(self, action: Callable[[], T]) -> T:
        """The result of `action`, which waits for the other side by other means. Raises RuntimeError after an abort.

        It runs in a thread of its own, which an abort leaves behind.
        """
        running = _Running("weight-group-call", action)
        while not running.over(0.1):
            self._check()
        return running.result()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(min(1.0, self._timeout_s / 4)):
            if time.monotonic() - self._heard > self._timeout_s:
                self.abort(f"weight group: the other side did not answer within {self._timeout_s:g} s")
                return

    def _check(self) -> None:
        if self._aborted:
            raise RuntimeError(self._aborted)


def bounded(what: str, action: Callable[[], T], *, device: int | None = None, timeout_s: float = GROUP_TIMEOUT_S) -> T:
    """The result of `action`, which runs in a thread of its own on this CUDA device.

    Raises RuntimeError when it isn't done in time; the thread is left behind, since nothing ends a rendezvous of nccl.
    """

    def on_device() -> T:
        if device is not None:
            torch.cuda.set_device(device)  # every thread has a current device of its own
        return action()

    running = _Running(what, on_device)
    if not running.over(timeout_s):
        raise RuntimeError(f"could not {what} within {timeout_s:g} s")
    return running.result()


class _Running(Generic[T]):
    """A call in a thread that ends with the process."""

    def __init__(self, name: str, action: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        threading.Thread(target=self._run, args=(action,), name=name, daemon=True).start()

    def _run(self, action: Callable[[], T]) -> None:
        try:
            self._future.set_result(action())
        except BaseException as error:
            self._future.set_exception(error)

    def over(self, timeout_s: float) -> bool:
        return not wait([self._future], timeout_s).not_done

    def result(self) -> T:
        return self._future.result()
