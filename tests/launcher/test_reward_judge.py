"""A judge behind a real OpenAI-compatible server: scores, what cannot be read, what it costs, how many at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from openrlhf.agents.engine import EngineError
from openrlhf.agents.reward_sources import NamedSource, RewardSources
from openrlhf.agents.rewards import RewardError, RewardResult
from openrlhf.agents.testing import ScriptedEngine
from openrlhf.launcher.rewards.config import JudgeConfig
from openrlhf.launcher.rewards.judge import EngineJudge, JudgeSource, JudgeSpec, ServedJudge, read_answer
from openrlhf.launcher.rewards.rubric import read_rubric
from openrlhf.launcher.rewards.sources import reward_metrics
from support.agents_templates import TemplateTokenizer
from support.judge_server import judge_server

RUBRIC = """
system = "You grade."
user = "Question: {{ prompt }} Answer: {{ response }} Reference: {{ label }}"
[score]
by = "last_number"
range = [0, 10]
to = [0, 1]
"""


def grade(script: Any, count: int = 4, concurrency: int = 8, **flags: Any) -> tuple[RewardResult, Any, Any]:
    """One group of `count` samples: the result, the judge's counts, and the server as it was."""

    async def main() -> tuple[RewardResult, dict[str, float], Any]:
        async with judge_server(script) as server:
            config = JudgeConfig(**{"attempts": 1, "timeout": 20.0, **flags})
            spec = JudgeSpec(
                urls=(server.url,), model="judge", rubric=read_rubric(RUBRIC), config=config, api_key=server.key
            )
            source = JudgeSource(
                ServedJudge(spec, concurrency),
                spec.rubric,
                special=["<eos>", "<|im_end|>"],
                unreadable_score=config.unreadable_score,
            )
            try:
                responses = [f"a{i}<|im_end|><eos>" for i in range(count)]
                result = await source.score(["pa"] * count, ["p"] * count, ["r"] * count, responses=responses)
            finally:
                await source.close()
            return result, source.totals(), server

    return asyncio.run(main())


def by_answer(token_ids: list[int], sampling: Any) -> str:
    """10 points for the first answer, 5 for the second, nothing readable for the others."""
    text = bytes(i for i in token_ids if i < 256).decode()
    said = {"a0": "I say 10", "a1": "2 or 5"}
    return next((grade for name, grade in said.items() if f"Answer: {name}" in text), "no idea")


def test_scores_of_a_group_in_order_and_what_they_cost() -> None:
    result, totals, server = grade(by_answer, unreadable_score=-1.0)
    assert result.rewards == result.scores == [1.0, 0.5, -1.0, -1.0]
    assert result.failures == [None] * 4
    assert [log["unreadable"] for log in result.extra_logs] == [0.0, 0.0, 1.0, 1.0]
    assert totals["unreadable"] == 2
    words = [len(answer) + 1 for answer in ("I say 10", "2 or 5", "no idea", "no idea")]
    assert [log["tokens"] for log in result.extra_logs] == words
    assert totals["completion_tokens"] == sum(words)
    assert totals["prompt_tokens"] == sum(len(request.token_ids) for request in server.engine.requests)


def test_an_answer_that_cannot_be_read_fails_its_sample_alone() -> None:
    result, totals, _ = grade(by_answer)
    assert result.rewards == [1.0, 0.5, None, None]
    assert [None if f is None else (f.border, f.message) for f in result.failures] == [
        None,
        None,
        ("reward", "the judge's answer holds no score: 'no idea'"),
        ("reward", "the judge's answer holds no score: 'no idea'"),
    ]
    assert totals["unreadable"] == 2


