"""A chat agent made of a coroutine function, and its client."""

import asyncio
import json
from typing import Any

import httpx
import openai

from openrlhf.agents.chat.executor import OpenAIServerExecutor
from openrlhf.agents.chat.render import ChatRenderer
from openrlhf.agents.chat.server import ChatServer
from openrlhf.agents.chat.session import ChatSession
from openrlhf.agents.config import AgentConfig
from openrlhf.agents.context import EpisodeSettings, SampleEngine
from openrlhf.agents.engine import SamplingParams
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

    changes.setdefault("timeout", 200.0)  # a slow machine is no failure
    changes.setdefault("client_sampling", "honour")

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


class Direct:
    """The chat server without sockets: requests of one session through the ASGI application, on one event loop."""

    def __init__(
        self,
        script,
        *,
        template=None,
        tokenizer=None,
        max_length=4096,
        max_turns=1000,
        client_sampling: Any = "honour",
        guided=True,
        parser=None,
        **engine: Any,
    ):
        self.tokenizer = tokenizer or (TemplateTokenizer(template) if template else TemplateTokenizer())
        self.scripted = ScriptedEngine(script, tokenizer=self.tokenizer)
        agent = AgentConfig(max_turns=max_turns, client_sampling=client_sampling)
        settings = EpisodeSettings(agent=agent, guided=guided)
        sample = SampleEngine(self.scripted, settings=settings, **engine)
        sample.parser = parser
        renderer = ChatRenderer(self.tokenizer)
        self.session = ChatSession(renderer, self.tokenizer, sample, SamplingParams(), max_length)
        self.server = ChatServer()
        self.session_id = self.server.add(self.session)
        self.app = self.server.app()
        self.loop = asyncio.Runner()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.loop.close()

    def post(self, body: Any, path: str | None = None) -> httpx.Response:
        return self.loop.run(self.send(body, path))

    async def send(self, body: Any, path: str | None = None) -> httpx.Response:
        path = f"/s/{self.session_id}/v1/chat/completions" if path is None else path
        content = body if isinstance(body, bytes) else json.dumps(body)
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://direct", trust_env=False) as http:
            return await http.post(path, content=content, headers={"Authorization": f"Bearer {self.server.token}"})

    def say(self, messages, **changes):
        """The message of a successful call."""
        reply = self.post({"model": "policy", "messages": messages, **changes})
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["message"]

    @property
    def prompts(self):
        return [self.tokenizer.decode(r.token_ids) for r in self.scripted.requests]

    @property
    def texts(self):
        """The branches of the session as text."""
        return [self.tokenizer.decode(b.recorder.token_ids) for b in self.session.branches]


class Reader:
    """A vision model: one placeholder token, three tokens per image, bytes from `data:` texts."""

    placeholder = 266  # <|image|>
    reads = 0

    def read(self, image):
        if isinstance(image, bytes):
            return image
        if not image.startswith("data:"):
            raise ValueError(f"no image at {image!r}")
        self.reads += 1
        return image.encode()

    def tokens(self, image):
        return (5, 6, 7)
