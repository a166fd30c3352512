"""A calculator in the manner of agent_func_calculator.py, but as a tool of an MCP server. Both are this file.

`python agent_func_mcp.py` is the server, which speaks on its standard input and output; every episode starts one.
Any other is named by its command or URL, in SERVERS. The prompt is the text of the first user message: train with
prompts that are not rendered by a chat template, and a model whose template knows tools.
Needs: pip install 'openrlhf-agents[mcp]' openai. Pass this file to --train.agent_func_path.
"""

import operator
import sys
from pathlib import Path

from openai import AsyncOpenAI

from openrlhf.agents.mcp.tools import McpExecutor, McpServer

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
ROUNDS = 6
SERVERS = {"calculator": McpServer(command=(sys.executable, str(Path(__file__).absolute())), call_timeout=5.0)}


class AgentExecutor(McpExecutor):
    """Asks until the policy calls no tool any more, and looks for the label in what it says then."""

    servers = SERVERS

    async def run_agent(self, prompt, label, session_id):
        messages: list = [{"role": "user", "content": prompt}]
        url, key = self.session_url(session_id), self.api_key
        async with self.tools() as tools, AsyncOpenAI(base_url=url, api_key=key) as client:
            offered: list = tools.offered
            for _ in range(ROUNDS):
                answer = await client.chat.completions.create(model="policy", messages=messages, tools=offered)
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    right = str(label) in (message.content or "")
                    return {"reward": float(right), "extra_logs": tools.logs}
                messages += await tools.answer(message.tool_calls)
        return {"reward": 0.0, "extra_logs": tools.logs}


def main():
    """The server."""
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server = MCPServer("calculator", log_level="WARNING")

    @server.tool()
    def calculate(first: float, sign: str, second: float) -> float:
        """Adds (+), subtracts (-), multiplies (*) or divides (/) two numbers."""
        if sign not in OPERATORS:
            raise ToolError(f"unknown sign {sign!r}, there are {', '.join(OPERATORS)}")
        try:
            return OPERATORS[sign](first, second)
        except (ZeroDivisionError, OverflowError) as error:
            raise ToolError(str(error)) from error

    server.run()


if __name__ == "__main__":
    main()
