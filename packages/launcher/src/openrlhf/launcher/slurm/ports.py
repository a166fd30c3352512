"""The ports of a job: blocks of BLOCK ports, chosen by the job's id, checked and held on every node.

All lie below 32768, where the ports that the kernel hands out begin.
"""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from openrlhf.launcher.ray.scratch import try_lock

BASE = 10000
BLOCK = 200
BLOCKS = 110
TRIES = 6
STRIDE = 37
"""Coprime to BLOCKS, so that the candidates of neighbouring jobs do not run into each other."""
WORKER_OFFSET = 20


@dataclass(frozen=True)
class PortBlock:
    """BLOCK neighbouring ports: `first` is Ray's, the next ones its services', the upper ones its workers'."""

    first: int

    @property
    def control(self) -> int:
        return self.first + 9

    @property
    def ports(self) -> range:
        return range(self.first, self.first + BLOCK)

    def node_arguments(self) -> list[str]:
        """Arguments of `ray start` for the services of any node."""
        names = (
            "node-manager-port",
            "object-manager-port",
            "dashboard-agent-listen-port",
            "dashboard-agent-grpc-port",
            "runtime-env-agent-port",
            "metrics-export-port",
        )
        services = [f"--{name}={self.first + i}" for i, name in enumerate(names, start=1)]
        return [
            *services,
            f"--min-worker-port={self.first + WORKER_OFFSET}",
            f"--max-worker-port={self.first + BLOCK - 1}",
        ]

    def head_arguments(self) -> list[str]:
        """Further arguments of the head's `ray start`."""
        return [
            f"--port={self.first}",
            f"--ray-client-server-port={self.first + 7}",
            f"--dashboard-port={self.first + 8}",
        ]


def candidates(job_id: int, base: int = BASE) -> list[PortBlock]:
    """The blocks that a job tries, best first; every process of the job knows them without asking."""
    blocks = min(BLOCKS, (32768 - base) // BLOCK)
    if base < 1024 or blocks < 1:
        raise ValueError(f"--port-base {base!r}: give a port from 1024 to {32768 - BLOCK}")
    return [PortBlock(base + (job_id + i * STRIDE) % blocks * BLOCK) for i in range(min(TRIES, blocks))]


class HeldBlock:
    """A block that this process holds on this machine until `close` or its end."""

    def __init__(self, block: PortBlock, lock: TextIO) -> None:
        self.block = block
        self._lock = lock

    def close(self) -> None:
        """Let others have it."""
        self._lock.close()


def hold_block(blocks: list[PortBlock]) -> HeldBlock:
    """Take the first block that no other run holds here and whose service ports are free.

    The file lock closes the gap between the check and the moment when Ray binds. Raises ValueError without a free one.
    """
    for block in blocks:
        name = f"openrlhf-{os.getuid()}-{socket.gethostname()}-{block.first}.lock"
        lock = try_lock(Path(tempfile.gettempdir()) / name)
        if lock is None:
            continue
        if all(is_free(port) for port in range(block.first, block.first + WORKER_OFFSET)):
            return HeldBlock(block, lock)
        lock.close()
    tried = ", ".join(f"{b.first}-{b.ports[-1]}" for b in blocks)
    raise ValueError(f"no free ports on {socket.gethostname()!r} (tried {tried}): give another --port-base")


def is_free(port: int) -> bool:
    """Whether nothing listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
