"""The engine's answer as executors get it: a `Generation` that can also be read like vLLM's `RequestOutput`.

Executors written for vLLM find `outputs[0].token_ids`, `.text` and `.logprobs` where they look for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from openrlhf.agents.engine import Generation, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """The log-probability of one token. Only that of the sampled token is known, not its rank."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One sample. text: special tokens and stop strings kept. logprobs: per token a dict with the sampled id only."""

    token_ids: list[int]
    text: str
    logprobs: list[Mapping[int, Logprob]]
    finish_reason: str
    index: int = 0
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float:
        """The log-probability of the whole answer."""
        return sum(entry.logprob for token in self.logprobs for entry in token.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput(Generation):
    """A `Generation` (ids, log-probs as numbers, versions, finish reason) that has `outputs` too, with one entry.

    prompt_token_ids: what the engine saw, always given here.
    """

    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)
    request_id: str = ""
    finished: bool = True
    prompt: str | None = None

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The one sample of this request."""
        ids = list(self.token_ids)
        if self.tokenizer is None:
            raise ValueError("outputs holds the text, and this engine was made without a tokenizer: use token_ids")
        return [
            CompletionOutput(
                token_ids=ids,
                text=self.tokenizer.decode(ids, skip_special_tokens=False),
                logprobs=[{token: Logprob(logprob=v)} for token, v in zip(ids, self.logprobs, strict=True)],
                finish_reason=self.finish_reason,
            )
        ]


def request_output(
    generation: Generation, sent: Sequence[int], tokenizer: Tokenizer | None, request_id: str
) -> RequestOutput:
    """The engine's answer to the token ids that were `sent`."""
    seen = sent if generation.prompt_token_ids is None else generation.prompt_token_ids
    return RequestOutput(
        token_ids=list(generation.token_ids),
        logprobs=list(generation.logprobs),
        versions=list(generation.versions),
        finish_reason=generation.finish_reason,
        prompt_token_ids=list(seen),
        top_logprobs=generation.top_logprobs,
        tokenizer=tokenizer,
        request_id=request_id,
    )
