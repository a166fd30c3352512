"""The engine worker's end of a weight push over nccl or CUDA IPC: vLLM's own receivers, with bounded waits.

Loaded through the plugin. Receiving and loading is vLLM's; what is added is that a push that fails leaves the worker
ready for the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

from openrlhf.rollout.weights.group import GROUP_TIMEOUT_S
from openrlhf.rollout.weights.guard import GuardedGroup, bounded
from openrlhf.rollout.weights.parts import AdapterParts, ModelWithAdapter
from openrlhf.rollout.weights.wire import is_adapter


class _ServesAdapter:
    """What both receivers do beside vLLM's: the model is reloaded where it comes, an adapter is kept for the end."""

    model: Any
    _reloading = False

    @cached_property
    def parts(self) -> AdapterParts:
        """Of the adapter, where the engine serves one."""
        return AdapterParts()

    def start_weight_update(self) -> None:
        """Nothing before it is known what comes: a model that only gets an adapter stays as it is."""
        self._reloading = False
        self.parts.begin(with_base=False)

    @contextmanager
    def _receiving(self, names: Sequence[str]) -> Iterator[None]:
        """While tensors of these names come; keeps back what belongs to an adapter."""
        if not self._reloading and not all(map(is_adapter, names)):
            cast(Any, super()).start_weight_update()
            self._reloading = True
            self.parts.begin(with_base=True)
        model = self.model
        self.model = ModelWithAdapter(model, self.parts)
        try:
            yield
        finally:
            self.model = model


class BoundedNcclEngine(_ServesAdapter, NCCLWeightTransferEngine):
    """vLLM's nccl receiver. A trainer that never comes, or falls silent in a push, is an error after 15 seconds."""

    timeout_s = GROUP_TIMEOUT_S
    _guard: GuardedGroup | None = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join a group, leaving an older one. Raises RuntimeError when the others don't come in time."""
        self.shutdown()
        join = super().init_transfer_engine
        bounded("meet the trainer", lambda: join(init_info), device=self.device.index, timeout_s=self.timeout_s)
        self._guard = GuardedGroup(cast(Any, self.model_update_group), timeout_s=self.timeout_s)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """One whole push. Raises RuntimeError when the trainer is gone or silent; the group is left then."""
        if self._guard is None:
            raise RuntimeError("no weight group: init_weight_transfer must come before a push, and again after a fault")
        self.model_update_group = cast(Any, self._guard)
        try:
            with self._guard.transfer(), self._receiving(update_info.names):
                super().receive_weights(update_info)
        except BaseException:
            self.shutdown()
            self.finish_weight_update()  # see RestartableIpcEngine
            raise

    def shutdown(self) -> None:
        """Leave the group."""
        super().shutdown()
        self._guard = None


class RestartableIpcEngine(_ServesAdapter, IPCWeightTransferEngine):
    """vLLM's CUDA IPC receiver."""

    def receive_weights(self, update_info: IPCWeightTransferUpdateInfo) -> None:
        """One message of a push.

        Upstream fault (vLLM 0.32): after an error half-loaded layers go on counting where they were, and the next push
        takes them for complete before their last tensors have come. Finishing puts every layer back to work. Can go
        once vLLM resets them itself.
        """
        try:
            with self._receiving(update_info.names):
                super().receive_weights(update_info)
        except BaseException:
            self.finish_weight_update()
            raise
