"""Images among tokens: one placeholder each in what executors record, their real tokens in what is trained on."""

from __future__ import annotations

from typing import Any

import pytest

from openrlhf.agents.engine import EngineError, Generation
from openrlhf.agents.executor import AgentExecutorBase, AgentInstanceBase, SingleTurnExecutor
from openrlhf.agents.images import check_count, expand, expand_trajectory
from openrlhf.agents.rewards import RewardResult
from openrlhf.agents.testing import ScriptedEngine, run_episode, run_group
from openrlhf.agents.types import StopReason, Trajectory, Turn

PLACE = ord("#")


class Reader:
    """An image b"abc" takes the three tokens 1000, 1001, 1002 in the place of '#'."""

    placeholder = PLACE

    def read(self, image: Any) -> bytes:
        if image == "broken":
            raise ValueError("image 'broken' can't be decoded")
        return image if isinstance(image, bytes) else str(image).encode()

    def tokens(self, image: bytes) -> list[int]:
        return [1000 + i for i in range(len(image))]


def sample(tokens: list[int], images: list[bytes], answer: int) -> Trajectory:
    """The last `answer` tokens were sampled."""
    n = len(tokens)
    return Trajectory(
        token_ids=tokens,
        trainable=[0] * (n - answer) + [1] * answer,
        logprobs=[0.0] * (n - answer) + [-0.5] * answer,
        versions=[-1] * (n - answer) + [2] * answer,
        prompt_length=n - answer,
        turns=(Turn(start=n - answer, end=n, finish_reason="stop"),),
        stop_reason=StopReason.STOP,
        group_id="g",
        sample_index=0,
        images=tuple(images),
    )


def test_expand_puts_each_image_in_its_place():
    assert expand([1, PLACE, 2, PLACE], [b"ab", b"c"], Reader()) == [1, 1000, 1001, 2, 1000]


def test_expanded_trajectory_keeps_everything_aligned():
    t = expand_trajectory(sample([1, PLACE, 2, 7, 8], [b"abc"], 2), Reader(), 100)
    assert t.token_ids == [1, 1000, 1001, 1002, 2, 7, 8]
    assert t.trainable == [0, 0, 0, 0, 0, 1, 1]
    assert t.logprobs == [0.0, 0.0, 0.0, 0.0, 0.0, -0.5, -0.5]
    assert t.versions == [-1, -1, -1, -1, -1, 2, 2]
    assert t.prompt_length == 5
    assert [(turn.start, turn.end) for turn in t.turns] == [(5, 7)]


@pytest.mark.parametrize(
    ("limit", "tokens", "images"),
    [(9, [1, 1000, 1001, 7, 8, 2, 1000, 1001, 9], 2), (7, [1, 1000, 1001, 7, 8, 2], 1), (2, [1], 0)],
)
def test_overflow_cuts_in_front_of_an_image_that_does_not_fit(limit: int, tokens: list[int], images: int):
    whole = sample([1, PLACE, 7, 8, 2, PLACE, 9], [b"ab", b"cd"], 1)
    t = expand_trajectory(whole, Reader(), limit)
    assert t.token_ids == tokens
    assert len(t.images) == images
    assert len(t.trainable) == len(tokens)
    assert all(turn.end <= len(tokens) for turn in t.turns)


@pytest.mark.parametrize(("tokens", "images"), [([1, 2], [b"a"]), ([PLACE, PLACE], [b"a"]), ([PLACE], [])])
def test_wrong_counts_are_an_error(tokens: list[int], images: list[bytes]):
    with pytest.raises(ValueError, match=rf"{tokens.count(PLACE)} image placeholders .* but {len(images)} images"):
        check_count(tokens, images, Reader())


def test_single_turn_sample_is_expanded_and_the_engine_gets_placeholders():
    engine = ScriptedEngine(["no"])
    t = run_episode(SingleTurnExecutor(), engine, "a#b", images=["xyz"], image_reader=Reader())
    assert not t.failed
    assert list(engine.requests[0].token_ids) == [*b"a#b"]
    assert engine.requests[0].images == [b"xyz"]
    assert list(t.token_ids[:5]) == [ord("a"), 1000, 1001, 1002, ord("b")]
    assert t.prompt_length == 5
    assert t.images == (b"xyz",)


class Seen:
    """A reward source that notes what it is shown."""

    async def score(self, queries, prompts, labels, *, responses):
        self.shown = queries, prompts, responses
        n = len(queries)
        return RewardResult(rewards=[1.0] * n, scores=[1.0] * n, extra_logs=[{}] * n, failures=[None] * n)


