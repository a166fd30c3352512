"""The tools of MCP servers as an episode has them: offered to the policy in OpenAI's form, called with what it wrote.

An agent file is::

    from openai import AsyncOpenAI
    from openrlhf.agents.mcp.tools import McpExecutor, McpServer

    class AgentExecutor(McpExecutor):
        servers = {"files": McpServer(command=("mcp-server-filesystem", "."))}

        async def run_agent(self, prompt, label, session_id):
            url = self.session_url(session_id)
            messages = [{"role": "user", "content": prompt}]
            async with self.tools() as tools, AsyncOpenAI(base_url=url, api_key=self.api_key) as client:
                for _ in range(8):
                    answer = await client.chat.completions.create(
                        model="policy", messages=messages, tools=tools.offered
                    )
                    message = answer.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    if not message.tool_calls:
                        break
                    messages += await tools.answer(message.tool_calls)
            return {"reward": float(label in (message.content or "")), "extra_logs": tools.logs}
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from openrlhf.agents.chat.executor import OpenAIServerExecutor
from openrlhf.agents.failures import EpisodeFailed, warn_once
from openrlhf.agents.graders.patterns import schema_errors
from openrlhf.agents.json_text import parse_json, well_formed
from openrlhf.agents.mcp.connection import Connection
from openrlhf.agents.mcp.results import ToolResult, refusal
from openrlhf.agents.mcp.server import McpServer as McpServer

if TYPE_CHECKING:
    from mcp_types import Tool

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 15.0
"""How long the end of all servers may take; the library's own steps to end one add up to less."""
SHOWN_ERRORS = 5
"""Of wrong arguments, in what the model is told."""


class McpTools:
    """The servers of an agent worker: those that episodes share, and those that each has for itself."""

    def __init__(self, servers: Mapping[str, McpServer]) -> None:
        self.servers = dict(servers)
        self._shared: dict[str, Connection] = {}
        self._holders: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[EpisodeTools]:
        """The tools for one episode; its own servers end with it, in the background.

        Raises EpisodeFailed where a server does not start or two offer a tool of the same name.
        """
        own: dict[str, Connection] = {}
        try:
            for name, server in self.servers.items():
                if not server.shared:
                    own[name] = self._connect(name)
            tools = EpisodeTools(self, own)
            await tools.open()
            yield tools
        finally:
            for connection in own.values():
                connection.leave()

    async def close(self) -> None:
        """Ends all servers. Those of episodes that still run are ended too."""
        for connection in self._shared.values():
            connection.leave()
        self._shared.clear()
        if self._holders:
            _, left = await asyncio.wait(self._holders, timeout=CLOSE_SECONDS)
            for holder in left:
                holder.cancel()

    def shared(self, name: str) -> Connection:
        """The connection that all episodes use: a new one where there is none, or it broke."""
        found = self._shared.get(name)
        if found is None or found.broken:
            found = self._shared[name] = self._connect(name)
        return found

    def _connect(self, name: str) -> Connection:
        connection = Connection(name, self.servers[name])
        self._holders.add(connection.holder)
        connection.holder.add_done_callback(self._holders.discard)
        return connection


