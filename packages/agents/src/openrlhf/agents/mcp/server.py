"""Which MCP server an agent takes tools from, and how long its answers may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """One server: `command` starts it and speaks with it over its standard input and output, or it is running already
    and speaks streamable HTTP at `url`.

    Without `shared` every episode has a process (or, over HTTP, a session) of its own, so that nothing of one episode
    is seen by another. With it the episodes of an agent worker share one, which is cheaper, and right for tools that
    remember nothing; it is started again for the next call where it died.
    """

    command: Sequence[str] = ()
    url: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    """More of the process's environment, which holds HOME, PATH, SHELL, TERM and USER of ours, but no keys."""
    folder: str | None = None
    """Where the process runs; None: in a new, empty folder that is removed afterwards."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of every request to `url`; a key may be in it."""
    tools: Sequence[str] | None = None
    """Names of those that are offered; None: all."""
    prefix: str = ""
    """Put before the names of its tools, where those of several servers are the same."""
    shared: bool = False
    start_timeout: float = 60.0
    """Seconds until it has told its tools; then the episode fails."""
    call_timeout: float = 60.0
    """Seconds of one call; then the model is told, and the episode goes on if the server still answers."""
    max_characters: int = 20_000
    """Of a result's text; the rest is cut off, which the text says."""

    def __post_init__(self) -> None:
        if isinstance(self.command, str):
            raise ValueError(f"McpServer: command must be the program and its arguments, got {self.command!r}")
        if bool(self.command) == bool(self.url):
            raise ValueError(f"McpServer: give either command or url, got {list(self.command)!r} and {self.url!r}")
        for name in ("start_timeout", "call_timeout", "max_characters"):
            if not getattr(self, name) > 0:
                raise ValueError(f"McpServer: {name} must be above 0, got {getattr(self, name)!r}")
