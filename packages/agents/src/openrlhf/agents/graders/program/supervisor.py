"""The process that supervises one run. Started by `sandbox` as a script, standard library only, never imported by it.

It adopts whatever the program starts and leaves (a subreaper), gives it namespaces and Landlock rules where the system
allows them, ends everything at the end or at a limit, and reports how the run ended as JSON. First argument: the
description of the run as JSON; nothing secret stands in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
from typing import Any

POLL_SECONDS = 0.005
COUNT_SECONDS = 0.02  # between two looks at the number of processes and the size of files
SETTLE_SECONDS = 5.0  # for processes that were killed to be gone
LINE = 3  # the descriptor of the line between program and judge, in both
OPEN_FILES = 256
PASSED = b"passed"  # what the judge says, and only it
JUDGE_BYTES = 4 * 2**30  # of address space that tests may have more than the program: they may load numpy
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
CAPABILITIES = 64  # more than there are
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x8000000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
WRITE_FILE, TRUNCATE, SCOPES = 1 << 1, 1 << 14, 0b11
SCOPED = 6  # version of Landlock from which on signals stay inside
# Removing and making of anything (bits 4 to 12), and moving between folders (13).
CHANGES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))
LINUX = sys.platform == "linux"
NOT_ISOLATED = 97


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def main() -> None:
    run = json.loads(sys.argv[1])
    if run.get("probe"):
        _probe()
    for descriptor in (run["report"], run["tests"]):
        os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGTERM, _end_early)
    if LINUX:
        libc().prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    judge, line, verdict = _start_judge(run) if run["judge"] else (0, None, -1)
    isolated = run["isolation"] == "namespaces" and _enter_namespaces()
    status, sender = os.pipe()
    program = os.fork()
    if program == 0:
        os.close(status)
        (_init if isolated else _program)(run, line, sender)
    os.close(sender)
    if line is not None:
        line.close()
    report = _watch(run, program, judge, status, isolated)
    if judge and report["code"] is not None and not report["reason"]:
        report["code"] = 0 if _said(verdict) == PASSED else report["code"] or 1
    _end_all(program)
    os.write(run["report"], json.dumps(report).encode())


def _end_early(*_: object) -> None:
    """Whoever started us is gone, or wants us to be."""
    _end_all(0)
    os._exit(1)


def _start_judge(run: dict[str, Any]) -> tuple[int, socket.socket, int]:
    """Starts the judge outside the namespaces of the program; the program's end of the line, and where it says so."""
    ours, theirs = socket.socketpair()
    verdict, sender = os.pipe()
    judge = os.fork()
    if judge:
        theirs.close()
        os.close(sender)
        return judge, ours, verdict
    with _failing():
        os.dup2(run["tests"], 0)
        os.dup2(sender, 1)
        _move(theirs.fileno(), LINE)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_CPU, run["cpu"])
        _limit(resource.RLIMIT_AS, run["memory"] + JUDGE_BYTES)
        _die_with_parent()
        os.execve(run["judge"][0], run["judge"], run["environment"])
    return 0, ours, verdict


def _watch(run: dict[str, Any], program: int, judge: int, status: int, isolated: bool) -> dict[str, Any]:
    """Waits for the judge, or for the program where there is none, or for a limit."""
    deadline = time.monotonic() + run["seconds"]
    next_count, code = 0.0, None
    awaited = judge or program
    while True:
        ended, how = _reap(awaited)
        if ended:
            code = os.waitstatus_to_exitcode(how)
            break
        now = time.monotonic()
        if now > deadline:
            return {"code": None, "reason": f"it took longer than {run['seconds']:g} s"}
        if now > next_count:
            reason = _excess(run, isolated)
            if reason:
                return {"code": -signal.SIGKILL, "reason": reason}
            next_count = now + COUNT_SECONDS
        time.sleep(POLL_SECONDS)
    said = _said(status)
    inner = json.loads(said) if said else {}
    return {"code": inner.get("code", code) if not judge else code, "reason": inner.get("reason", "")}


