"""What a worker hands to an executor: the group's context, and the engine as one sample sees it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from openrlhf.agents.config import AgentConfig
from openrlhf.agents.engine import Engine, EngineError, Generation, SamplingParams, Tokenizer
from openrlhf.agents.failures import warn_once
from openrlhf.agents.images import ImageReader, TextOnly, check_count, expand, extra_tokens
from openrlhf.agents.request_output import RequestOutput, request_output
from openrlhf.agents.sampling import as_sampling, sample_seed
from openrlhf.agents.spans import span
from openrlhf.agents.types import PromptItem, Trajectory

if TYPE_CHECKING:
    from openrlhf.agents.chat.tools import AnswerParser

logger = logging.getLogger(__name__)

Seeds = Callable[[int, int], int]


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """What is the same for every episode of a run: one object, from the flags to the sample.

    sampling: the template of every call, without seed and max_tokens. n_samples: per prompt. max_length: tokens of the
    whole sample. max_new_tokens: cap of each generation call, None for "up to max_length". seed: of the run. overlong:
    what happens to a prompt or observation over its budget: "truncate" (from the left), "drop" or "error" (the sample
    fails and says so). guided: whether the engine keeps `SamplingParams.structure`.
    """

    max_length: int = 2048
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n_samples: int = 1
    max_new_tokens: int | None = None
    seed: int = 42
    overlong: str = "truncate"
    guided: bool = False
    agent: AgentConfig = field(default_factory=AgentConfig)

    def __post_init__(self) -> None:
        prompt_budget(self.max_length, self.max_new_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupContext:
    """Everything an executor needs to roll one prompt out.

    seeds: (sample_index, turn) -> 63-bit seed. slots: the worker's concurrency limit, one slot per running episode.
    image_reader: of a vision-language model. parser: of answers on the policy's endpoints, instead of our own.
    """

    engine: Engine
    tokenizer: Tokenizer
    settings: EpisodeSettings
    seeds: Seeds
    slots: asyncio.Semaphore | None = None
    image_reader: ImageReader = field(default_factory=TextOnly)
    parser: AnswerParser | None = None


class GroupExecutor(Protocol):
    """Rolls one prompt out into n samples; never raises for a sample that fails."""

    async def run_group(self, item: PromptItem, ctx: GroupContext) -> list[Trajectory]: ...


class SampleEngine:
    """The engine as one sample sees it: adds group and seed to every call and remembers what was sampled.

    This is the `llm_engine` of `AgentExecutorBase.execute`: `await llm_engine.generate(token_ids, sampling_params)`.
    columns: of the prompt's row (`PromptItem.columns`), a copy of this sample's own.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        group_id: str = "",
        sample_index: int = 0,
        seeds: Seeds | None = None,
        settings: EpisodeSettings | None = None,
        image_reader: ImageReader | None = None,
        tokenizer: Tokenizer | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        self.parser: AnswerParser | None = None  # of answers on the policy's endpoints, instead of our own
        self.group_id = group_id
        self.sample_index = sample_index
        self.settings = settings or EpisodeSettings()
        self.calls: list[Generation] = []
        self.in_flight = 0
        self.last_activity = time.monotonic()
        self._engine = engine
        self._seeds = seeds
        self._started_calls = 0
        self._tokenizer = tokenizer
        self.columns = deepcopy(dict(columns or {}))
        self.image_reader: ImageReader = image_reader or TextOnly()

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Any,
        images: Sequence[Any] | None = None,
        *,
        group_id: str = "",
    ) -> RequestOutput:
        """One sample of the policy. sampling_params: our dataclass, a dict or vllm.SamplingParams.

        images: one for each placeholder among the tokens, in order.
        Raises ValueError for other numbers of images, EngineError where the engine expands them in another way.
        """
        sampling = self._prepare(as_sampling(sampling_params))
        images = await self.read_images(images or ())
        check_count(token_ids, images, self.image_reader)
        self.in_flight += 1
        try:
            with span("engine request", tokens=len(token_ids)):
                generation = await self._engine.generate(
                    token_ids, sampling, images or None, group_id=group_id or self.group_id
                )
        finally:
            self.touch(-1)
        if images and generation.prompt_token_ids is not None:
            self._check_expansion(token_ids, images, generation.prompt_token_ids)
        self.calls.append(generation)
        name = f"{self.group_id}-s{self.sample_index}-c{len(self.calls)}"
        return request_output(generation, token_ids, self._tokenizer, name)

    async def read_images(self, images: Sequence[Any]) -> list[Any]:
        """The images as the engine and the trainer take them. Reading (a file, a URL) does not hold the loop up."""
        return [await asyncio.to_thread(self.image_reader.read, i) for i in images] if images else []

    def length(self, token_ids: Sequence[int], images: Sequence[Any]) -> int:
        """Tokens of the model's input: those given, with the images in place of their placeholders."""
        return len(token_ids) + extra_tokens(images, self.image_reader)

    def _check_expansion(self, token_ids: Sequence[int], images: Sequence[Any], seen: Sequence[int]) -> None:
        if isinstance(self.image_reader, TextOnly):
            return
        expected = expand(token_ids, images, self.image_reader)
        if list(seen) != expected:
            raise EngineError(
                f"the engine put {len(seen)} tokens where the model's processor puts {len(expected)} for the same "
                f"prompt with {len(images)} images: the trainer would train on another input than was sampled from"
            )

    def touch(self, calls: int = 0) -> None:
        """From now on the agent's own time counts again; `calls` is added to the calls in flight."""
        self.in_flight += calls
        self.last_activity = time.monotonic()

    def _prepare(self, sampling: SamplingParams) -> SamplingParams:
        caps = [n for n in (sampling.max_tokens, self.settings.max_new_tokens) if n is not None]
        tokens = min(caps, default=None)
        if tokens is not None and tokens < 1:
            raise ValueError(f"sampling_params: max_tokens must be at least 1, got {tokens!r}")
        turn = self._started_calls
        self._started_calls += 1
        return sampling.with_(max_tokens=tokens, seed=self._seed(sampling.seed, turn))

    def _seed(self, given: int | None, turn: int) -> int | None:
        """The run's own seed of this call. One that the agent gives is mixed with that of the sample: the same for the
        same seed within an episode, but never the same for all samples of a group."""
        if self._seeds is None:
            return given
        if given is None:
            return self._seeds(self.sample_index, turn)
        warn_once(
            logger,
            "seed of an agent",
            "an agent asks for seed %d: it is mixed with the seed of each sample, or all samples of a group were equal",
            given,
        )
        return sample_seed(given, False, 0, 0, self._seeds(self.sample_index, 0), 0)


