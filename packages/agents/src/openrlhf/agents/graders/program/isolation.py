"""How programs that are graded are kept apart on this machine: tried out, the best first.

bubblewrap: a program sees Python, the system's folders (not to be changed) and a folder of its own, its own processes,
and no network. landlock: files as before, and neither reads other processes nor has a network. none: limits only.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)
Isolation = Literal["bubblewrap", "landlock", "none"]
HERE = Path(__file__).parent
SOURCE = str(HERE.parents[3])  # the folder that holds the package `openrlhf`
PROBE_SECONDS = 60.0
SHM_BYTES = 64 * 2**20
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/sys/devices/system/cpu")
# Of /etc: what the loader, clocks, names of users and alternatives need.
SETTINGS = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "passwd", "group", "nsswitch.conf")
SETTINGS += ("alternatives", "mime.types")
MACHINE = ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/filesystems")
ALLOW = (
    "allow user namespaces (Docker: --security-opt seccomp=unconfined --security-opt systempaths=unconfined; Ubuntu: "
    "sysctl kernel.apparmor_restrict_unprivileged_userns=0)"
)


def isolation() -> Isolation:
    """How programs are kept apart on this machine."""
    return allowed_isolation()[0]


def missing_isolation() -> str:
    """What to do for a better one, "" where there is none better."""
    if isolation() == "bubblewrap":
        return ""
    if sys.platform != "linux":
        return "grade programs of strangers on Linux"
    step = (
        ALLOW if shutil.which("bwrap") else f"install bubblewrap (apt install bubblewrap) and, where it fails, {ALLOW}"
    )
    return f"{step}; or grade in a container of its own"


@lru_cache(maxsize=1)
def allowed_isolation() -> tuple[Isolation, ...]:
    """What this machine allows, the best first. Warns once where it is nothing."""
    tried: tuple[Isolation, ...] = ("bubblewrap", "landlock")
    allowed: tuple[Isolation, ...] = (*(kind for kind in tried if sys.platform == "linux" and _works(kind)), "none")
    if allowed[0] == "none":
        logger.warning(
            "nothing but limits keeps programs that are graded apart on this machine: they can read and change what "
            "this user can; `isolation.missing_isolation()` says what to do"
        )
    else:
        logger.info("programs that are graded are kept apart by %s", allowed[0])
    return allowed


def _works(kind: Isolation) -> bool:
    """Tries it on a program that does nothing: containers forbid what the kernel could do, each its own part."""
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        return False
    with tempfile.TemporaryDirectory(prefix="code-") as folder:
        place = Path(folder, "probe.py")
        place.write_text("print(deque([1]))", encoding="utf-8")
        run = {
            "probe": True, "isolation": kind, "wrapper": wrapper(kind, folder), "readable": [*readable(), *MACHINE],
            "source": SOURCE, "folder": folder, "environment": {"PATH": os.environ.get("PATH", os.defpath)},
            "command": [sys.executable, "-P", str(HERE / "runner.py"), "main", place.name, "deque"],
        }  # fmt: skip
        command = [sys.executable, "-I", "-S", str(HERE / "supervisor.py"), json.dumps(run)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False, env={})
        except subprocess.TimeoutExpired:
            return False
        return done.stdout.strip() == "deque([1])"


@lru_cache(maxsize=1)
def readable() -> tuple[str, ...]:
    """What a program may see beside its folder: Python, what it can import, and the system's own folders."""
    own = [sys.prefix, sys.base_prefix, SOURCE]
    link = sys.executable
    while os.path.islink(link):  # a virtual environment names its Python by links, also of the folders on the way
        link = os.path.join(os.path.dirname(link), os.readlink(link))
        home = os.path.dirname(os.path.dirname(link))
        own += [home] if os.path.realpath(home) == os.path.realpath(sys.base_prefix) else []
    places = [*SYSTEM, *(f"/etc/{name}" for name in SETTINGS), *own, *map(os.path.realpath, own)]
    return tuple(dict.fromkeys(place for place in places if os.path.exists(place)))


def wrapper(kind: Isolation, folder: str) -> list[str]:
    """The command that a program's own command stands behind, [] for none."""
    if kind != "bubblewrap":
        return []
    binds = [part for place in readable() for part in ("--ro-bind", place, place)]
    return [
        shutil.which("bwrap") or "bwrap", "--die-with-parent", "--unshare-user", "--unshare-all", "--cap-drop", "ALL",
        *binds, "--proc", "/proc", "--dev", "/dev", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm",
        "--bind", folder, folder, "--chdir", folder, "--remount-ro", "/dev", "--remount-ro", "/",
    ]  # fmt: skip
