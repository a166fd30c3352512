"""The process that runs an author's reward function. Started by `reward_process`, never imported by it.

Frames on stdin and stdout: 8 bytes of length, then the content. First frame: the file. Then calls (pickle); answers
are JSON. Whatever the author prints goes to stderr. The process ends when its parent ends.

One event loop lives as long as the process: it waits for calls, so that the author's background tasks go on between
them, and runs his coroutines. A function that is no coroutine is called outside of it and may use a loop of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
import threading
import time
import traceback
from typing import Any, BinaryIO

from openrlhf.agents.checking import leave
from openrlhf.agents.proxies import keep_loopback_direct
from openrlhf.agents.reward_file import RewardFunction, read_code_frame

LENGTH_BYTES = 8
PR_SET_PDEATHSIG = 1
SIGKILL = 9
PARENT_POLL_SECONDS = 1.0


def main() -> None:
    if "--check" in sys.argv[1:]:
        _check()
        return
    parent = os.getppid()
    die_with_parent(parent)
    end_first_when_memory_is_short()
    keep_loopback_direct()
    requests, answers = _take_pipes()
    with asyncio.Runner() as runner:
        stream = runner.run(_open(requests))
        frame = runner.run(read_frame(stream))
        function = None if frame is None else _load(frame, answers, runner)
        if function is None:
            return
        while (frame := runner.run(read_frame(stream))) is not None:
            write_frame(answers, _answer(function, pickle.loads(frame)))


def _check() -> None:
    columns = json.loads(sys.argv[sys.argv.index("--check") + 1])
    code = read_code_frame(sys.stdin.buffer.read())
    try:
        RewardFunction(code, asyncio.Runner(), columns)
    except (Exception, SystemExit) as error:
        leave(_author_traceback(error))
    leave()


def _load(frame: bytes, answers: BinaryIO, runner: asyncio.Runner) -> RewardFunction | None:
    try:
        function = RewardFunction(read_code_frame(frame), runner)
    except (Exception, SystemExit) as error:
        write_frame(answers, _error(error))
        return None
    write_frame(answers, {"ready": True})
    return function


def _answer(function: RewardFunction, call: tuple[Any, ...]) -> dict[str, Any]:
    try:
        result = function(*call)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return _error(error)
    failures = [None if f is None else f.message for f in result.failures]
    return {
        "rewards": list(result.rewards),
        "scores": list(result.scores),
        "extra_logs": [dict(row) for row in result.extra_logs],
        "failures": failures,
    }


def _error(error: BaseException) -> dict[str, Any]:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return {"error": text, "traceback": _author_traceback(error)}


def _author_traceback(error: BaseException) -> str:
    """The traceback from the author's file on; all of it where his file does not occur."""
    frames = traceback.extract_tb(error.__traceback__)
    own = os.path.dirname(os.path.abspath(__file__))
    first = next((i for i, f in enumerate(frames) if not os.path.abspath(f.filename).startswith(own)), None)
    if first is None:
        return "".join(traceback.format_exception_only(error)).strip()
    lines = traceback.format_list(frames[first:]) + traceback.format_exception_only(error)
    return "Traceback (most recent call last):\n" + "".join(lines).rstrip()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keeps stdin and stdout for the protocol; the author's prints go to stderr, his reads find an empty file."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


async def _open(requests: BinaryIO) -> asyncio.StreamReader:
    stream = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(stream)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, requests)
    return stream


async def read_frame(stream: asyncio.StreamReader) -> bytes | None:
    """One frame, or None at the end of the stream."""
    try:
        size = int.from_bytes(await stream.readexactly(LENGTH_BYTES), "big")
        return await stream.readexactly(size)
    except asyncio.IncompleteReadError:
        return None


def write_frame(stream: BinaryIO, answer: dict[str, Any]) -> None:
    content = json.dumps(answer).encode()
    stream.write(len(content).to_bytes(LENGTH_BYTES, "big") + content)
    stream.flush()


def die_with_parent(parent: int) -> None:
    """Ends this process when its parent ends: at once on Linux, by a thread that looks elsewhere."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True, name="parent-watch").start()
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def end_first_when_memory_is_short() -> None:
    """Lets the kernel end this process and what it starts, and no engine or trainer, when the machine's memory ends."""
    if sys.platform == "linux":
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