def sample_engine(engine: Engine | SampleEngine) -> SampleEngine:
    """`engine` itself if it already belongs to a sample, else wrapped with default settings."""
    return engine if isinstance(engine, SampleEngine) else SampleEngine(engine)


def room_for_prompt(max_length: int, max_new_tokens: int | None) -> int:
    """Tokens that `max_length` leaves beside an answer; less than one is no room for any prompt."""
    return max_length - (1 if max_new_tokens is None else max_new_tokens)


def prompt_budget(max_length: int, max_new_tokens: int | None) -> int:
    """Tokens a prompt may have so that a whole answer still fits; at least one token is left for the answer."""
    allowed = room_for_prompt(max_length, max_new_tokens)
    if allowed < 1:
        raise ValueError(
            f"`max_new_tokens` {max_new_tokens!r} must be smaller than `max_length` {max_length!r}: "
            "nothing would be left for the prompt"
        )
    return allowed


def fit_prompt(token_ids: Sequence[int], allowed: int, overlong: str, image_tokens: int = 0) -> list[int]:
    """The last `allowed` ids of a prompt; with overlong "drop" or "error" a longer prompt is a ValueError.

    image_tokens: what its images take beside the ids.
    """
    assert allowed >= 1
    total = len(token_ids) + image_tokens
    if total <= allowed:
        return list(token_ids)
    if overlong != "truncate":
        images = f" ({image_tokens} of them for images)" if image_tokens else ""
        raise ValueError(
            f"the prompt has {total} tokens{images} and only {allowed} fit; raise `max_length`, lower "
            "`max_new_tokens` or use `overlong` truncate (texts) or smaller images"
        )
    return list(token_ids[len(token_ids) - allowed :])
