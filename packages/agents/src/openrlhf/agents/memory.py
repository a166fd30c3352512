"""What processes hold of a machine's memory, and how much of it there is, read from Linux's /proc and cgroup."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")


def resident_bytes(pid: int) -> int:
    """Bytes in memory of a process and all that descend from it; 0 where the system does not tell, or it has ended.

    What they share (a fork's copy of its parent, say) is counted for each.
    """
    process = Path(f"/proc/{pid}")
    try:
        own = int((process / "statm").read_text().split()[1]) * _PAGE
        children = {child for task in (process / "task").iterdir() for child in (task / "children").read_text().split()}
    except (OSError, IndexError):  # it ended meanwhile, or this is no Linux
        return 0
    return own + sum(resident_bytes(int(child)) for child in children)


def usable_bytes(root: Path = Path("/")) -> int | None:
    """Memory that processes here may use: the machine's, at most what its cgroup allows; None where nobody tells."""
    found = [int(line.split()[1]) * 1024 for line in _lines(root / "proc/meminfo") if line.startswith("MemTotal:")]
    found += [int(line) for name in _LIMITS for line in _lines(root / name) if line.isdigit()]
    return min(found, default=None)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []
