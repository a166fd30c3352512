"""An executor whose agent talks to the policy through the APIs of OpenAI and Anthropic: override `run_agent`."""

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
from openrlhf.agents.signatures import takes
from openrlhf.agents.types import PromptItem, Trajectory
from openrlhf.agents.values import finite_logs, to_finite, turn_rewards, whole_reward


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

    model_names: Sequence[str] = ("policy",)  # names under which agents may ask for the policy; none: any name

    _server: ChatServer | None = None
    _renderer: ChatRenderer | None = None
    _starting: asyncio.Lock | None = None

    @abstractmethod
    async def run_agent(self, prompt: str, label: Any, session_id: str) -> Any:
        """One episode. Returns the reward, or {"reward": ..., "scores": ..., "extra_logs": {...}}.

        With an argument `columns` it also gets what else the prompt's row carries, by name.

        With {"turn_rewards": ...} every reply has a part of the reward, which is then their sum and may be left out:
        one number per reply, in the order in which they were given, or {id of the completion: number}, where replies
        that are not named get 0.
        """

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
        """Variables for an unmodified agent in a process of its own: where the policy is, for either API.

        Address and key both name the session, so that a client which knows only one of them reaches it.
        """
        assert self._server is not None
        url, key = self.session_url(session_id), self._server.session_key(session_id)
        anthropic = {"ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
        return {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, **anthropic}

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
            further = {"columns": engine.columns} if takes(type(self).run_agent, "columns") else {}
            result = await self.run_agent(prompt, label, session_id, **further)
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
    reward = _reward(session, fields)
    score = reward if fields.get("scores") is None else _finite(fields["scores"], "scores")
    logs = {
        **finite_logs(fields.get("extra_logs")),
        "agent/template_breaks": float(session.template_breaks),
        "agent/samples_per_rollout": float(len(session.branches)),
        "agent/malformed_tool_calls": float(session.malformed),
    }
    turns = [turn for branch in session.branches for turn in branch.recorder.turns]  # of one episode, with one reward
    stop_reason = ended_by(session.stop_reason, turns)
    outcome = Outcome(stop_reason=stop_reason, reward=reward, score=score, failure=session.failure, extra_logs=logs)
    return [branch.recorder.finish(item, sample_index, outcome) for branch in session.branches]


def _reward(session: ChatSession, fields: Mapping[str, Any]) -> float:
    """The episode's reward; what its replies earned of it is noted beside their tokens."""
    given, reward = fields.get("turn_rewards"), fields.get("reward")
    if given is None:
        return _finite(reward, "reward")
    replies = [answer for answer, _, _ in session.turns]
    if isinstance(given, Mapping):
        wrong = [name for name in given if replies.count(name) != 1]
        if wrong:
            raise ValueError(f'run_agent() "turn_rewards": no completion of one choice has the id {wrong}: {replies}')
        given = [given.get(answer, 0.0) for answer in replies]
    rewards = turn_rewards(given, len(replies), "run_agent()")
    for (_, branch, number), value in zip(session.turns, rewards, strict=True):
        branch.recorder.reward_turn(value, number)
    return whole_reward(None if reward is None else _finite(reward, "reward"), rewards, "run_agent()")


def _finite(value: Any, name: str) -> float:
    if value is None:
        raise EpisodeFailed("agent", 'run_agent() must return a reward: a number or {"reward": number, ...}')
    return to_finite(value, "run_agent()", name)
