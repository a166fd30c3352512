"""An open session with an MCP server, and its end.

The library's contexts are left in the task that entered them, and a process may take seconds to end: a task of its own
holds them, which neither an episode that is cancelled nor its time-out cuts short.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from openrlhf.agents.failures import EpisodeFailed, describe, warn_once
from openrlhf.agents.mcp.results import ToolResult, read_result, refusal
from openrlhf.agents.mcp.server import McpServer

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import Tool

logger = logging.getLogger(__name__)

LIFE_SECONDS = 5.0
"""How long a server that let a call wait has to show that it still answers."""
SPARE_SECONDS = 2.0
"""Beyond the time of a call, for a server that does not even read it."""
MAX_PAGES = 100
"""Of a list of tools: one that never ends is no list."""
SHOWN = 2000
"""Characters of a server's standard error in messages."""
MAX_LOG = 2**20
"""Bytes of it that are kept."""
MAX_EVENT = 64 * 2**20
"""Bytes of one answer over HTTP, which may hold images."""
MARK = "OPENRLHF_MCP_SERVER"
"""In the environment of a server and of all that it starts, so that what it leaves behind is found."""
RUN_MARKS = ("OPENRLHF_RUN_ID", "OPENRLHF_NODE_RUN")
"""By these the end of a run finds what its killed workers left behind."""


