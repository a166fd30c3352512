"""What an agent needs of an inference engine: tokens in, tokens and log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol


class _Fixed:
    """A setting of vllm.SamplingParams that agents may read, and set to what it is."""

    def __init__(self, value: Any, *same: Any) -> None:
        self._value = value
        self._allowed = (value, *same)

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> Any:
        return self._value

    def __set__(self, owner: Any, value: Any) -> None:
        if value not in self._allowed:
            raise ValueError(f"sampling_params: {self._name} is {self._value!r} here and cannot be set to {value!r}")


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """Everything that decides a sample; always sent in full, so a model's generation_config changes nothing.

    max_tokens None means "up to the context length". top_k -1 means all tokens. Every sample has a copy of its own,
    which its agent may change: `sampling_params.max_tokens = 64`. top_logprobs: of how many likeliest tokens per place
    the answer has log-probs. structure: an xgrammar structural tag as JSON that the answer must keep; the log-probs are
    then those among the tokens that it allows. Other settings have one value: one sample per
    request, with the log-prob of every sampled token; texts keep special tokens and stop strings.
    """

    n = _Fixed(1, None)
    logprobs = _Fixed(1, 0, None)
    prompt_logprobs = _Fixed(None)
    skip_special_tokens = _Fixed(False)
    include_stop_str_in_output = _Fixed(True)
    detokenize = _Fixed(True)

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    top_logprobs: int = 0
    structure: str = ""

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with these fields changed."""
        return replace(self, **changes)

    def clone(self) -> SamplingParams:
        """A copy, as vllm.SamplingParams makes it."""
        return replace(self)


FINISH_REASONS = ("stop", "length", "abort")
"""How a generation may end; with any other reason its sample fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The engine's answer. token_ids includes the sampled EOS; logprobs and versions have one entry per token.

    finish_reason: "stop" (EOS or stop string), "length" or "abort". prompt_token_ids: as the engine saw them
    (differs from what was sent only where images were expanded). top_logprobs: per token the likeliest ones with their
    log-probs, where `SamplingParams.top_logprobs` asked for them.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str
    prompt_token_ids: Sequence[int] | None = None
    top_logprobs: Sequence[Sequence[tuple[int, float]]] = ()


class Engine(Protocol):
    """One method: generate one sample from token ids.

    group_id keeps requests of one prompt group on one engine (prefix cache); it never changes the result.
    Raises RequestRefusedError when the request is at fault, another EngineError when no engine can serve it.
    """

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        images: Sequence[Any] | None = None,
        *,
        group_id: str = "",
    ) -> Generation: ...


class EngineError(RuntimeError):
    """Generation failed at the engine border; the message names the engine and the request."""


class RequestRefusedError(EngineError):
    """The engine refuses this very request; sent again it would be refused again."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that executors use."""

    eos_token_id: int | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...
