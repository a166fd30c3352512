"""Finds tensors that cross CUDA streams without an order between them, on a CPU.

Every operation is taken to be queued on the current stream and done at an unknown time later. Two accesses to one
memory, one of them a write, need an order: the same stream, or a `synchronize` of the first one's stream between them.
Memory that is freed goes back to the stream that allocated it, which hands it out at once: work of other streams on it
must be over by then.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from support import cuda_stand_in

VIEWS = {"view", "slice", "split", "split_with_sizes", "as_strided", "detach", "select", "unsqueeze", "alias", "t"}
VIEWS |= {"_reshape_alias", "narrow", "expand", "permute", "transpose", "_unsafe_view", "empty", "empty_like"}
VIEWS |= {"empty_strided", "lift_fresh", "is_pinned"}
"""Operations that touch no memory: they only make a tensor of it."""


@dataclass
class Memory:
    """One storage: the stream that allocated it, and (stream, moment, wrote) of what touched it."""

    alive: StorageWeakRef
    home: Any
    accesses: list[tuple[Any, int, bool]] = field(default_factory=list)


class StreamChecker(TorchDispatchMode):
    """While it is entered, `found` collects what is out of order. Streams are those of `cuda_stand_in`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._now = 0
        self._done: defaultdict[Any, int] = defaultdict(int)
        self._memory: dict[int, Memory] = {}

    def synchronized(self, stream: Any) -> None:
        """The host has waited for a stream: everything queued on it so far is over."""
        self._done[stream] = self._now
        self._collect()

    def access(self, tensor: Tensor, *, write: bool, what: str) -> None:
        """Work on a tensor is queued on the current stream; for work that torch doesn't see, such as nccl's."""
        self._now += 1
        stream = cuda_stand_in.current_stream()
        memory = self._of(tensor)
        for other, moment, wrote in memory.accesses:
            if other is not stream and moment > self._done[other] and (write or wrote):
                self.found.append(f"{what} on {stream} before {other} is done with the same memory")
        memory.accesses.append((stream, self._now, write))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._collect()
        name = func._schema.name.split("::")[-1]
        made = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
        if name in VIEWS:
            for tensor in made:
                self._of(tensor)
            return result
        given = [t for t in tree_flatten((args, kwargs or {}))[0] if isinstance(t, Tensor)]
        written = given[:1] if name.endswith("_") else []
        for tensor in given:
            self.access(tensor, write=any(tensor is w for w in written), what=name)
        for tensor in made:
            if not any(tensor is w for w in given):
                self.access(tensor, write=True, what=name)
        return result

    def _of(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None or memory.alive.expired():
            memory = self._memory[storage._cdata] = Memory(StorageWeakRef(storage), cuda_stand_in.current_stream())
        return memory

    def _collect(self) -> None:
        for key, memory in list(self._memory.items()):
            if memory.alive.expired():
                del self._memory[key]
                late = {o for o, moment, _ in memory.accesses if o is not memory.home and moment > self._done[o]}
                self.found += [f"memory of {memory.home} is free again while {other} works on it" for other in late]


class Stream(cuda_stand_in.Stream):
    """A stream that tells the checker when the host waits for it."""

    checker: StreamChecker

    def synchronize(self) -> None:
        type(self).checker.synchronized(self)


class SameProcess:
    """Both ends of a communicator: broadcasts of the trainer (rank 0) are kept for the receiver, in order."""

    def __init__(self, checker: StreamChecker) -> None:
        self._checker = checker
        self._messages: list[Tensor] = []

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Send."""
        self._checker.access(tensor, write=False, what="broadcast")
        with _disable_current_modes():
            self._messages.append(tensor.clone())

    def destroy(self) -> None: ...

    def receiving(self) -> Any:
        return _Receiver(self._checker, self._messages)


class _Receiver:
    def __init__(self, checker: StreamChecker, messages: list[Tensor]) -> None:
        self._checker = checker
        self._messages = messages

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        self._checker.access(tensor, write=True, what="broadcast")
        with _disable_current_modes():
            tensor.copy_(self._messages.pop(0))

    def destroy(self) -> None: ...
