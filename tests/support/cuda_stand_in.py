"""What vLLM's weight transfer needs of CUDA, on a CPU: streams that do nothing, devices with a name, memory handles,
and a communicator. Everything else in a transfer is vLLM's own code.
"""

from __future__ import annotations

import datetime
import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

DEVICE_PLACE = 6
"""Where `reduce_tensor`'s arguments name the device; vLLM overwrites it with the receiver's."""
NCCL_HANGS_S = 120.0
GLOO_HANGS_S = 20.0
"""What is left behind by an abort ends by itself."""
_current = threading.local()


class Stream:
    """A CUDA stream whose work is done at once."""

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def synchronize(self) -> None:
        """Nothing is pending."""


_DEFAULT = Stream()


def current_stream(device: Any = None) -> Stream:
    return getattr(_current, "stream", None) or _DEFAULT


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before = getattr(_current, "stream", None)
    _current.stream = stream
    try:
        yield
    finally:
        _current.stream = before


class GlooCommunicator:
    """In place of vLLM's PyNcclCommunicator: the same calls, and the same manners where a peer fails.

    A wait for a peer that is gone never ends by itself; `destroy` ends it without an error, with garbage received.
    """

    def __init__(self, group: Any, device: Any) -> None:
        timeout = datetime.timedelta(seconds=GLOO_HANGS_S)
        self.disabled = False
        self._ended = threading.Event()
        self._group: Any = ProcessGroupGloo(PrefixStore("data", group.store), group.rank, group.world_size, timeout)

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        if self.disabled:
            return
        work = self._group.broadcast(tensor, src)
        while not work.is_completed() and not self._ended.wait(0.002):
            pass
        try:
            if work.is_completed():
                work.wait()
        except RuntimeError:
            self._ended.wait(NCCL_HANGS_S)

    def destroy(self) -> None:
        self.disabled = True
        self._ended.set()
        self._group.abort()


class Handles:
    """Exports memory as files, which any process may map: what CUDA IPC handles are on GPUs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()

    def export(self, tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        """In place of `reduce_tensor`."""
        path = self._folder / f"handle-{os.getpid()}-{next(self._numbers)}"
        mapped = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
        moved: Any = tensor  # its annotations know fewer forms of set_
        moved.set_(mapped.untyped_storage(), 0, tensor.shape)
        return None, (str(path), tensor.numel(), tensor.dtype, None, None, None, "exporter's device")

    @staticmethod
    def open(path: str, numel: int, dtype: torch.dtype, *rest: Any) -> Tensor:
        """In place of `rebuild_cuda_tensor`."""
        assert isinstance(rest[DEVICE_PLACE - 3], int), "the receiver names its own device"
        return torch.from_file(path, shared=True, size=numel, dtype=dtype)


@contextmanager
def stand_in_for_cuda(folder: Path, device: int) -> Iterator[None]:
    """vLLM's transfer code works without CUDA within it. device: that of this process. folder: for memory handles."""
    from vllm.distributed.weight_transfer import packed_tensor

    empty = torch.empty

    def empty_on_cpu(*size: Any, **options: Any) -> Tensor:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return empty(*size, **options)

    handles = Handles(folder)
    packed_tensor._get_streams.cache_clear()
    with ExitStack() as stack:
        for target, replacement in {
            "torch.empty": empty_on_cpu,
            "torch.cuda.Stream": Stream,
            "torch.cuda.stream": on_stream,
            "torch.cuda.current_stream": current_stream,
            "torch.cuda.synchronize": lambda *_: None,
            "torch.cuda.ipc_collect": lambda: None,
            "torch.cuda.get_device_properties": lambda index: SimpleNamespace(uuid=f"GPU-{index}"),
            "torch.accelerator.current_device_index": lambda: device,
            "torch.accelerator.synchronize": lambda *_: None,
            "torch.multiprocessing.reductions.rebuild_cuda_tensor": handles.open,
            "vllm.distributed.weight_transfer.packed_tensor.reduce_tensor": handles.export,
            "vllm.distributed.device_communicators.pynccl.PyNcclCommunicator": GlooCommunicator,
        }.items():
            stack.enter_context(mock.patch(target, replacement))
        yield
    packed_tensor._get_streams.cache_clear()
