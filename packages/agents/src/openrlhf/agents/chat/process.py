"""An agent that people already have, trained unchanged: an episode is a process of its own, in a folder of its own.

What it knows of us is its environment: address and key of the policy, for clients of OpenAI and of Anthropic.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from openrlhf.agents.chat.executor import OpenAIServerExecutor
from openrlhf.agents.failures import EpisodeFailed
from openrlhf.agents.json_text import parse_json
from openrlhf.agents.memory import resident_bytes
from openrlhf.agents.proxies import LOOPBACK, proxy_of

GRACE_SECONDS = 3.0
"""Between the request to end and the end, for a process that is over its time."""
LOOK_SECONDS = 0.5
"""How often a process's memory is looked at."""
SHOWN = 2000
"""Characters of a process's output in messages."""
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Of our own environment; all else, keys and tokens among it, stays here."""
GIB = 2**30
NO_COLUMNS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A process that ended. output, errors: what it wrote, the last of it where that is long. folder: where it ran."""

    status: int
    output: str
    errors: str
    folder: Path
    seconds: float


class ProcessAgent(OpenAIServerExecutor):
    """Runs `command` once per sample. An agent file is::

        from openrlhf.agents.chat.process import ProcessAgent


        class AgentExecutor(ProcessAgent):
            command = ("my-agent", "--task", "{prompt}")
            files = "/data/workspace"
            reward_command = ("python", "/data/check.py")

    In `command` {prompt} is the row's prompt, which is also the process's standard input, and {column} is a column of
    the row. The label is for the reward alone. The reward is what one of these gives, a number or the JSON of
    `run_agent`'s answer:

    - `reward_file`: a file that the agent leaves in its folder,
    - `reward_command`: the last line that a command prints, run in the folder afterwards, with the label in
      OPENRLHF_LABEL and the agent's status in OPENRLHF_STATUS,
    - `reward_url`: a server that is sent {"prompt", "label", "columns", "status", "output"},
    - none of them: 1 for the exit status 0, else 0.

    Override `reward` for anything else.
    """

    model_names: Sequence[str] = ()
    command: Sequence[str] = ()
    files: str | Path | None = None  # a folder whose content every episode finds in its own
    variables: Mapping[str, str] = {}  # more of the process's environment
    timeout: float = 600.0  # seconds; then the process is ended, and the sample fails
    memory_gib: float = 4.0  # of the process and what it started; over it they are ended, and the sample fails
    file_gib: float = 1.0  # largest file that it may write
    reward_file: str | None = None
    reward_command: Sequence[str] | None = None
    reward_url: str | None = None

    async def run_agent(self, prompt: str, label: Any, session_id: str, columns: Mapping[str, Any] = NO_COLUMNS) -> Any:
        """One episode."""
        self._check()
        async with _folder(self.files) as folder:
            values = {**{name: str(value) for name, value in columns.items()}, "prompt": prompt}
            command = [_filled(part, values) for part in self.command]
            environment = {**clean_environment(folder), **self.environment(session_id), **self.variables}
            finished = await self.run(command, folder, environment, prompt)
            assert self._server is not None
            if not self._server.sessions[session_id].branches:
                said = finished.errors or finished.output
                raise EpisodeFailed(
                    "agent", f"{command[0]} ended with status {finished.status} and never asked the policy: {said}"
                )
            result = await self.reward(finished, prompt, label, columns)
        fields = dict(result) if isinstance(result, Mapping) else {"reward": result}
        own = {"process/status": float(finished.status), "process/seconds": finished.seconds}
        return {**fields, "extra_logs": {**own, **(fields.get("extra_logs") or {})}}

    def _check(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise ValueError(
                f"ProcessAgent: command must be the program and its arguments, one by one, got {self.command!r}"
            )
        given = [name for name in ("reward_file", "reward_command", "reward_url") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"the reward comes from one of {', '.join(given)}: set one of them")

    async def reward(self, finished: Finished, prompt: str, label: Any, columns: Mapping[str, Any]) -> Any:
        """What `run_agent` returns, from the episode that ended; its folder is still there."""
        if self.reward_file is not None:
            file = finished.folder / self.reward_file
            if not file.is_file():
                said = f"the agent (status {finished.status}) left no {self.reward_file}"
                raise EpisodeFailed("reward", f"{said}: {finished.errors or finished.output}")
            return _result(file.read_text(encoding="utf-8"), self.reward_file)
        if self.reward_command is not None:
            own = {"OPENRLHF_LABEL": _as_text(label), "OPENRLHF_STATUS": str(finished.status)}
            environment = {**clean_environment(finished.folder), **self.variables, **own}
            graded = await self.run(list(self.reward_command), finished.folder, environment, "")
            lines = graded.output.strip().splitlines()
            if graded.status or not lines:
                said = graded.errors or graded.output
                raise EpisodeFailed("reward", f"{self.reward_command[0]} ended with status {graded.status}: {said}")
            return _result(lines[-1], self.reward_command[0])
        if self.reward_url is not None:
            body = {"prompt": prompt, "label": label, "columns": dict(columns)}
            body |= {"status": finished.status, "output": finished.output}
            return await asyncio.to_thread(_post, self.reward_url, body, self.timeout)
        return float(finished.status == 0)

    async def run(self, command: Sequence[str], folder: Path, environment: Mapping[str, str], text: str) -> Finished:
        """A process with all limits, from its start to the end of all that it started. text: its standard input."""
        began = time.monotonic()
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            given.write(text.encode())
            given.seek(0)
            streams: dict[str, Any] = {"stdin": given, "stdout": output, "stderr": errors}
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, cwd=folder, env=dict(environment), start_new_session=True, **streams
                )
            except OSError as error:
                raise EpisodeFailed("agent", f"{command[0]} cannot be started: {error}") from error
            try:
                with suppress(ProcessLookupError):  # it has ended
                    largest = int(self.file_gib * GIB)
                    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (largest, largest))
                    resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
                status = await self._end_of(process, command[0])
            finally:
                await _end_group(process)
            seconds = time.monotonic() - began
            return Finished(status=status, output=_tail(output), errors=_tail(errors), folder=folder, seconds=seconds)

    async def _end_of(self, process: asyncio.subprocess.Process, name: str) -> int:
        """The exit status. Raises EpisodeFailed for a process over its limits."""
        waiting = asyncio.ensure_future(process.wait())
        deadline = time.monotonic() + self.timeout
        try:
            while not waiting.done():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise EpisodeFailed("timeout", f"{name} was not done after its timeout of {self.timeout:g} s")
                await asyncio.wait([waiting], timeout=min(left, LOOK_SECONDS))
                held = 0 if waiting.done() else await asyncio.to_thread(resident_bytes, process.pid)
                if held > self.memory_gib * GIB:
                    most = f"more than its {self.memory_gib:g} GiB (memory_gib)"
                    raise EpisodeFailed("agent", f"{name} held {held / GIB:.1f} GiB, {most}")
            return waiting.result()
        finally:
            waiting.cancel()