class Connection:
    """A session with one server, from its start in the background to its end.

    broken: it died, hangs or never started; nobody may use it again.
    """

    def __init__(self, name: str, server: McpServer) -> None:
        self.name = name
        self.server = server
        self.broken = False
        self.tools: list[Tool] = []
        self._client: Client | None = None
        self._log: IO[bytes] | None = None
        self._mark = secrets.token_hex(8)
        self._leaving = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(_seen)
        self.holder = asyncio.create_task(self._hold())

    async def ready(self) -> Connection:
        """This, when the server has told its tools. Raises EpisodeFailed where it does not start."""
        await asyncio.shield(self._ready)
        return self

    def leave(self) -> None:
        """Ends the session, and the server that belongs to it, in the background: `holder` is done then."""
        self.broken = True
        self._leaving.set()
        if not self._ready.done():
            self.holder.cancel()

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """The result of a call; its time-outs and refusals are results too.

        Raises EpisodeFailed where the server is gone or hangs, which breaks the connection.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        seconds = self.server.call_timeout
        slow = f"{tool} gave no result within {seconds:g} s"
        _trim(self._log)
        try:
            assert self._client is not None
            async with asyncio.timeout(seconds + SPARE_SECONDS):
                result = await self._client.call_tool(tool, arguments, read_timeout_seconds=seconds)
            return read_result(result, self.server.max_characters)
        except ValueError:  # of pydantic
            return refusal(f"the result of {tool} is none of the protocol's")
        except MCPError as error:
            if error.code not in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                return refusal(error.message)
            said, cause = slow if error.code == REQUEST_TIMEOUT else error.message, error
        except TimeoutError as error:
            said, cause = slow, error
        except (
            Exception
        ) as error:  # whatever the transport meets; a result that breaks its own schema is a RuntimeError
            said, cause = str(error) or describe(error), error
        if not self.broken and await self._answers():
            return refusal(said)
        self.leave()
        raise self._failure(f"is gone or hangs since a call of {tool} ({said})") from cause

    async def _answers(self) -> bool:
        """Whether the server still answers; the newest protocol has no ping."""
        try:
            assert self._client is not None
            async with asyncio.timeout(LIFE_SECONDS):
                await self._client.session.list_tools()
        except Exception:
            return False
        return True

    async def _hold(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                if await self._begin(stack):
                    await self._leaving.wait()
        except Exception as error:
            logger.warning("the end of the MCP server %r: %s", self.name, _reason(error))
        finally:
            self.broken = True
            if not self._ready.done():  # cancelled
                self._ready.set_exception(self._failure("was ended before it started"))

    async def _begin(self, stack: AsyncExitStack) -> bool:
        """Whether the server started; those who wait for it are told at once, and not when it has ended."""
        try:
            async with asyncio.timeout(self.server.start_timeout):
                self._client = await self._start(stack)
                self.tools = await _list_tools(self._client)
        except TimeoutError:
            failure = self._failure(f"told no tools within {self.server.start_timeout:g} s")
        except Exception as error:
            failure = self._failure(f"does not start: {_reason(error)}")
            failure.__cause__ = error
        else:
            self._ready.set_result(None)
            return True
        self.broken = True
        self._ready.set_exception(failure)
        return False

    async def _start(self, stack: AsyncExitStack) -> Client:
        await asyncio.to_thread(load_library)  # seconds, at the first time
        from mcp import Client

        transport = _http(self.server) if self.server.url else self._process(stack)
        client = Client(transport, message_handler=self._on_message)
        return await stack.enter_async_context(client)

    def _process(self, stack: AsyncExitStack) -> Any:
        from mcp import StdioServerParameters, stdio_client

        self._log = log = stack.enter_context(tempfile.TemporaryFile("ab+"))  # noqa: SIM115 - the stack closes it
        folder = self.server.folder
        if folder is None:
            place = tempfile.TemporaryDirectory(prefix="mcp-", ignore_cleanup_errors=True)
            folder = stack.enter_context(place)
        stack.push_async_callback(asyncio.to_thread, end_marked, self._mark)  # what the library leaves running
        marks = {name: os.environ[name] for name in RUN_MARKS if name in os.environ}
        environment = {**marks, **self.server.variables, MARK: self._mark}
        command, *arguments = self.server.command
        parameters = StdioServerParameters(command=command, args=arguments, env=environment, cwd=folder)
        logging.getLogger("mcp.client.stdio").addFilter(_is_news)
        return stdio_client(parameters, log)  # type: ignore[arg-type]  # only its descriptor is used

    async def _on_message(self, message: Any) -> None:
        if isinstance(message, Exception):
            said = "the MCP server %r writes what is none of the protocol's messages to its standard output"
            warn_once(logger, f"mcp output {self.name}", said, self.name)

    def _failure(self, what: str) -> EpisodeFailed:
        errors = _tail(self._log)
        said = f"; its standard error: {errors}" if errors else ""
        return EpisodeFailed("agent", f"the MCP server {self.name!r} {what}{said}")


def load_library() -> None:
    """Raises ImportError with the command that installs it."""
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ImportError("mcp is not installed: pip install 'openrlhf-agents[mcp]'") from error


@asynccontextmanager
async def _http(server: McpServer) -> AsyncIterator[Any]:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    timeout = httpx2.Timeout(server.start_timeout, read=server.call_timeout + SPARE_SECONDS)
    async with (
        httpx2.AsyncClient(headers=dict(server.headers), timeout=timeout) as http,
        streamable_http_client(server.url, http_client=http, max_sse_event_size=MAX_EVENT) as streams,
    ):
        yield streams


async def _list_tools(client: Client) -> list[Tool]:
    """The tools of all pages."""
    tools: dict[str, Tool] = {}
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools |= {tool.name: tool for tool in page.tools}
        cursor = page.next_cursor
        if cursor is None:
            return list(tools.values())
    raise ValueError(f"its list of tools has more than {MAX_PAGES} pages")


def end_marked(mark: str) -> None:
    """Kills what carries the mark in its environment; where there is no /proc, nothing."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:  # it is somebody else's, or has ended
            continue


def _is_news(record: logging.LogRecord) -> bool:
    """The library logs a traceback for every line that is no message; we name the server, once."""
    return not record.getMessage().startswith("Failed to parse JSONRPC message")


def _seen(future: asyncio.Future[None]) -> None:
    """An episode that was cancelled does not ask how the start went."""
    if not future.cancelled():
        future.exception()


def _reason(error: BaseException) -> str:
    """The first cause in the groups of the library's tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe(error)


def _trim(log: IO[bytes] | None) -> None:
    """Keeps a talkative server's standard error small; it is opened for appending, so writers go on at the start."""
    if log is not None and os.fstat(log.fileno()).st_size > MAX_LOG:
        log.truncate(0)


def _tail(log: IO[bytes] | None) -> str:
    if log is None or log.closed:
        return ""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - 4 * SHOWN))
    return log.read().decode("utf-8", "replace").strip()[-SHOWN:]
