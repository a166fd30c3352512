"""Episodes with the tools of `mcp_server.py`, after which nothing may be left running."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from openrlhf.agents.mcp.tools import McpServer, McpTools
from support.leftovers import nothing_left

SCRIPT = str(Path(__file__).with_name("mcp_server.py"))
STARTS_IN = 60.0
"""Seconds for a server over HTTP."""


def process(kind: str = "stdio", **changes: Any) -> McpServer:
    return McpServer(command=(sys.executable, SCRIPT, kind), **changes)


def play(servers: dict[str, McpServer], *bodies: Any) -> list[Any]:
    """Runs coroutine functions one after another, each as an episode; nothing is left running afterwards."""

    async def main():
        tools = McpTools(servers)
        try:
            results = []
            for body in bodies:
                async with tools.episode() as episode:
                    results.append(await body(episode))
            return results
        finally:
            await tools.close()

    with nothing_left():
        return asyncio.run(main())


def calls(*names: str, **arguments: Any) -> Any:
    async def body(tools):
        results = [await tools.call(name, arguments) for name in names]
        return results[0] if len(names) == 1 else results

    return body


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.asynccontextmanager
async def serving(port: int) -> AsyncIterator[str]:
    """The URL of a server over HTTP that runs meanwhile."""
    command = [sys.executable, SCRIPT, "http", str(port)]
    running = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(STARTS_IN):
            while not await _listens(port):  # noqa: ASYNC110 - nothing but a try tells it
                await asyncio.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        await running.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