def clean_environment(folder: Path) -> dict[str, str]:
    """What every process here finds: paths and languages of ours, a home and a place for temporary files of its own."""
    own = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    direct = ",".join(LOOPBACK)
    return {**own, "HOME": str(folder), "TMPDIR": str(folder), "NO_PROXY": direct, "no_proxy": direct}


@asynccontextmanager
async def _folder(files: str | Path | None) -> AsyncIterator[Path]:
    """A new folder with a copy of these files, which is gone afterwards."""
    place = Path(tempfile.mkdtemp(prefix="agent-"))
    try:
        if files is None:
            (place / "work").mkdir()
        else:
            await asyncio.to_thread(shutil.copytree, files, place / "work", symlinks=True)
        yield place / "work"
    finally:
        await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """Ends the process and whatever it left running in its group."""
    for sign, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        try:
            os.killpg(process.pid, sign)
        except (ProcessLookupError, PermissionError):  # nobody is left, or nobody of ours
            break
        if process.returncode is not None and sign == signal.SIGTERM:
            continue  # only what it started is left, and waits for nothing
        try:
            async with asyncio.timeout(seconds):
                await process.wait()
        except TimeoutError:
            pass
    await process.wait()


def _filled(part: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        if part == f"{{{name}}}":
            return value
    return part


def _tail(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 4 * SHOWN))
    return file.read().decode("utf-8", "replace")[-SHOWN:]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _result(text: str, where: str) -> Any:
    try:
        return parse_json(text, strict=True)
    except ValueError as error:
        raise EpisodeFailed("reward", f"{where} holds neither a number nor JSON: {text[:SHOWN]!r}") from error


def _post(url: str, body: Mapping[str, Any], timeout: float) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    proxy = proxy_of(url)
    handler = urllib.request.ProxyHandler({} if proxy is None else {"http": proxy.url, "https": proxy.url})
    try:
        with urllib.request.build_opener(handler).open(request, timeout=timeout) as answer:
            return _result(answer.read().decode("utf-8", "replace"), url)
    except (urllib.error.URLError, TimeoutError) as error:
        raise EpisodeFailed("reward", f"{url} gave no reward: {error}") from error
