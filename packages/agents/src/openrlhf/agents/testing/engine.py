"""An engine that answers from a script."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.engine import Generation, SamplingParams, Tokenizer
from openrlhf.agents.testing.tokenizer import ByteTokenizer

Answer = str | Sequence[int] | Generation | Exception
Script = Sequence[Answer] | Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One call that the engine got."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    images: Sequence[Any]
    group_id: str


class ScriptedEngine:
    """Answers calls in order from `script`, starting over at its end, or by calling `script(token_ids, sampling)`.

    An answer is text (EOS is added), token ids (as they are), a `Generation` or an exception to raise. Text and ids are
    cut to max_tokens with finish_reason "length". Calls are kept in `requests`; with keep_requests False they are only
    counted in `num_requests`.
    """

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Tokenizer | None = None,
        version: int = 0,
        delay: float = 0.0,
        keep_requests: bool = True,
    ) -> None:
        self.script = script
        self.tokenizer = tokenizer or ByteTokenizer()
        self.version = version
        self.delay = delay
        self.keep_requests = keep_requests
        self.requests: list[Request] = []
        self.num_requests = 0

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        images: Sequence[Any] | None = None,
        *,
        group_id: str = "",
    ) -> Generation:
        number = self.num_requests
        self.num_requests += 1
        if self.keep_requests:
            request = Request(token_ids=list(token_ids), sampling=sampling, images=images or (), group_id=group_id)
            self.requests.append(request)
        await asyncio.sleep(self.delay)
        answer = self._answer(number, token_ids, sampling)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Generation) else self._generation(answer, sampling)

    def _answer(self, number: int, token_ids: Sequence[int], sampling: SamplingParams) -> Any:
        if callable(self.script):
            return self.script(token_ids, sampling)
        return self.script[number % len(self.script)]

    def _generation(self, answer: str | Sequence[int], sampling: SamplingParams) -> Generation:
        if isinstance(answer, str):
            ids = self.tokenizer.encode(answer, add_special_tokens=False)
            if self.tokenizer.eos_token_id is not None:
                ids.append(self.tokenizer.eos_token_id)
        else:
            ids = list(answer)
        limit = sampling.max_tokens
        cut = limit is not None and len(ids) > limit
        ids = ids[:limit] if cut else ids
        logprobs = [_logprob(i) for i in ids]
        others = range(sampling.top_logprobs - 1)
        tops = [[(i, p), *((i + 1 + k, p - 1 - k) for k in others)] for i, p in zip(ids, logprobs, strict=True)]
        return Generation(
            token_ids=ids,
            logprobs=logprobs,
            versions=[self.version] * len(ids),
            finish_reason="length" if cut else "stop",
            top_logprobs=tops if sampling.top_logprobs else (),
        )


def _logprob(token_id: int) -> float:
    return -(1 + token_id % 7) / 10
