"""The process that supervises one run. Started by `sandbox` as a script, standard library only, never imported by it.

It adopts whatever the program starts and leaves (a subreaper), confines it as `isolation` says, ends everything at the
end or at a limit, and reports how the run ended as JSON. First argument: the description of the run as JSON; nothing
secret stands in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import socket
import stat
import sys
import time
from typing import Any

POLL_SECONDS = 0.005
COUNT_SECONDS = 0.02  # between two looks at the number of processes and the size of files
SETTLE_SECONDS = 5.0  # for processes that were killed to be gone
LINE = 3  # the descriptor of the line between program and judge, in both
OPEN_FILES = 256
THREADS = 16  # for each process that a program may have
PASSED = b"passed"  # what the judge says, and only it
JUDGE_BYTES = 4 * 2**30  # of address space that tests may have more than the program: they may load numpy
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILLED = 128  # bubblewrap reports a signal as a code above
LINUX = sys.platform == "linux"


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def main() -> None:
    run = json.loads(sys.argv[1])
    if run.get("probe"):
        _become(run)
    for descriptor in (run["report"], run["tests"]):
        os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGTERM, lambda *_: _end_early(0))
    if LINUX:
        libc().prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    judge, line, verdict = _start_judge(run) if run["judge"] else (0, None, -1)
    program = os.fork()
    if program == 0:
        _program(run, line)
    signal.signal(signal.SIGTERM, lambda *_: _end_early(program))
    if line is not None:
        line.close()
    report = _watch(run, program, judge)
    if judge and report["code"] is not None and not report["reason"]:
        report["code"] = 0 if _said(verdict) == PASSED else report["code"] or 1
    _end_all(program)
    os.write(run["report"], json.dumps(report).encode())


def _end_early(program: int) -> None:
    """Whoever started us is gone, or wants us to be."""
    _end_all(program)
    os._exit(1)


def _start_judge(run: dict[str, Any]) -> tuple[int, socket.socket, int]:
    """Starts the judge, which nothing confines; the program's end of the line, and where it says so."""
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
        os.execve(run["judge"][0], run["judge"], run["judge_environment"])
    return 0, ours, verdict


def _watch(run: dict[str, Any], program: int, judge: int) -> dict[str, Any]:
    """Waits for the judge, or for the program where there is none, or for a limit."""
    deadline = time.monotonic() + run["seconds"]
    next_count = 0.0
    while True:
        ended, how = _reap(judge or program)
        if ended:
            code = os.waitstatus_to_exitcode(how)
            wrapped = run["isolation"] == "bubblewrap" and not judge and code > KILLED
            return {"code": KILLED - code if wrapped else code, "reason": ""}
        now = time.monotonic()
        if now > deadline:
            return {"code": None, "reason": f"it took longer than {run['seconds']:g} s"}
        if now > next_count:
            reason = _excess(run, judge)
            if reason:
                return {"code": -signal.SIGKILL, "reason": reason}
            next_count = now + COUNT_SECONDS
        time.sleep(POLL_SECONDS)


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


def _excess(run: dict[str, Any], judge: int) -> str:
    """Which limit on the whole run is broken, "" for none."""
    found, threads = _descendants()
    processes = [pid for pid in found if pid != judge]
    if len(processes) > run["processes"] + len(run["wrapper"][:1]) * 2:  # bubblewrap is two processes of its own
        return f"more than {run['processes']} processes"
    if threads > THREADS * run["processes"]:
        return f"more than {THREADS * run['processes']} threads"
    if _resident(processes, run["memory_total"]) > run["memory_total"]:
        return f"more than {run['memory_total'] >> 20} MB of memory"
    size, count = _written(run["folder"], run["files"])
    if size + _unlinked(processes) > run["folder_bytes"] or count > run["files"]:
        return f"more than {run['folder_bytes'] >> 20} MB or {run['files']} files written"
    return ""


def _resident(processes: list[int], enough: int) -> int:
    """Bytes of memory that processes hold together. Copies that forks share count once, where it comes to that."""
    total = 0
    for pid in processes:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm") as pages:
            _, resident, shared = map(int, pages.read().split()[:3])
            total += (resident - shared) * resource.getpagesize()
    if total <= enough:
        return total
    total = 0
    for pid in processes:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as lines:
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))
    return total


def _written(folder: str, most: int) -> tuple[int, int]:
    """Bytes and number of files and folders below a folder; stops counting behind `most`."""
    size, count, left = 0, 0, [folder]
    while left and count <= most:
        place = left.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_size
        except OSError as error:  # of a folder that the program closed, or one too deep to be named
            count += most + 1 if error.errno in (errno.EACCES, errno.ENAMETOOLONG) else 0
    return size, count


def _unlinked(processes: list[int]) -> int:
    """Bytes of files that processes hold open and that have no name any more."""
    sizes = {}
    for pid in processes:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    about = os.stat(f"/proc/{pid}/fd/{name}")
                    if stat.S_ISREG(about.st_mode) and not about.st_nlink:
                        sizes[about.st_dev, about.st_ino] = about.st_size
    return sum(sizes.values())


def _descendants() -> tuple[list[int], int]:
    """All processes below this one, and how many threads they have; who lost its parent is a child of this one."""
    found, left, count = [], [os.getpid()], 0
    while left and LINUX:
        pid = left.pop()
        with contextlib.suppress(OSError):
            threads = os.listdir(f"/proc/{pid}/task")
            count += len(threads)
            for thread in threads:
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as children:
                    left += (new := [int(child) for child in children.read().split()])
                    found += new
    return found, count


def _end_all(program: int) -> None:
    """Kills every descendant until none is left: each one that loses its parent becomes our child."""
    until = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < until:
        if program:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(program, signal.SIGKILL)
        for pid in _descendants()[0] if LINUX else [program]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(POLL_SECONDS)


def _program(run: dict[str, Any], line: socket.socket | None) -> None:
    """Becomes the program, with its limits."""
    with _failing():
        os.setsid()
        _die_with_parent()
        if line is not None:
            _move(line.fileno(), LINE)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _limits(run)
        _become(run)


def _become(run: dict[str, Any]) -> None:
    """Confines this process as far as `isolation` says, and executes the program in it."""
    os.chdir(run["folder"])
    sys.path.append(run["source"])
    from openrlhf.agents.graders.program import confine

    command = run["command"]
    if run["isolation"] == "bubblewrap":
        command = [*run["wrapper"], *_filter(confine.call_filter()), "--", *command]
    elif LINUX:
        confine.drop_privileges()
        landlocked = run["isolation"] == "landlock"
        if landlocked and not confine.landlock(run["folder"], run["readable"]):
            raise OSError("Landlock is not there any more")
        confine.restrict_calls(signals=landlocked and confine.landlock_version() >= confine.SCOPED)
    os.execve(command[0], command, run["environment"])


def _filter(steps: bytes) -> list[str]:
    """bubblewrap's option for a filter of calls, which it reads from a pipe."""
    if not steps:
        return []
    receiver, sender = os.pipe()
    os.write(sender, steps)
    os.close(sender)
    os.set_inheritable(receiver, True)
    return ["--seccomp", str(receiver)]


def _limits(run: dict[str, Any]) -> None:
    _limit(resource.RLIMIT_CPU, run["cpu"])
    _limit(resource.RLIMIT_AS, run["memory"])
    _limit(resource.RLIMIT_FSIZE, run["file"])
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, OPEN_FILES)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, value))


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
