"""A real MCP server with tools that behave and tools that do not. A script: `KIND [PORT]`.

Kinds: stdio, http (streamable HTTP on 127.0.0.1:PORT), paged (stdio, one tool a page), endless (pages without an end),
mute (reads, and never answers), ended (is gone at once), odd (not the library's: an older protocol, odd results).
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from typing import Any

import anyio
import mcp_types as types
from mcp.server import MCPServer, ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.stdio import stdio_server

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
WIRE = os.dup(1)  # the library keeps what is printed away from it
server = MCPServer("tests", log_level="ERROR")
kept: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@server.tool()
def keep(word: str) -> str:
    """Remembers a word; tells all that it knows."""
    kept.append(word)
    return ",".join(kept)


@server.tool()
def refuse() -> str:
    raise ToolError("not today")


@server.tool()
def picture() -> Image:
    return Image(data=PIXEL, format="png")


@server.tool(structured_output=False)
def mixed() -> list[Any]:
    resource = types.TextResourceContents(uri="memo://1", text="a note")
    blob = types.BlobResourceContents(uri="memo://2", mime_type="application/zip", blob="AA==")
    return [
        types.TextContent(text="half \ud83d"[:5]),
        types.EmbeddedResource(resource=resource),
        types.EmbeddedResource(resource=blob),
        types.AudioContent(data="AA==", mime_type="audio/wav"),
        types.ResourceLink(name="more", uri="memo://3"),
    ]


@server.tool()
async def slow(seconds: float) -> str:
    await anyio.sleep(seconds)
    return "done"


@server.tool()
async def hang() -> str:
    time.sleep(1000)  # noqa: ASYNC251 - the whole server stands still
    return "never"


@server.tool()
def die() -> str:
    os.write(2, b"out of luck\n")
    os._exit(3)


@server.tool()
def chatter() -> str:
    os.write(WIRE, b'hello, I am no JSON\n{"neither": "am I"}\n')
    return "said"


@server.tool()
def leave_behind() -> str:
    """Starts a process in a session of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1000)"],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return str(process.pid)


@server.tool()
def environment() -> dict[str, str]:
    return {**os.environ, "folder": os.getcwd(), "OWN_PID": str(os.getpid())}


@server.tool()
def long() -> str:
    return "x" * 100_000


def _tool(number: int) -> types.Tool:
    return types.Tool(name=f"tool{number}", input_schema={"type": "object", "x-of-ours": 1})


async def _page(
    context: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
) -> types.ListToolsResult:
    number = int(params.cursor) if params and params.cursor else 0
    more = number < 2 or sys.argv[1] == "endless"
    return types.ListToolsResult(tools=[_tool(number)], next_cursor=str(number + 1) if more else None)


async def _call(context: ServerRequestContext[Any], params: types.CallToolRequestParams) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=params.name)])


async def run_paged() -> None:
    pages = Server("paged", on_list_tools=_page, on_call_tool=_call)
    async with stdio_server() as (read, write):
        await pages.run(read, write, pages.create_initialization_options())


def odd(name: str) -> dict[str, Any]:
    """The answer to a call."""
    if name == "busy":  # the code with which the library itself tells a lost connection
        return {"error": {"code": -32000, "message": "come back later"}}
    return {"result": {"content": "no list"}}


def run_odd() -> None:
    tools = [{"name": name, "inputSchema": {"type": "object"}} for name in ("busy", "broken")]
    capabilities = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
    for line in sys.stdin:
        request = json.loads(line)
        method = request["method"]
        if "id" not in request:
            continue
        if method == "initialize":
            answer: dict[str, Any] = {"result": {**capabilities, "serverInfo": {"name": "odd", "version": "1"}}}
        elif method == "tools/list":
            answer = {"result": {"tools": tools}}
        elif method == "tools/call":
            answer = odd(request["params"]["name"])
        else:
            answer = {"error": {"code": -32601, "message": "unknown"}}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}), flush=True)


def main() -> None:
    kind = sys.argv[1]
    if kind == "stdio":
        server.run()
    elif kind == "http":
        server.run("streamable-http", port=int(sys.argv[2]))
    elif kind == "mute":
        time.sleep(1000)
    elif kind == "odd":
        run_odd()
    elif kind == "ended":
        sys.exit("no configuration")
    else:
        anyio.run(run_paged)


if __name__ == "__main__":
    main()
