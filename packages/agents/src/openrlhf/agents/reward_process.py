"""Runs a reward function in processes that can be killed: the `RewardSource` of `--reward.remote_url file.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.agents.files import CodeFile
from openrlhf.agents.memory import resident_bytes
from openrlhf.agents.reward_file import IMPORT_SECONDS, code_frame
from openrlhf.agents.rewards import RewardError, RewardProcessDiedError, RewardResult, RewardTimeoutError
from openrlhf.agents.types import Failure

logger = logging.getLogger(__name__)
LENGTH_BYTES = 8
CLOSE_SECONDS = 1.0
PASSED_ON_BYTES = 64 * 1024  # of the author's prints, per process; the rest is dropped
CHUNK = 64 * 1024
MEMORY_SECONDS = 0.1
"""How often a running call's memory is looked at; what a process can fill meanwhile is little."""
GIB = 2**30


class RewardProcess:
    """One process around one reward file. Not for concurrent calls: `RewardPool` sees to that.

    timeout: seconds of one call. max_memory: bytes that it and what it started may hold; None: no limit.
    """

    def __init__(self, code: CodeFile, timeout: float, max_memory: int | None = None) -> None:
        self.code = code
        self.timeout = timeout
        self.max_memory = max_memory
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Starts the process and waits until the file is imported. Raises RewardError with the author's traceback."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a folder named openrlhf in the working directory must not hide the package
            "-m",
            "openrlhf.agents.reward_child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._output = asyncio.create_task(self._pass_output_on())
        limit = f"{IMPORT_SECONDS:g} s, the limit of an import (`reward.timeout` counts for calls only)"
        answer = await self._exchange(code_frame(self.code), IMPORT_SECONDS, "importing it", limit)
        if "error" in answer:
            await self.kill()
            raise RewardError(f"{self.code.path} cannot be used: {answer['error']}", answer["traceback"])

    async def call(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        responses: Sequence[str] | None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> RewardResult:
        """One call of the function. Raises RewardError, RewardTimeoutError; the next call starts a new process then."""
        if self._process is not None and self._process.returncode is not None:
            await self.kill()  # it ended between two calls
        if self._process is None:
            await self.start()
        responses = None if responses is None else list(responses)
        frame = pickle.dumps((list(queries), list(prompts), list(labels), responses, dict(columns or {})))
        limit = f"`reward.timeout` {self.timeout:g} s"
        answer = await self._exchange(frame, self.timeout, f"reward_func({len(queries)} samples)", limit)
        if "error" in answer:
            raise RewardError(f"{self.code.name}: reward_func raised {answer['error']}", answer["traceback"])
        return _read_result(answer)

    async def _exchange(self, frame: bytes, seconds: float, what: str, limit: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds):
                return await self._within_memory(asyncio.ensure_future(self._send(frame)), what)
        except TimeoutError as error:
            await self.kill()
            message = f"{self.code.name}: {what} took longer than {limit}, process killed"
            raise RewardTimeoutError(message) from error
        except (OSError, EOFError) as error:  # the pipe is gone
            code = await self.kill()
            message = f"{self.code.name}: the reward process ended (exit code {code}) during {what}"
            raise RewardProcessDiedError(message) from error
        except BaseException:
            await self.kill()  # a call that nobody waits for any more: its answer would be taken for the next one
            raise

    async def _within_memory(self, answer: asyncio.Future[dict[str, Any]], what: str) -> dict[str, Any]:
        """The answer, unless the process takes too much memory before: then it is killed."""
        try:
            while not (await asyncio.wait([answer], timeout=self.max_memory and MEMORY_SECONDS))[0]:
                assert self.max_memory is not None
                assert self.pid is not None
                if (held := resident_bytes(self.pid)) > self.max_memory:
                    answer.cancel()
                    await self.kill()
                    limit = f"`reward.max_memory_gib` {self.max_memory / GIB:.3g}"
                    message = f"{self.code.name}: {what} took {held / GIB:.3g} GiB, more than {limit}, process killed"
                    raise RewardProcessDiedError(message)
            return answer.result()
        finally:
            answer.cancel()

    async def _send(self, frame: bytes) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
        await process.stdin.drain()
        size = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
        return json.loads(await process.stdout.readexactly(size))

    async def _pass_output_on(self) -> None:
        """What the author prints goes to our stderr, up to a limit; reading goes on so that he never blocks."""
        assert self._process is not None
        assert self._process.stderr is not None
        left = PASSED_ON_BYTES
        while chunk := await self._process.stderr.read(CHUNK):
            if left <= 0:
                continue
            sys.stderr.write(chunk[:left].decode("utf-8", "replace"))
            left -= len(chunk)
            if left <= 0:
                sys.stderr.write(f"\n[{self.code.name}: more than {PASSED_ON_BYTES} bytes of output, rest dropped]\n")

    async def kill(self) -> int | None:
        """Ends the process and everything it started. Returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            _kill_group(process)
        code = await process.wait()
        if process.stdin is not None:
            process.stdin.close()
        if self._output is not None:
            self._output.cancel()
            await asyncio.wait([self._output], timeout=CLOSE_SECONDS)
        # The transport stays open, with a warning, until every pipe saw its end; a grandchild may still hold one.
        process._transport.close()  # type: ignore[attr-defined]
        return code

    async def close(self) -> None:
        """Lets the process end by itself, then ends it."""
        process = self._process
        if process is not None and process.stdin is not None and process.returncode is None:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), CLOSE_SECONDS)
        await self.kill()


class RewardPool:
    """The reward function of a file as a `RewardSource`, in one or several processes.

    Calls beyond their number wait, and the wait counts for no limit; processes start when they are needed. A call that
    is too slow is killed and raises RewardTimeoutError; later calls get a fresh process. A call whose process dies, as
    at the hands of the system when memory is short, is made once more in a fresh one: what filled the old one may have
    been left by earlier calls.
    """

    def __init__(self, code: CodeFile, timeout: float, processes: int = 1, max_memory: int | None = None) -> None:
        self._processes = [RewardProcess(code, timeout, max_memory) for _ in range(processes)]
        self._idle: asyncio.LifoQueue[RewardProcess] = asyncio.LifoQueue()
        for process in self._processes:
            self._idle.put_nowait(process)
        self._waited = 0.0

    def totals(self) -> dict[str, float]:
        """What all calls so far took in all: wait_seconds, until a process was free."""
        return {"wait_seconds": self._waited}

    async def start(self) -> None:
        """Starts one process ahead, so that an unusable file shows at once."""
        process = await self._idle.get()
        try:
            if process.pid is None:
                await process.start()
        finally:
            self._idle.put_nowait(process)

    async def score(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        *,
        responses: Sequence[str] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> RewardResult:
        began = time.monotonic()
        process = await self._idle.get()
        self._waited += time.monotonic() - began
        try:
            try:
                return await process.call(queries, prompts, labels, responses, columns)
            except RewardProcessDiedError as error:
                logger.warning("%s: calling it once more in a new process", error)
                return await process.call(queries, prompts, labels, responses, columns)
        finally:
            self._idle.put_nowait(process)

    async def close(self) -> None:
        """Ends all processes."""
        await asyncio.gather(*(process.close() for process in self._processes))


def _kill_group(process: asyncio.subprocess.Process) -> None:
    if sys.platform == "win32":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGKILL)


def _read_result(answer: dict[str, Any]) -> RewardResult:
    failures = [None if m is None else Failure(border="reward", message=m) for m in answer["failures"]]
    return RewardResult(
        rewards=answer["rewards"], scores=answer["scores"], extra_logs=answer["extra_logs"], failures=failures
    )