def test_what_the_judge_is_asked() -> None:
    """The policy's special tokens are taken out, so that no answer ends its own turn; the settings arrive."""
    _, _, server = grade(["7"], count=1, max_new_tokens=11, temperature=0.25)
    assert server.asked(0) == (
        "<|im_start|>system\nYou grade.<|im_end|>\n<|im_start|>user\nQuestion: p Answer: a0 Reference: r<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    sampling = server.engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature) == (11, 0.25)


def test_a_request_that_fails_fails_its_sample_alone() -> None:
    result, totals, _ = grade(["10", EngineError("no memory left"), "5", "0"], concurrency=1)
    assert result.rewards == [1.0, None, 0.5, 0.0]
    failure = result.failures[1]
    assert failure is not None
    assert failure.border == "reward"
    assert "gave up after 1 attempts" in failure.message
    assert totals["unreadable"] == 0


def test_a_request_is_made_again_where_that_may_help() -> None:
    result, _, server = grade([EngineError("busy"), "10"], count=1, attempts=3)
    assert result.rewards == [1.0]
    assert server.engine.num_requests == 2


def test_a_judge_that_is_too_slow_fails_the_sample_by_timeout() -> None:
    async def slow(token_ids: Any, sampling: Any) -> str:
        await asyncio.sleep(60)
        return "10"

    result, _, _ = grade(slow, count=2, timeout=0.3)
    assert [f.border if f else None for f in result.failures] == ["timeout", "timeout"]
    assert "no answer within 0.3 s (--judge.timeout)" in str(result.failures[0])


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_requests_at_a_time_than_allowed(concurrency: int) -> None:
    running, most = 0, 0

    async def count(token_ids: Any, sampling: Any) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return "10"

    result, _, _ = grade(count, count=9, concurrency=concurrency)
    assert result.rewards == [1.0] * 9
    assert most == concurrency


@pytest.mark.parametrize(
    "content", [None, [], {"choices": []}, {"choices": [{"text": "10"}]}, {"choices": [{"message": None}]}, "10"]
)
def test_what_is_no_chat_completion_is_said(content: Any) -> None:
    with pytest.raises(RewardError, match="judge http://h: expected a chat completion"):
        read_answer(content, "http://h")


def test_an_answer_without_text_or_usage_is_empty() -> None:
    answer = read_answer({"choices": [{"message": {"content": None}}]}, "http://h")
    assert (answer.text, answer.prompt_tokens, answer.completion_tokens) == ("", 0, 0)


def test_a_step_tells_the_share_of_unreadable_answers_and_the_tokens() -> None:
    class Half:
        async def score(self, queries: Any, prompts: Any, labels: Any, **_: Any) -> RewardResult:
            n = len(queries)
            return RewardResult(rewards=[1.0] * n, scores=[1.0] * n, extra_logs=[{}] * n, failures=[None] * n)

    counts = {"unreadable": 2.0, "prompt_tokens": 90.0}
    sources = RewardSources(
        [NamedSource(name="judge", source=Half(), totals=lambda: counts), NamedSource(name="math", source=Half())]
    )
    for _ in range(2):
        asyncio.run(sources.score(["q"] * 4, ["p"] * 4, ["l"] * 4))
    metrics = reward_metrics(sources.totals())
    assert metrics["reward/judge/unreadable"] == 0.25
    assert metrics["reward/judge/prompt_tokens"] == 90.0
    assert metrics["reward/math/calls"] == metrics["reward/judge/calls"] == 2.0
    assert metrics["reward/judge/failures"] == 0.0
    assert "reward/judge/samples" not in metrics
    assert reward_metrics({"a/calls": 0.0, "a/samples": 0.0, "a/seconds": 0.0}) == {"reward/a/calls": 0.0}
    assert set(reward_metrics({"calls": 1.0, "samples": 2.0, "seconds": 3.0})) == {"reward/calls", "reward/seconds"}


def test_a_judge_on_engines_of_the_run() -> None:
    """Its own tokenizer writes the chat; a refused request and a question that is too long fail their samples alone."""
    tokenizer = TemplateTokenizer()
    engine = ScriptedEngine(["10", EngineError("refused"), "it is a 5"], tokenizer=tokenizer)
    config = JudgeConfig(temperature=0.5, max_new_tokens=11, max_len=400)
    source = JudgeSource(EngineJudge(engine, tokenizer, config, concurrency=1), read_rubric(RUBRIC))
    responses = ["a", "b", "c", "d" * 400]
    result = asyncio.run(source.score(responses, ["p"] * 4, ["r"] * 4, responses=responses))
    assert result.rewards == [1.0, None, 0.5, None]
    messages = [failure and failure.message for failure in result.failures]
    assert messages[1] == "judge: refused"
    assert "--judge.max_new_tokens 11 are more than --judge.max_len 400" in str(messages[3])
    first = engine.requests[0]
    assert tokenizer.decode(first.token_ids) == (
        "<|im_start|>system\nYou grade.<|im_end|>\n<|im_start|>user\nQuestion: p Answer: a Reference: r<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (first.sampling.temperature, first.sampling.max_tokens) == (0.5, 11)
    assert len({request.sampling.seed for request in engine.requests}) == 3
    assert source.totals()["prompt_tokens"] == len(first.token_ids) + len(engine.requests[2].token_ids)


def test_an_engine_that_gives_no_answer_fails_the_sample_by_timeout() -> None:
    engine = ScriptedEngine(["10"], delay=60.0)
    config = JudgeConfig(timeout=0.1, attempts=2)
    source = JudgeSource(EngineJudge(engine, TemplateTokenizer(), config, concurrency=1), read_rubric(RUBRIC))
    result = asyncio.run(source.score(["q"], ["p"], ["r"]))
    assert result.failures[0] is not None
    assert result.failures[0].border == "timeout"
    assert "no answer within 2 times --judge.timeout 0.1 s" in result.failures[0].message
