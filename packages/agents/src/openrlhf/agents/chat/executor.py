"""An executor whose agent talks to the policy through the OpenAI chat API: override `run_agent`."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.agents.chat.render import ChatRenderer
from openrlhf.agents.chat.server import ChatServer
from openrlhf.agents.chat.session import ChatSession
from openrlhf.agents.context import sample_engine
from openrlhf.agents.executor import AgentExecutorBase
from openrlhf.agents.failures import EpisodeFailed
from openrlhf.agents.recorder import Outcome, ended_by
from openrlhf.agents.sampling import as_sampling
from openrlhf.agents.types import PromptItem, Trajectory
from openrlhf.agents.values import finite_logs, to_finite


class OpenAIServerExecutor(AgentExecutorBase):
    """Serves the policy on 127.0.0.1 while `run_agent` runs, once per sample.

    Every call is recorded token by token; a session that branches (an edited or rewritten history) gives one sample
    per branch, all with the reward of the episode.

    Example::

        class AgentExecutor(OpenAIServerExecutor):
            async def run_agent(self, prompt, label, session_id):
                async with AsyncOpenAI(base_url=self.session_url(session_id), api_key=self.api_key) as client:
                    messages = [{"role": "user", "content": prompt}]
                    answer = await client.chat.completions.create(model="policy", messages=messages)
                return {"reward": float(label in answer.choices[0].message.content)}
    """

    model_names: Sequence[str] = ("policy",)  # names under which agents may ask for the policy

    _server: ChatServer | None = None
    _renderer: ChatRenderer | None = None
    _starting: asyncio.Lock | None = None

    @abstractmethod
    async def run_agent(self, prompt: str, label: Any, session_id: str) -> Any:
        """One episode. Returns the reward, or {"reward": ..., "scores": ..., "extra_logs": {...}}."""

    @property
    def base_url(self) -> str:
        """The API's root for clients that send `session_id` in the body (`extra_body={"session_id": ...}`)."""
        assert self._server is not None
        return f"{self._server.url}/v1"

    def session_url(self, session_id: str) -> str:
        """The API's root for clients that know nothing of sessions."""
        assert self._server is not None
        return f"{self._server.url}/s/{session_id}/v1"

    @property
    def api_key(self) -> str:
        assert self._server is not None
        return self._server.token

    def environment(self, session_id: str) -> dict[str, str]:
        """Variables for an unmodified agent in a process of its own."""
        return {"OPENAI_BASE_URL": self.session_url(session_id), "OPENAI_API_KEY": self.api_key}

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Sequence[Any] | None = None,
    ) -> list[Trajectory]:
        """One episode as one sample per branch."""
        server = await self._started()
        if self._renderer is None or self._renderer.tokenizer is not hf_tokenizer:
            self._renderer = ChatRenderer(hf_tokenizer)
        engine = sample_engine(llm_engine)
        session = ChatSession(self._renderer, hf_tokenizer, engine, as_sampling(sampling_params), max_length)
        session_id = server.add(session)
        try:
            result = await self.run_agent(prompt, label, session_id)
        finally:
            server.remove(session_id)  # from here on no call changes the session
        item = PromptItem(group_id=engine.group_id, prompt=prompt, label=label, images=tuple(images or ()))
        return _trajectories(session, item, engine.sample_index, result)

    async def _started(self) -> ChatServer:
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._server is None:
                server = ChatServer(model_names=tuple(self.model_names))
                await server.start()
                self._server = server
        return self._server

    async def close(self) -> None:
        """Stops the server."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()


def _trajectories(session: ChatSession, item: PromptItem, sample_index: int, result: Any) -> list[Trajectory]:
    fields = result if isinstance(result, Mapping) else {"reward": result}
    if not session.branches:
        raise EpisodeFailed("agent", "run_agent() ended without a call to the policy")
    reward = _finite(fields.get("reward"), "reward")
    score = reward if fields.get("scores") is None else _finite(fields["scores"], "scores")
    logs = {
        **finite_logs(fields.get("extra_logs")),
        "agent/template_breaks": float(session.template_breaks),
        "agent/samples_per_rollout": float(len(session.branches)),
    }
    turns = [turn for branch in session.branches for turn in branch.recorder.turns]  # of one episode, with one reward
    stop_reason = ended_by(session.stop_reason, turns)
    outcome = Outcome(stop_reason=stop_reason, reward=reward, score=score, failure=session.failure, extra_logs=logs)
    return [branch.recorder.finish(item, sample_index, outcome) for branch in session.branches]


def _finite(value: Any, name: str) -> float:
    if value is None:
        raise EpisodeFailed("agent", 'run_agent() must return a reward: a number or {"reward": number, ...}')
    return to_finite(value, "run_agent()", name)
