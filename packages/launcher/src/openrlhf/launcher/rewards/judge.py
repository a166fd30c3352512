"""A model as a reward source: it is asked about every sample by a rubric, and its answer is read as a score.

The model stands behind a server with OpenAI's chat completions, or on engines of the run. An answer that cannot be read
is data: counted, and a failed sample or a score of its own as the settings say. What its tokens cost is counted too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from openrlhf.agents.engine import Engine, EngineError, SamplingParams
from openrlhf.agents.rewards import RewardError, RewardResult, RewardTimeoutError
from openrlhf.agents.types import Failure
from openrlhf.launcher.json_servers import JsonServers, RetryPolicy
from openrlhf.launcher.openai_servers import server_root
from openrlhf.launcher.redaction import redact
from openrlhf.launcher.rewards.config import JudgeConfig
from openrlhf.launcher.rewards.rubric import Rubric, RubricError

SHOWN = 200
"""Characters of an answer that a message shows."""


@dataclass(frozen=True, kw_only=True)
class JudgeSpec:
    """A judge, ready to be shipped. urls: its servers, with or without /v1 at their end. model: its name there.

    Without URLs it is on engines of the run, and model is where its tokenizer is.
    """

    urls: tuple[str, ...]
    model: str
    rubric: Rubric
    config: JudgeConfig
    api_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model said, and the tokens that it read and wrote."""

    text: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, kw_only=True)
class _Graded:
    """One sample's score, or why it has none."""

    score: float | None
    logs: Mapping[str, float]
    failure: Failure | None = None


class Judge(Protocol):
    """A model that can be asked."""

    async def ask(self, messages: Sequence[Mapping[str, str]]) -> Answer:
        """Its answer to a chat. Raises RewardError."""
        ...

    async def close(self) -> None: ...


class ServedJudge:
    """A judge behind servers. concurrency: requests under way at the same time."""

    def __init__(self, spec: JudgeSpec, concurrency: int) -> None:
        self._spec = spec
        self._servers = JsonServers(
            [f"{server_root(url)}/v1/chat/completions" for url in spec.urls],
            kind="judge",
            flag="--reward.remote_url",
            timeout_flag="--judge.timeout",
            errors=(RewardError, RewardTimeoutError),
            api_key=spec.api_key,
            retry=RetryPolicy(timeout=spec.config.timeout, attempts=spec.config.attempts),
            max_concurrency=concurrency,
        )

    async def ask(self, messages: Sequence[Mapping[str, str]]) -> Answer:
        config = self._spec.config
        body = {
            "model": self._spec.model,
            "messages": messages,
            "temperature": config.temperature,
            "max_tokens": config.max_new_tokens,
        }
        content, url = await self._servers.ask(json.dumps(body).encode())
        return read_answer(content, redact(url))

    async def close(self) -> None:
        await self._servers.close()


class EngineJudge:
    """A judge on engines of the run. tokenizer: of its model, with a chat template. concurrency: as of the others."""

    def __init__(self, engine: Engine, tokenizer: Any, config: JudgeConfig, concurrency: int) -> None:
        self._engine, self._tokenizer, self._config = engine, tokenizer, config
        self._slots = asyncio.Semaphore(concurrency)
        self._numbers = itertools.count()

    async def ask(self, messages: Sequence[Mapping[str, str]]) -> Answer:
        config = self._config
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(ids) + config.max_new_tokens > config.max_len:
            limits = f"--judge.max_new_tokens {config.max_new_tokens} are more than --judge.max_len {config.max_len}"
            raise RewardError(f"judge: the question's {len(ids)} tokens and {limits}")
        sampling = SamplingParams(
            temperature=config.temperature, max_tokens=config.max_new_tokens, seed=zlib.crc32(text.encode())
        )
        async with self._slots:
            try:
                async with asyncio.timeout(config.timeout * config.attempts):
                    group = f"judge-{next(self._numbers)}"
                    answer = await self._engine.generate(ids, sampling, group_id=group)
            except TimeoutError:
                waited = f"{config.attempts} times --judge.timeout {config.timeout:g} s"
                raise RewardTimeoutError(f"judge: no answer within {waited}") from None
            except EngineError as error:
                raise RewardError(f"judge: {error}") from error
        said = self._tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)
        return Answer(text=said, prompt_tokens=len(ids), completion_tokens=len(answer.token_ids))

    async def close(self) -> None: ...


