"""A chat agent made of a coroutine function, and its client."""

import asyncio
from typing import Any

import openai

from openrlhf.agents.chat.executor import OpenAIServerExecutor
from openrlhf.agents.testing import ScriptedEngine, make_context
from openrlhf.agents.types import PromptItem
from support.agents_templates import TemplateTokenizer


class Executor(OpenAIServerExecutor):
    """Runs a test's coroutine function as the agent."""

    def __init__(self, agent):
        self.agent = agent

    async def run_agent(self, prompt, label, session_id):
        result = await self.agent(self, prompt, session_id)
        return {"reward": 1.0} if result is None else result


def run(agent, script, *, prompt="hi", n_samples=1, template=None, delay=0.0, **changes):
    """Rolls one prompt out with this agent; returns the trajectories and the engine."""
    tokenizer = TemplateTokenizer(template) if template else TemplateTokenizer()
    engine = script if isinstance(script, ScriptedEngine) else ScriptedEngine(script, tokenizer=tokenizer, delay=delay)

    async def main():
        executor = Executor(agent)
        try:
            item = PromptItem(group_id="g", prompt=prompt)
            return await executor.run_group(
                item, make_context(engine, tokenizer=tokenizer, n_samples=n_samples, **changes)
            )
        finally:
            await executor.close()

    return asyncio.run(main()), engine


def client(executor, session_id, **kwargs) -> Any:
    return openai.AsyncOpenAI(
        base_url=executor.session_url(session_id), api_key=executor.api_key, max_retries=0, **kwargs
    )


def message(text, role="user"):
    return {"role": role, "content": text}


def text_of(trajectory):
    return TemplateTokenizer().decode(trajectory.token_ids)


def chat_body(**changes):
    return {"model": "policy", "messages": [message("hi")], **changes}