class EpisodeTools:
    """What one episode offers and calls.

    offered: in the form of `tools` of Chat Completions. calls, errors: how many there were.
    """

    def __init__(self, servers: McpTools, own: Mapping[str, Connection]) -> None:
        self.offered: list[dict[str, Any]] = []
        self.calls = 0
        self.errors = 0
        self._servers = servers
        self._own = own
        self._tools: dict[str, tuple[str, Tool]] = {}

    @property
    def logs(self) -> dict[str, float]:
        """For `extra_logs`."""
        return {"mcp/calls": float(self.calls), "mcp/errors": float(self.errors)}

    async def open(self) -> None:
        """Waits for all servers and reads what they offer."""
        connections = {name: self._connection(name) for name in self._servers.servers}  # they start together
        for name, connection in connections.items():
            await connection.ready()
            server = connection.server
            known = [tool.name for tool in connection.tools]
            if missing := [tool for tool in server.tools or () if tool not in known]:
                raise EpisodeFailed("agent", f"the MCP server {name!r} has no tool {missing[0]!r}; it has {known}")
            for tool in connection.tools:
                if server.tools is None or tool.name in server.tools:
                    self._offer(name, f"{server.prefix}{tool.name}", tool)

    async def call(self, name: str, arguments: str | Mapping[str, Any] | None = None) -> ToolResult:
        """The result of a call as the model wrote it; arguments: JSON text or a mapping.

        What the model can mend is a result with `is_error`: an unknown tool, arguments that break its schema, what the
        tool itself says, a call that takes too long. Raises EpisodeFailed where the server is gone or hangs.
        """
        self.calls += 1
        result = await self._call(name, arguments)
        self.errors += result.is_error
        return result

    async def answer(self, calls: Iterable[Any] | None) -> list[dict[str, Any]]:
        """The messages that answer an assistant's `tool_calls` (dicts, or objects of the `openai` package).

        They are made one after another, in their order, since later ones may build on what earlier ones did.
        """
        messages = []
        for item in calls or ():
            call = item if isinstance(item, Mapping) else item.model_dump()
            result = await self.call(call["function"]["name"], call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.content})
        return messages

    def _connection(self, name: str) -> Connection:
        return self._own[name] if name in self._own else self._servers.shared(name)

    def _offer(self, server: str, name: str, tool: Tool) -> None:
        if name in self._tools:
            both = f"{self._tools[name][0]!r} and {server!r}"
            raise EpisodeFailed("agent", f"the MCP servers {both} both have a tool {name!r}: give one a prefix")
        self._tools[name] = (server, tool)
        function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
        self.offered.append({"type": "function", "function": function})

    async def _call(self, name: str, arguments: str | Mapping[str, Any] | None) -> ToolResult:
        if name not in self._tools:
            return refusal(f"there is no tool {name!r}; there are {', '.join(self._tools) or 'none'}")
        server, tool = self._tools[name]
        try:
            values = _read(arguments)
        except ValueError as error:
            return refusal(f"the arguments of {name} are wrong: {error}")
        if wrong := _broken(values, tool, server):
            return refusal(f"the arguments of {name} are wrong: {'; '.join(wrong[:SHOWN_ERRORS])}")
        connection = await self._connection(server).ready()
        return await connection.call(tool.name, values)


class McpExecutor(OpenAIServerExecutor):
    """An `OpenAIServerExecutor` with the tools of MCP servers, by a name for each: `self.tools()` in `run_agent`."""

    servers: Mapping[str, McpServer] = {}

    _mcp: McpTools | None = None

    def tools(self) -> AbstractAsyncContextManager[EpisodeTools]:
        """`async with self.tools() as tools`, once in an episode."""
        if self._mcp is None:
            self._mcp = McpTools(self.servers)
        return self._mcp.episode()

    async def close(self) -> None:
        """Ends all servers of tools, then the policy's."""
        if self._mcp is not None:
            await self._mcp.close()
        await super().close()


def _read(arguments: str | Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(arguments, str):
        try:
            arguments = json.dumps(dict(arguments or {}))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"they are no JSON ({error})") from error
    value = parse_json(arguments or "{}", strict=True)
    if not isinstance(value, dict):
        raise ValueError("they must be a JSON object")
    return well_formed(value)


def _broken(values: dict[str, Any], tool: Tool, server: str) -> list[str]:
    """What breaks the tool's schema. One that cannot be checked here is left to the server, which knows it best."""
    try:
        return schema_errors(values, tool.input_schema, lenient=True)
    except ValueError as error:
        said = "the schema of the tool %r of the MCP server %r cannot be checked here: %s"
        warn_once(logger, f"mcp schema {server} {tool.name}", said, tool.name, server, error)
        return []
