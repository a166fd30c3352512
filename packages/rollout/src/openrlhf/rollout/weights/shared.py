"""A weight push between processes of one host: messages lie in shared memory, a socket says which one is ready.

Plain torch and the standard library. A message fills a slot: a file without a name (`memfd_create`), whose descriptor
goes to the receivers over the socket. So nothing lies in /dev/shm, whose size does not matter (64 MiB in a container),
and nothing is left whoever is killed: the kernel frees a slot with the last process that has it, and closes the socket
of a process that ends, which the other side sees at once.

A receiver asks for the next message when it has used the one before, and says in which slots nothing of it reads any
more. It reads in the slots themselves: engines keep views of tensors until their layer is complete. Memory is that of a
few messages, more only where a receiver keeps views of more.
"""

from __future__ import annotations

import mmap
import os
import secrets
import selectors
import socket
import struct
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from openrlhf.rollout.weights.wire import Bucket, BucketPlan, check_header, torch_dtype, unpack

SHARED_BUCKET_BYTES = 16 << 20
"""Largest message that is worth it (larger tensors apart): receivers load one while the next one is packed."""
RING = 4
"""Slots before the sender waits for a free one: one is packed, one loaded, and loaders keep the last tensor of one."""
SENDER = 0
"""The sender's rank."""

_PAIR = struct.Struct("=qq")
"""First message of a push: version and digest of the plan. Each further one: number of a slot, bytes in it."""
_NUMBER = struct.Struct("=q")
_CREDENTIALS = struct.Struct("=3i")
_LONGEST = 1 << 16
"""Bytes of the longest request: of a receiver that gives 8,191 slots back at once."""


class _Socket(socket.socket):
    """Closes silently when it is dropped, as torch's stores and groups do."""

    def __del__(self) -> None:
        self.close()


def listen() -> tuple[socket.socket, str]:
    """A meeting point for receivers on this host, and its name, which is no file's.

    Raises OSError where the system has no such sockets, or no files without a name.
    """
    os.close(os.memfd_create("openrlhf-weights"))
    name = f"openrlhf-weights-{secrets.token_hex(16)}"
    listener = _Socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener, name


@dataclass(eq=False)
class _Slot:
    """Memory of one message. users: ranks that may still read or write in it. known: receivers that have the file."""

    number: int
    file: int
    memory: mmap.mmap
    users: set[int] = field(default_factory=set)
    known: set[int] = field(default_factory=set)

    def grow(self, nbytes: int) -> None:
        os.ftruncate(self.file, nbytes)
        self.memory = mmap.mmap(self.file, nbytes)


@dataclass(eq=False)
class _Peer:
    """A receiver. asked: the number of the message that it waits for; -1 before it knows of the push."""

    rank: int
    connection: socket.socket
    asked: int = -1


class SharedSender:
    """The sender's end; all receivers read the same slots.

    Waits raise RuntimeError after `timeout_s`, and at once when a receiver is gone.
    """

    def __init__(self, listener: socket.socket, *, timeout_s: float) -> None:
        self._listener = listener
        self._timeout_s = timeout_s
        self._peers: dict[int, _Peer] = {}
        self._slots: list[_Slot] = []
        self._taken: dict[int, _Slot] = {}
        self._sent = 0
        self._selector = selectors.DefaultSelector()

    def accept(self, ranks: Iterable[int]) -> None:
        """Wait for these receivers."""
        missing = set(ranks)
        self._listener.settimeout(self._timeout_s)
        while missing:
            accepted = _bounded("the engine workers of this host", self._timeout_s, self._listener.accept)[0]
            connection = _Socket(fileno=accepted.detach())
            # the meeting point's name is no secret on this host; weights are for processes of the same user
            if _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] != os.getuid():
                connection.close()
                continue
            connection.settimeout(self._timeout_s)
            (rank,) = _NUMBER.unpack(_receive(connection, "an engine worker"))
            peer = self._peers[rank] = _Peer(rank, connection)
            self._selector.register(connection, selectors.EVENT_READ, peer)
            self._tell(peer, _NUMBER.pack(rank))
            missing.discard(rank)
        self._listener.close()

    def begin(self, version: int, digest: int) -> None:
        """Tell all receivers of a push."""
        self._sent = 0
        for peer in self._peers.values():
            peer.asked = -1
            self._tell(peer, _PAIR.pack(version, digest))

    def take(self, bucket: Bucket) -> Tensor:
        """Memory for one message, flat, in a slot in which nobody reads; the caller's until `give`."""
        slot = self._free(bucket.nbytes)
        slot.users.add(SENDER)
        flat = torch.frombuffer(slot.memory, dtype=torch_dtype(bucket.dtype), count=bucket.numel)
        self._taken[flat.data_ptr()] = slot
        return flat

    def announce(self, flat: Tensor) -> None:
        """The message in this memory, which `take` gave, is complete: all receivers may read it."""
        slot = self._taken[flat.data_ptr()]
        for peer in self._peers.values():
            files = [] if peer.rank in slot.known else [slot.file]
            self._tell(peer, _PAIR.pack(slot.number, flat.nbytes), files)
        slot.known.update(self._peers)
        slot.users.update(self._peers)
        self._sent += 1

    def give(self, flat: Tensor) -> None:
        """The caller has done with this memory."""
        self._taken.pop(flat.data_ptr()).users.discard(SENDER)

    def finish(self) -> None:
        """Wait until every receiver has used every message."""
        while not self._all_wait():
            self._hear()

    def close(self) -> None:
        """Leave; receivers that wait get an error at once."""
        self._listener.close()
        self._selector.close()
        for peer in self._peers.values():
            peer.connection.close()
        for slot in self._slots:
            os.close(slot.file)
        self._peers, self._slots, self._taken = {}, [], {}

    def _free(self, nbytes: int) -> _Slot:
        while True:
            unused = sorted((slot for slot in self._slots if not slot.users), key=lambda slot: len(slot.memory))
            for slot in unused:
                if len(slot.memory) >= nbytes:
                    return slot
            if len(self._slots) < RING or (not unused and self._all_wait()):
                file = os.memfd_create("openrlhf-weights")
                os.ftruncate(file, nbytes)
                self._slots.append(_Slot(len(self._slots), file, mmap.mmap(file, nbytes)))
                return self._slots[-1]
            if unused:
                unused[-1].grow(nbytes)
                return unused[-1]
            self._hear()

    def _all_wait(self) -> bool:
        """Whether no receiver will give anything back before it gets the next message."""
        return all(peer.asked == self._sent for peer in self._peers.values())

    def _hear(self) -> None:
        ready = self._selector.select(self._timeout_s)
        if not ready:
            silent = [peer.rank for peer in self._peers.values() if peer.asked != self._sent]
            raise RuntimeError(f"weight push: engine workers {silent} did not answer within {self._timeout_s:g} s")
        for key, _ in ready:
            peer: _Peer = key.data
            message = _receive(peer.connection, f"engine worker {peer.rank}")
            peer.asked, *unused = (number for (number,) in _NUMBER.iter_unpack(message))
            for number in unused:
                self._slots[number].users.discard(peer.rank)

    def _tell(self, peer: _Peer, message: bytes, files: list[int] | None = None) -> None:
        who = f"engine worker {peer.rank}"
        _bounded(who, self._timeout_s, lambda: socket.send_fds(peer.connection, [message], files or []))


