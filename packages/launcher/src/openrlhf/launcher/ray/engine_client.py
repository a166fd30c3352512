"""All engines of a run as vLLM's trainer engines call them from a learner rank (nccl, CUDA IPC)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.launcher.ray.calls import get

JOIN_TIMEOUT = 60.0
STEP_TIMEOUT = 600.0
"""Bound of the beginning and the end of a push, in which engines put their layers together."""


@dataclass(frozen=True, kw_only=True)
class FleetClient:
    """Each call goes to every engine and returns when all have answered.

    engines: actors in the order of the fleet. num_workers: how many ranks of a weight group each one takes.
    update_timeout: seconds for one `update_weights`. Raises WorkerDiedError when an engine dies or does not answer in
    time, else the engine's own error.
    """

    engines: Sequence[Any]
    num_workers: Sequence[int]
    update_timeout: float

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every engine join. vLLM knows of one engine; each gets the first of its own ranks."""
        infos, offset = [], init_info.get("rank_offset")
        for workers in self.num_workers:
            infos.append((init_info if offset is None else init_info | {"rank_offset": offset},))
            offset = None if offset is None else offset + workers
        self._on_each("weight group", "init_weight_transfer", infos, JOIN_TIMEOUT)

    def start_weight_update(self) -> None:
        """Begin a push."""
        self._on_each("weight push start", "start_weight_update", [()] * len(self.engines), STEP_TIMEOUT)

    def update_weights(self, update_info: Any) -> None:
        """Receive tensors: all of a push over nccl, those of one buffer over CUDA IPC."""
        self._on_each("weight push", "update_weights", [(update_info,)] * len(self.engines), self.update_timeout)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The weights become this version."""
        assert weight_version is not None, "every push of ours has a version"
        arguments = [(int(weight_version),)] * len(self.engines)
        self._on_each("weight push end", "finish_weight_update", arguments, STEP_TIMEOUT)

    def _on_each(self, what: str, method: str, arguments: Sequence[tuple[Any, ...]], timeout: float) -> None:
        refs = [engine.call.remote(method, *own) for engine, own in zip(self.engines, arguments, strict=True)]
        get(refs, what=what, timeout=timeout)