class JudgeSource:
    """A `RewardSource` that asks a judge once per sample; a request that fails fails its sample alone.

    special: texts of the policy's special tokens, which are taken out of what the judge reads: an answer must not be
    able to end its own turn there. unreadable_score: as in `JudgeConfig`.
    """

    def __init__(
        self, judge: Judge, rubric: Rubric, *, special: Sequence[str] = (), unreadable_score: float | None = None
    ) -> None:
        self._judge, self._rubric, self._unreadable_score = judge, rubric, unreadable_score
        self._special = sorted(special, key=len, reverse=True)
        self._totals: Counter[str] = Counter()

    async def score(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        *,
        responses: Sequence[str] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> RewardResult:
        """Scores of one group. extra_logs: unreadable (0 or 1) and the tokens of each answer."""
        texts = queries if responses is None else responses
        rows = [{name: values[i] for name, values in (columns or {}).items()} for i in range(len(queries))]
        samples = zip(prompts, texts, labels, rows, strict=True)
        graded = await asyncio.gather(*(self._grade(*sample) for sample in samples))
        scores = [one.score for one in graded]
        return RewardResult(
            rewards=scores,
            scores=scores,
            extra_logs=[one.logs for one in graded],
            failures=[one.failure for one in graded],
        )

    def totals(self) -> dict[str, float]:
        """Counts since the start: prompt_tokens, completion_tokens, unreadable answers."""
        return {name: float(self._totals[name]) for name in ("prompt_tokens", "completion_tokens", "unreadable")}

    async def close(self) -> None:
        """Closes the connections."""
        await self._judge.close()

    async def _grade(self, prompt: str, response: str, label: Any, columns: Mapping[str, Any]) -> _Graded:
        try:
            messages = self._rubric.messages(
                prompt=self._plain(prompt), response=self._plain(response), label=label, columns=columns
            )
            answer = await self._judge.ask(messages)
        except RewardTimeoutError as error:
            return _Graded(score=None, logs={}, failure=Failure(border="timeout", message=str(error)))
        except (RewardError, RubricError) as error:
            return _Graded(score=None, logs={}, failure=Failure(border="reward", message=str(error)))
        score = self._rubric.score.read(answer.text)
        self._totals.update(
            prompt_tokens=answer.prompt_tokens, completion_tokens=answer.completion_tokens, unreadable=score is None
        )
        logs = {"unreadable": float(score is None), "tokens": float(answer.completion_tokens)}
        if score is None and self._unreadable_score is None:
            message = f"the judge's answer holds no score: {answer.text[-SHOWN:]!r}"
            return _Graded(score=None, logs=logs, failure=Failure(border="reward", message=message))
        return _Graded(score=self._unreadable_score if score is None else score, logs=logs)

    def _plain(self, text: str) -> str:
        for token in self._special:
            text = text.replace(token, "")
        return text


def read_answer(content: Any, name: str) -> Answer:
    """The answer in a chat completion. Raises RewardError for anything else, which names the server."""
    try:
        text = content["choices"][0]["message"]["content"]
        usage = content.get("usage") or {}
        tokens = [int(usage.get(kind) or 0) for kind in ("prompt_tokens", "completion_tokens")]
    except (LookupError, TypeError, ValueError, AttributeError):
        shown = repr(content)[:SHOWN]
        raise RewardError(f"judge {name}: expected a chat completion as OpenAI's, got {shown}") from None
    return Answer(text=text or "", prompt_tokens=tokens[0], completion_tokens=tokens[1])
