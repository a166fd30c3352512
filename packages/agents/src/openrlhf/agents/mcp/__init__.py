"""Tools of MCP servers for agents (extra `[mcp]`), through the protocol's official client library.

`tools` is what an agent uses, `connection` holds the sessions and ends servers, `results` reads what tools return.
"""