def _said(pipe: int) -> bytes:
    """What a pipe holds by now."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        return os.read(pipe, 1000)
    return b""


def _reap(awaited: int) -> tuple[bool, int]:
    """Collects what ended; whether the awaited process did, and how."""
    while True:
        try:
            pid, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True, 1 << 8
        if pid == awaited:
            return True, how
        if pid == 0:
            return False, 0


def _excess(run: dict[str, Any], isolated: bool) -> str:
    """Which limit on the whole run is broken, "" for none. In a namespace the first process counts the others."""
    if not isolated and LINUX and len(_descendants()) > run["processes"] + 1:
        return f"more than {run['processes']} processes"
    total = count = 0
    for folder, _, files in os.walk(run["folder"]):
        for name in files:
            count += 1
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    if total > run["folder_bytes"] or count > run["files"]:
        return f"more than {run['folder_bytes'] >> 20} MB or {run['files']} files written"
    return ""


def _descendants() -> list[int]:
    """All processes below this one; those that lost their parent are its children."""
    found, left = [], [os.getpid()]
    while left:
        pid = left.pop()
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as children:
                    left += (new := [int(child) for child in children.read().split()])
                    found += new
    return found


def _end_all(program: int) -> None:
    """Kills every descendant until none is left: each one that loses its parent becomes our child."""
    until = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < until:
        if program:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(program, signal.SIGKILL)
        for pid in _descendants() if LINUX else [program]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(POLL_SECONDS)


def _enter_namespaces() -> bool:
    """New user, process and IPC namespaces for the children; whether the system allows it."""
    user, group = os.getuid(), os.getgid()
    if libc().unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWIPC) != 0:
        return False
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        os._exit(NOT_ISOLATED)
    return True


def _probe() -> None:
    """Tries what the system allows on processes that do nothing, and prints it, the best first.

    Landlock with scopes keeps other processes out of reach and needs no second view of the system; namespaces do that
    where it is older; Landlock without scopes does not stop signals.
    """
    allowed = []
    for kind, attempt in (("namespaces", _probe_namespaces), ("landlock", _probe_landlock)):
        child = os.fork() if LINUX else -1
        if child == 0:
            with _failing():
                os._exit(0 if attempt() else NOT_ISOLATED)
        if child > 0 and os.waitpid(child, 0)[1] == 0:
            allowed.append(kind)
    if "landlock" in allowed and _landlock_version() >= SCOPED:
        allowed.reverse()
    os.write(1, " ".join([*allowed, "none"]).encode())
    os._exit(0)


def _probe_namespaces() -> bool:
    if not _enter_namespaces():
        return False
    child = os.fork()
    if child == 0:
        with _failing():
            _mount()
            os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _probe_landlock() -> bool:
    libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return _landlock("/tmp")


def _init(run: dict[str, Any], line: socket.socket | None, sender: int) -> None:
    """The first process of the namespace: when it ends, the system ends all others in it."""
    with _failing():
        _die_with_parent()
        _mount()
        program = os.fork()
        if program == 0:
            _program(run, line, sender)
        if line is not None:
            line.close()
        report: dict[str, Any] = {}
        next_count = 0.0
        while not report:
            ended, how = _reap(program)
            if ended:
                report = {"code": os.waitstatus_to_exitcode(how)}
            elif time.monotonic() > next_count:
                if _crowd() > run["processes"] + 1:
                    report = {"code": -signal.SIGKILL, "reason": f"more than {run['processes']} processes"}
                next_count = time.monotonic() + COUNT_SECONDS
            else:
                time.sleep(POLL_SECONDS)
        os.write(sender, json.dumps(report).encode())
        os._exit(0)


def _crowd() -> int:
    return sum(name.isdigit() for name in os.listdir("/proc"))


def _mount() -> None:
    """A /proc that shows this namespace only, and a /dev/shm that goes with it."""
    system = libc()
    if system.unshare(CLONE_NEWNS) != 0:
        os._exit(NOT_ISOLATED)
    system.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    if system.mount(b"proc", b"/proc", b"proc", flags, None) != 0:
        os._exit(NOT_ISOLATED)
    system.mount(b"tmpfs", b"/dev/shm", b"tmpfs", flags, b"size=64m")


def _program(run: dict[str, Any], line: socket.socket | None, sender: int) -> None:
    """Becomes the program, with its limits."""
    with _failing():
        os.setsid()
        _die_with_parent()
        if line is not None:
            _move(line.fileno(), LINE)
        os.chdir(run["folder"])
        _limits(run)
        if LINUX:
            _confine(run)
        os.execve(run["command"][0], run["command"], run["environment"])


def _confine(run: dict[str, Any]) -> None:
    system = libc()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for capability in range(CAPABILITIES):  # root may read every process; its programs need nothing of the kind
        system.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    system.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if run["isolation"] != "none":
        _landlock(run["folder"])


def _limits(run: dict[str, Any]) -> None:
    _limit(resource.RLIMIT_CPU, run["cpu"])
    _limit(resource.RLIMIT_AS, run["memory"])
    _limit(resource.RLIMIT_FSIZE, run["file"])
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    if run["isolation"] == "namespaces" and os.getuid() != 0:
        _limit(
            resource.RLIMIT_NPROC, run["processes"]
        )  # counted per namespace; elsewhere all of the user's would count


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, value))


def _landlock(folder: str) -> bool:
    """Lets the program change files in its folder only, and neither read other processes nor signal them."""
    system, version = libc(), _landlock_version()
    if version < 1:
        return False
    changes = CHANGES | (1 << 13 if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    rules = (ctypes.c_uint64 * 3)(changes, 0, SCOPES if version >= SCOPED else 0)
    size = 24 if version >= SCOPED else 8
    ruleset = system.syscall(LANDLOCK_CREATE, rules, ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return False
    for place in (folder, "/dev", "/proc"):
        path = os.open(place, os.O_PATH | os.O_CLOEXEC)
        rule = (ctypes.c_uint8 * 12)()
        ctypes.memmove(rule, changes.to_bytes(8, "little") + path.to_bytes(4, "little"), 12)
        system.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0)
        os.close(path)
    done = system.syscall(LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return done


def _landlock_version() -> int:
    return libc().syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1) if LINUX else -1


def _die_with_parent() -> None:
    if LINUX:
        libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _move(source: int, target: int) -> None:
    if source != target:
        os.dup2(source, target)
    os.set_inheritable(target, True)


@contextlib.contextmanager
def _failing() -> Any:
    """A child never returns into its parent's code."""
    try:
        yield
    except BaseException as error:
        os.write(2, f"the run could not be started: {error!r}\n".encode())
    finally:
        os._exit(126)


if __name__ == "__main__":
    main()