def test_rewards_see_the_text_with_its_placeholders():
    source = Seen()
    t = run_episode(SingleTurnExecutor(source), ["no"], "a#b", images=["xyz"], image_reader=Reader())  # type: ignore[arg-type]
    assert t.reward == 1.0
    (query,), (prompt,), (response,) = source.shown
    assert query == prompt + response
    assert prompt == "a#b"
    assert response.startswith("no")


def test_image_tokens_count_for_the_budget():
    options: dict[str, Any] = {"images": ["x" * 8], "image_reader": Reader(), "max_length": 12}
    t = run_episode(SingleTurnExecutor(), ["yes"], "a#b", max_new_tokens=3, **options)
    assert "the prompt has 10 tokens (7 of them for images) and only 9 fit" in t.failure.message  # type: ignore[union-attr]
    t = run_episode(SingleTurnExecutor(), ["yes yes"], "a#b", max_new_tokens=None, **options)
    assert len(t.token_ids) == 12


def test_a_broken_image_fails_the_sample_and_says_which():
    t = run_episode(SingleTurnExecutor(), ["yes"], "#", images=["broken"], image_reader=Reader())
    assert t.failure is not None
    assert "image 'broken' can't be decoded" in t.failure.message


def test_an_engine_that_expands_otherwise_is_caught():
    answer = Generation(token_ids=[7], logprobs=[-1.0], versions=[0], finish_reason="stop", prompt_token_ids=[1000])
    t = run_episode(SingleTurnExecutor(), [answer], "#", images=["xy"], image_reader=Reader())
    assert t.failure is not None
    assert t.failure.border == "engine"
    assert EngineError.__name__ in t.failure.message
    assert "put 1 tokens where the model's processor puts 2" in t.failure.message


class Shows(AgentInstanceBase):
    """Shows a second image after the first answer."""

    feedback = "<#>"
    shown: Any = ("cd",)

    async def reset(self, states, **kwargs):
        self.turn = 0
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turn += 1
        done = self.turn == 2
        feedback, shown = ("", ()) if done else (self.feedback, self.shown)
        return {"rewards": 1.0, "environment_feedback": feedback, "environment_images": shown, "done": done}


class ShowsTooMany(Shows):
    shown = ("cd", "ef")


def test_environment_images_take_their_places():
    engine = ScriptedEngine([[65], [66]])
    t = run_episode(Shows, engine, "#", images=["ab"], image_reader=Reader())
    assert not t.failed
    assert [list(r.token_ids) for r in engine.requests] == [[PLACE], [PLACE, 65, *b"<#>"]]
    assert [r.images for r in engine.requests] == [[b"ab"], [b"ab", b"cd"]]
    assert list(t.token_ids) == [1000, 1001, 65, ord("<"), 1000, 1001, ord(">"), 66]
    assert list(t.trainable) == [0, 0, 1, 0, 0, 0, 0, 1]
    assert t.images == (b"ab", b"cd")
    assert [(turn.start, turn.end) for turn in t.turns] == [(2, 3), (7, 8)]


def test_feedback_with_an_image_that_does_not_fit_is_dropped_whole():
    t = run_episode(Shows, ScriptedEngine([[65]]), "#", images=["ab"], image_reader=Reader(), max_length=6)
    assert list(t.token_ids) == [1000, 1001, 65]
    assert t.images == (b"ab",)
    assert t.stop_reason is StopReason.LENGTH


def test_feedback_with_other_places_than_images_fails_the_sample():
    t = run_episode(ShowsTooMany, ScriptedEngine([[65]]), "#", images=["ab"], image_reader=Reader())
    assert t.failure is not None
    assert "1 image placeholders (token 35) but 2 images" in t.failure.message


class Custom(AgentExecutorBase):
    """Returns the reference's dict, with placeholders."""

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        ids = hf_tokenizer.encode(prompt, add_special_tokens=False)
        generation = await llm_engine.generate(ids, sampling_params, images)
        tokens = [*ids, *generation.token_ids]
        ranges = [(len(ids), len(tokens))]
        return {"observation_tokens": tokens, "action_ranges": ranges, "reward": 1.0, "images": images}


def test_custom_executors_are_expanded_too():
    samples = run_group(Custom, ScriptedEngine([[65]]), "a#", images=["xyz"], image_reader=Reader(), n_samples=2)
    assert [list(t.token_ids) for t in samples] == [[ord("a"), 1000, 1001, 1002, 65]] * 2
    assert [t.images for t in samples] == [(b"xyz",)] * 2


def test_n02_a_sample_that_is_cut_to_the_context_ended_because_of_length():
    whole = sample([PLACE, 65, 66], [b"ab"], 2)
    assert expand_trajectory(whole, Reader(), 4).stop_reason is StopReason.STOP
    assert expand_trajectory(whole, Reader(), 3).stop_reason is StopReason.LENGTH