class SharedReceiver:
    """A receiver's end. Waits raise RuntimeError after `timeout_s`, and at once when the sender is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._files: dict[int, int] = {}
        self._read: dict[int, ReferenceType[mmap.mmap]] = {}

    @classmethod
    def reach(cls, name: str, rank: int, *, timeout_s: float) -> SharedReceiver | None:
        """Connect to the sender's meeting point. None where that is not on this host (or in another container)."""
        if not name:
            return None
        connection = _Socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(timeout_s)
        try:
            connection.connect(f"\0{name}")
            connection.send(_NUMBER.pack(rank))
        except OSError:
            connection.close()
            return None
        return cls(connection)

    def meet(self) -> None:
        """Wait until the sender has accepted."""
        _receive(self._connection, "the trainer")

    def receive(self, plan: BucketPlan, version: int) -> Generator[tuple[str, Tensor], None, None]:
        """All tensors of a push. They may be changed, which nobody else sees, and keep their memory while they live."""
        got = _PAIR.unpack(_receive(self._connection, "the trainer"))
        check_header(*got, plan=plan, version=version)
        for number, bucket in enumerate(plan.buckets):
            self._ask(number)
            yield from unpack(bucket, self._message(bucket))
        self._ask(len(plan.buckets))

    def close(self) -> None:
        """Leave; a sender that waits for this receiver gets an error at once."""
        self._connection.close()
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def _ask(self, number: int) -> None:
        unused = [slot for slot, memory in self._read.items() if memory() is None]
        for slot in unused:
            del self._read[slot]
        message = b"".join(map(_NUMBER.pack, (number, *unused)))
        _bounded("the trainer", self._connection.gettimeout(), lambda: self._connection.send(message))

    def _message(self, bucket: Bucket) -> Tensor:
        """The next message as a flat tensor; its memory is mapped as long as something refers to it."""
        files: list[int] = []
        number, nbytes = _PAIR.unpack(_receive(self._connection, "the trainer", files))
        if files:
            self._files[number] = files[0]
        # private: what a loader writes in place must reach neither other receivers nor the next message
        memory = mmap.mmap(self._files[number], nbytes, mmap.MAP_PRIVATE)
        self._read[number] = ref(memory)
        return torch.frombuffer(memory, dtype=torch_dtype(bucket.dtype), count=bucket.numel)


def _receive(connection: socket.socket, who: str, files: list[int] | None = None) -> bytes:
    """One message; descriptors that came with it are added to `files`."""

    def receive() -> bytes:
        message, got, _, _ = socket.recv_fds(connection, _LONGEST, 1, socket.MSG_CMSG_CLOEXEC)
        if files is not None:
            files.extend(got)
        return message

    message = _bounded(who, connection.gettimeout(), receive)
    if not message:
        raise RuntimeError(f"weight push: {who} is gone")
    return message


def _bounded(who: str, timeout_s: float | None, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except TimeoutError as error:
        raise RuntimeError(f"weight push: {who} did not answer within {timeout_s:g} s") from error
    except OSError as error:
        raise RuntimeError(f"weight push: {who} is gone: {error}") from error
