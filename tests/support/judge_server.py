"""A judge for tests: the repository's own OpenAI-compatible server over a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from openrlhf.agents.chat.render import ChatRenderer
from openrlhf.agents.chat.server import ChatServer
from openrlhf.agents.chat.session import ChatSession
from openrlhf.agents.config import AgentConfig
from openrlhf.agents.context import EpisodeSettings, SampleEngine
from openrlhf.agents.engine import SamplingParams
from openrlhf.agents.testing import ScriptedEngine
from openrlhf.agents.testing.engine import Script
from support.agents_templates import TemplateTokenizer


@dataclass(frozen=True)
class JudgeServer:
    """A running one. url: as in openai:URL, key: what it asks for."""

    url: str
    key: str
    engine: ScriptedEngine

    def asked(self, number: int) -> str:
        """The whole prompt of its engine's request of this number."""
        return TemplateTokenizer().decode(self.engine.requests[number].token_ids)


@asynccontextmanager
async def judge_server(script: Script) -> AsyncIterator[JudgeServer]:
    """Serves a model called "judge" whose answers are the script's."""
    tokenizer = TemplateTokenizer()
    engine = ScriptedEngine(script, tokenizer=tokenizer)
    settings = EpisodeSettings(agent=AgentConfig(max_turns=10_000, client_sampling="honour"))
    session = ChatSession(
        ChatRenderer(tokenizer), tokenizer, SampleEngine(engine, settings=settings), SamplingParams(), 100_000
    )
    server = ChatServer(model_names=("judge",))
    await server.start()
    try:
        yield JudgeServer(f"{server.url}/s/{server.add(session)}/v1", server.token, engine)
    finally:
        await server.stop()
