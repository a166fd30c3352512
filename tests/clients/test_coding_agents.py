"""Coding agents of three vendors, unmodified, as processes without a network: those that are on the PATH.

npm install --prefix DIR @anthropic-ai/claude-code @openai/codex opencode-ai
PATH=$PATH:DIR/node_modules/.bin nox -s clients -- tests/clients/test_coding_agents.py
"""

import asyncio
import json
import shutil
from typing import Any, ClassVar

import pytest

from openrlhf.agents.chat.process import ProcessAgent
from openrlhf.agents.testing import make_context
from openrlhf.agents.testing.episodes import _run_and_close
from openrlhf.agents.types import PromptItem
from support.agents_templates import QWEN3, TemplateTokenizer
from support.exact_tokens import SamplingEngine

pytestmark = pytest.mark.timeout(600)

WRITE = "echo hello > made.txt"
OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "provider": {"policy": {
        "npm": "@ai-sdk/openai-compatible",
        "name": "policy",
        "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {"policy": {"name": "policy", "limit": {"context": 100_000, "output": 4000}}},
    }},
}  # fmt: skip
CODEX = (
    *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "policy"),
    *("-c", 'model_provider="policy"', "-c", 'web_search="disabled"', "-c", "features.multi_agent=false", "-c"),
    'model_providers.policy={name="policy",base_url="OPENAI_BASE_URL",env_key="OPENAI_API_KEY",wire_api="responses"}',
)
AGENTS: dict[str, tuple[tuple[str, ...], dict[str, str], dict[str, Any]]] = {
    "claude": (
        ("-p", "{prompt}", "--model", "policy", "--allowedTools", "Bash"),
        {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        {"name": "Bash", "arguments": {"command": WRITE, "description": "Writes."}},
    ),
    "codex": ((*CODEX, "{prompt}"), {}, {"name": "exec_command", "arguments": {"cmd": WRITE}}),
    "opencode": (
        ("run", "-m", "policy/policy", "{prompt}"),
        {"OPENCODE_CONFIG_CONTENT": json.dumps(OPENCODE)},
        {"name": "bash", "arguments": {"command": WRITE, "description": "Writes."}},
    ),
}
"""Arguments, variables, and the call of the agent's shell."""


class Coder(ProcessAgent):
    """The reward is 1 where the agent has written the file."""

    timeout = 300.0
    memory_gib = 8.0
    reward_command = ("sh", "-c", 'test "$(cat made.txt)" = hello && echo 1 || echo 0')
    seen: ClassVar[list[str]] = []

    async def run(self, command, folder, environment, text):
        # codex takes the address from its configuration alone
        filled = [part.replace('"OPENAI_BASE_URL"', f'"{environment.get("OPENAI_BASE_URL")}"') for part in command]
        finished = await super().run(filled, folder, environment, text)
        self.seen.append(f"{command[0]}: status {finished.status}\n{finished.output}\n{finished.errors}")
        return finished


@pytest.mark.parametrize("name", AGENTS)
def test_a_coding_agent_works_and_its_tokens_are_exact(name):
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not on the PATH")
    arguments, variables, call = AGENTS[name]
    tokenizer = TemplateTokenizer(QWEN3)
    asks = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    async def script(token_ids, sampling):
        """A call where there are tools, then the end; a title for those that want one."""
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        said = "A title" if "# Tools" not in text else "done" if "<tool_response>" in text else asks
        return [*tokenizer.encode(said), tokenizer.eos_token_id]

    engine = SamplingEngine(script, tokenizer=tokenizer)
    agent = type("Agent", (Coder,), {"command": (program, *arguments), "variables": variables, "seen": []})()
    context = make_context(engine, tokenizer=tokenizer, timeout=600.0, max_length=10**6)
    item = PromptItem(group_id="g", prompt="Write hello into made.txt", label="")
    samples = asyncio.run(_run_and_close(agent, item, context))
    given = [(r.token_ids, s) for r, s in zip(engine.requests, engine.samples, strict=True)]
    found = []
    for sample in samples:
        assert (sample.failure, sample.reward) == (None, 1.0), agent.seen
        for turn in sample.turns:
            found.append((sample.token_ids[: turn.start], sample.token_ids[turn.start : turn.end]))
    assert sorted(found) == sorted(given)
    assert max(len(sample.turns) for sample in samples) == 2
