"""Executors: how one prompt becomes n token-level samples.

`AgentExecutorBase` gives an author control over every token, `MultiTurnAgentExecutor` runs an environment with
`reset` and `step`, `SingleTurnExecutor` is one prompt, one answer, one reward. A sample that fails is data.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from openrlhf.agents.context import GroupContext, SampleEngine, fit_prompt, prompt_budget, sample_engine
from openrlhf.agents.engine import Engine, SamplingParams, Tokenizer
from openrlhf.agents.failures import EpisodeFailed, FailureLog, describe, trajectory_of
from openrlhf.agents.images import check_count, expand_trajectory
from openrlhf.agents.recorder import Outcome, Recorder
from openrlhf.agents.results import as_trajectories
from openrlhf.agents.rewards import RewardSource, apply_rewards
from openrlhf.agents.sampling import as_sampling
from openrlhf.agents.signatures import by_position, check_agent_class, takes_images
from openrlhf.agents.spans import span
from openrlhf.agents.steps import EpisodeTotals, StepResult, read_observation, read_step
from openrlhf.agents.supervise import supervise
from openrlhf.agents.types import PromptItem, StopReason, Trajectory

logger = logging.getLogger(__name__)


class AgentInstanceBase(ABC):
    """One environment, one episode: a new instance (no arguments) is made for every sample."""

    async def reset(self, states: dict, **kwargs: Any) -> dict:
        """states: observation (the prompt), label, images, columns (what else the prompt's row carries, by name).

        Returns {"observation": the text to start from}.
        """
        return {"observation": states["observation"]}

    @abstractmethod
    async def step(self, states: dict, **kwargs: Any) -> dict[str, Any]:
        """One turn of the environment.

        states: observation_text (everything before the answer), action_text (the answer, special tokens kept),
        label, columns, sampling_params, turn, finish_reason.
        Returns rewards, environment_feedback and done; optional scores, extra_logs, sampling_params (for the turns
        to come) and environment_images.
        """


class AgentExecutorBase(ABC):
    """Token-level control: override `execute`; it runs once per sample, n of them at the same time.

    Keep what was sampled as it was sampled: pass ids on, never text that is tokenised again.
    """

    _failures: FailureLog | None = None  # an author's __init__ may not call super().__init__()

    @abstractmethod
    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Sequence[Any] | None = None,
    ) -> Any:
        """One sample: a `Trajectory`, a list of them (branches), or a dict with observation_tokens, action_ranges,
        reward and optionally rollout_log_probs, scores, extra_logs, truncated, images.

        sampling_params: a copy of this sample's own, to read and to set. llm_engine: `await
        llm_engine.generate(token_ids, sampling_params, images=None)` gives a `RequestOutput`; seeds, group and the cap
        of new tokens are added there. `llm_engine.columns`: what else the prompt's row carries, by name.
        """

    async def run_group(self, item: PromptItem, ctx: GroupContext) -> list[Trajectory]:
        """All samples of one prompt, in order of sample_index; a sample with branches gives several."""
        return await self._run_samples(item, ctx)

    async def close(self) -> None:  # noqa: B027 - a hook, not a duty
        """Called once, when the worker ends."""

    async def _run_samples(self, item: PromptItem, ctx: GroupContext) -> list[Trajectory]:
        engines = [self._sample_engine(item, ctx, i) for i in range(ctx.settings.n_samples)]
        tasks = [asyncio.create_task(self._run_sample(item, ctx, engine)) for engine in engines]
        results = await supervise(tasks, engines, ctx.settings.agent.timeout, item)
        trajectories = [trajectory for sample in results for trajectory in sample]
        self._report(trajectories)
        return trajectories

    def _report(self, trajectories: Sequence[Trajectory]) -> None:
        self._failures = self._failures or FailureLog()
        for trajectory in trajectories:
            self._failures.report(trajectory)

    def _sample_engine(self, item: PromptItem, ctx: GroupContext, sample_index: int) -> SampleEngine:
        engine = SampleEngine(
            ctx.engine,
            group_id=item.group_id,
            sample_index=sample_index,
            seeds=ctx.seeds,
            settings=ctx.settings,
            image_reader=ctx.image_reader,
            tokenizer=ctx.tokenizer,
            columns=item.columns,
        )
        engine.parser = ctx.parser
        return engine

    async def _run_sample(self, item: PromptItem, ctx: GroupContext, engine: SampleEngine) -> list[Trajectory]:
        try:
            async with _slot(ctx.slots, engine):
                with span("sample", sample=engine.sample_index):
                    result = await self._call_execute(item, ctx, engine)
            trajectories = as_trajectories(result, item, engine, ctx.settings.max_length)
            return [await self._as_trained(t, engine, ctx.settings.max_length) for t in trajectories]
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            failure = EpisodeFailed("agent", "CancelledError: something that the agent waited for was cancelled")
            failure.__cause__ = error
            return [trajectory_of(failure, item, engine.sample_index)]
        except (Exception, SystemExit) as error:
            return [trajectory_of(error, item, engine.sample_index)]

    async def _as_trained(self, trajectory: Trajectory, engine: SampleEngine, max_length: int) -> Trajectory:
        """With the images read and in their places; see `images.expand_trajectory`."""
        if not trajectory.images or trajectory.failed:
            return trajectory
        images = await engine.read_images(trajectory.images)
        return expand_trajectory(replace(trajectory, images=tuple(images)), engine.image_reader, max_length)

    async def _call_execute(self, item: PromptItem, ctx: GroupContext, engine: SampleEngine) -> Any:
        settings = ctx.settings
        arguments: dict[str, Any] = {
            "prompt": item.prompt,
            "label": item.label,
            "sampling_params": settings.sampling.with_(max_tokens=settings.max_new_tokens, seed=None),
            "max_length": settings.max_length,
            "hf_tokenizer": ctx.tokenizer,
            "llm_engine": engine,
        }
        if item.images or takes_images(type(self).execute):
            arguments["images"] = list(item.images) or None
        result = self.execute(*arguments.values()) if by_position(type(self).execute) else self.execute(**arguments)
        return await result if inspect.isawaitable(result) else result


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Runs `agent_class` (an `AgentInstanceBase`): generate, step, append the feedback, until done.

    Every turn may sample min(max_new_tokens, max_length - tokens so far) tokens. Feedback is tokenised on its own,
    without special tokens, and is not trained on. Rewards of all turns add up, and each stays with its turn.
    """

    def __init__(self, agent_class: Callable[[], Any]) -> None:
        check_agent_class(agent_class)
        self.agent_class = agent_class

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Tokenizer,
        llm_engine: Engine | SampleEngine,
        images: Sequence[Any] | None = None,
    ) -> Trajectory:
        """One episode as a trajectory."""
        engine = sample_engine(llm_engine)
        item = PromptItem(group_id=engine.group_id, prompt=prompt, label=label, images=tuple(images or ()))
        episode = _Episode(item, as_sampling(sampling_params), max_length, hf_tokenizer, engine)
        try:
            outcome = await episode.run(await episode.make(self.agent_class))
        except EpisodeFailed:
            raise
        except Exception as error:
            # What is wrong with a request (its sampling parameters, its number of images) came from the agent.
            border = "engine" if episode.generating and not isinstance(error, ValueError) else "agent"
            raise EpisodeFailed(border, describe(error), recorder=episode.recorder) from error
        return episode.recorder.finish(item, engine.sample_index, outcome)


class _Episode:
    """The state of one multi-turn episode."""

    def __init__(
        self,
        item: PromptItem,
        sampling: SamplingParams,
        max_length: int,
        tokenizer: Tokenizer,
        engine: SampleEngine,
    ) -> None:
        self.item = item
        self.sampling = sampling
        self.max_length = max_length
        self.tokenizer = tokenizer
        self.engine = engine
        self.recorder = Recorder(images=item.images)
        self.generating = False
        self.text = ""

    async def make(self, agent_class: Callable[[], Any]) -> Any:
        """A new agent. Its `__init__` may be a coroutine, which Python itself does not await."""
        if inspect.isclass(agent_class) and inspect.iscoroutinefunction(agent_class.__init__):
            agent = agent_class.__new__(agent_class)
            await self._await_agent(agent.__init__(), "__init__()")
            return agent
        agent = agent_class()
        return agent if inspect.isclass(agent_class) else await self._await_agent(agent, "the agent's construction")

    async def run(self, agent: Any) -> Outcome:
        await self._start(agent)
        totals = EpisodeTotals()
        for turn in range(self.engine.settings.agent.max_turns):
            with span("turn", turn=turn):
                result = await self._turn(agent, turn)
            totals.add(result)
            if not self._append_feedback(result, await self.engine.read_images(result.images)):
                return totals.outcome(StopReason.DONE if result.done else StopReason.LENGTH)
            if result.done:
                return totals.outcome(StopReason.DONE)
        return totals.outcome(StopReason.MAX_TURNS)

    def _length(self) -> int:
        return self.engine.length(self.recorder.token_ids, self.recorder.images)

    async def _start(self, agent: Any) -> None:
        states = {
            "observation": self.item.prompt,
            "label": self.item.label,
            "images": list(self.item.images),
            "columns": self.engine.columns,
        }
        self.text = read_observation(await self._await_agent(agent.reset(states), "reset()"))
        ids = self.tokenizer.encode(self.text, add_special_tokens=False)
        images = await self.engine.read_images(self.item.images)
        allowed = prompt_budget(self.max_length, self.sampling.max_tokens)
        overlong = "error" if images else self.engine.settings.overlong
        kept = fit_prompt(ids, allowed, overlong, self.engine.length((), images))
        if len(kept) < len(ids):
            warn_truncated(len(ids), allowed)
            self.text = self.tokenizer.decode(kept, skip_special_tokens=False)
        if not kept:
            raise ValueError("the observation of reset() has no tokens; return at least one character")
        self.recorder = Recorder(kept, images)

    async def _turn(self, agent: Any, turn: int) -> StepResult:
        budget = self.max_length - self._length()
        assert budget >= 1
        tokens = budget if self.sampling.max_tokens is None else min(budget, self.sampling.max_tokens)
        self.generating = True
        generation = await self.engine.generate(
            self.recorder.token_ids.copy(), self.sampling.with_(max_tokens=tokens), self.recorder.images
        )
        self.recorder.append_sampled(generation)
        self.generating = False
        if generation.finish_reason == "abort":
            raise aborted(self.recorder)
        action_text = self.tokenizer.decode(generation.token_ids, skip_special_tokens=False)
        states = {
            "observation_text": self.text,
            "action_text": action_text,
            "label": self.item.label,
            "columns": self.engine.columns,
            "sampling_params": self.sampling,
            "turn": turn,
            "finish_reason": generation.finish_reason,
        }
        result = read_step(await self._await_agent(agent.step(states), f"step() of turn {turn + 1}"))
        self.recorder.reward_turn(result.reward)
        self.text += action_text + result.feedback
        self.sampling = result.sampling or self.sampling
        return result

    def _append_feedback(self, result: StepResult, images: Sequence[Any]) -> bool:
        """False where the context is full afterwards. Feedback that does not fit is cut, or dropped with its images."""
        ids = self.tokenizer.encode(result.feedback, add_special_tokens=False) if result.feedback else []
        check_count(ids, images, self.engine.image_reader)
        room = self.max_length - self._length()
        needed = self.engine.length(ids, images)
        if needed <= room:
            self.recorder.append_environment(ids)
            self.recorder.images.extend(images)
        elif not images:
            self.recorder.append_environment(ids[:room])
        return needed < room

    async def _await_agent(self, result: Any, what: str) -> Any:
        if not inspect.isawaitable(result):
            return result
        seconds = self.engine.settings.agent.timeout
        scope = asyncio.timeout(seconds)
        try:
            async with scope:
                return await result
        except TimeoutError as error:
            if not scope.expired():
                raise
            message = f"{what} took longer than `agent.timeout` {seconds:g} s"
            raise EpisodeFailed("timeout", message, recorder=self.recorder, stop_reason=StopReason.TIMEOUT) from error


class SingleTurnExecutor(AgentExecutorBase):
    """One prompt, one answer, one reward. Without a reward source the samples come back unscored (reward None),
    for a reward model that the learner side runs."""

    def __init__(self, reward_source: RewardSource | None = None) -> None:
        self.reward_source = reward_source

    async def run_group(self, item: PromptItem, ctx: GroupContext) -> list[Trajectory]:
        """All samples of one prompt; then one reward call for those that did not fail."""
        trajectories = await self._run_samples(item, ctx)
        if self.reward_source is None:
            return trajectories
        scored = await apply_rewards(self.reward_source, trajectories, ctx.tokenizer, item.columns)
        self._report(scored)
        return scored

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Tokenizer,
        llm_engine: Engine | SampleEngine,
        images: Sequence[Any] | None = None,
    ) -> Trajectory:
        """One answer to one prompt, unscored. A prompt over its budget is cut from the left."""
        engine = sample_engine(llm_engine)
        sampling = as_sampling(sampling_params)
        item = PromptItem(group_id=engine.group_id, prompt=prompt, label=label, images=tuple(images or ()))
        ids = hf_tokenizer.encode(prompt, add_special_tokens=False)
        read = await engine.read_images(item.images)
        allowed = prompt_budget(max_length, sampling.max_tokens)
        kept = fit_prompt(ids, allowed, "error" if read else engine.settings.overlong, engine.length((), read))
        if len(kept) < len(ids):
            warn_truncated(len(ids), allowed)
        if not kept:
            raise ValueError("the prompt has no tokens")
        tokens = max_length - engine.length(kept, read) if sampling.max_tokens is None else sampling.max_tokens
        with span("turn", turn=0):
            generation = await engine.generate(kept, sampling.with_(max_tokens=tokens), read)
        recorder = Recorder(kept, read)
        recorder.append_sampled(generation)
        if generation.finish_reason == "abort":
            raise aborted(recorder)
        return recorder.finish(item, engine.sample_index, Outcome(stop_reason=StopReason.STOP))


def aborted(recorder: Recorder) -> EpisodeFailed:
    return EpisodeFailed("engine", "the engine aborted the request", recorder=recorder, stop_reason=StopReason.ABORTED)


_truncated_prompts = 0


def warn_truncated(tokens: int, allowed: int) -> None:
    """Counts left-truncated prompts and warns at the 1st, 10th, 100th, ..."""
    global _truncated_prompts
    _truncated_prompts += 1
    digits = str(_truncated_prompts)
    if digits.strip("0") == "1":
        logger.warning(
            "%d prompt(s) cut from the left so far: this one has %d tokens and %d fit; see `overlong`",
            _truncated_prompts,
            tokens,
            allowed,
        )


@asynccontextmanager
async def _slot(slots: asyncio.Semaphore | None, engine: SampleEngine):
    """A place among the worker's running episodes; waiting for it is not the agent's time."""
    if slots is None:
        yield
        return
    engine.in_flight += 1
    try:
        await slots.acquire()
    finally:
        engine.touch(-1)
    try:
        yield
    finally:
        slots.release()
