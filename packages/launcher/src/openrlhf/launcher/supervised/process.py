"""The process of a supervised rank, started plainly, by torchrun or by deepspeed."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping


def complete_environment(env: MutableMapping[str, str], *, local_rank: int) -> None:
    """What torch.distributed reads. Without a launcher this is a world of one process.

    local_rank: `--local_rank` as launchers of the older kind pass it; -1 where they do not.
    """
    if local_rank >= 0:
        env.setdefault("LOCAL_RANK", str(local_rank))
    if "RANK" in env:
        return
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in alone.items():
        env.setdefault(name, value)
    if "MASTER_PORT" not in env:
        env["MASTER_PORT"] = str(free_port())


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def is_first() -> bool:
    """Whether this process speaks for all."""
    return os.environ.get("RANK", "0") == "0"
