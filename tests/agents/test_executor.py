"""Executors: token bookkeeping, budgets, truncation, token-level control."""

import asyncio
from dataclasses import replace

import pytest

from openrlhf.agents.engine import EngineError, Generation, SamplingParams
from openrlhf.agents.recorder import Outcome, Recorder
from openrlhf.agents.testing import ByteTokenizer, ScriptedEngine, run_episode, run_group
from openrlhf.agents.types import PromptItem, StopReason
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor, SingleTurnExecutor
from support.agents_episodes import EOS, agent, failure, ids, last, more

# --- one turn -------------------------------------------------------------------------------------------------------


def test_single_turn_tokens():  # B025
    generation = Generation(token_ids=[9, EOS], logprobs=[-0.1, -4.60517], versions=[3, 3], finish_reason="stop")
    t = run_episode(SingleTurnExecutor(), [generation], "ab", label="x")
    assert t.token_ids == [97, 98, 9, EOS]
    assert t.trainable == [0, 0, 1, 1]
    assert t.logprobs == [0.0, 0.0, -0.1, -4.60517]
    assert t.versions == [-1, -1, 3, 3]
    assert (t.prompt_length, t.turns[0].start, t.turns[0].end) == (2, 2, 4)
    assert (t.stop_reason, t.reward, t.score, t.label) == (StopReason.STOP, None, None, "x")


def test_truncated_answer_stays_as_sampled():  # B057
    t = run_episode(SingleTurnExecutor(), [[7, 8, 9, 10]], "ab", max_new_tokens=3)
    assert t.token_ids[-3:] == [7, 8, 9]
    assert t.truncated
    assert t.stop_reason is StopReason.LENGTH
    assert t.trainable[-3:] == [1, 1, 1]


@pytest.mark.parametrize(("max_new", "kept"), [(4, "efgh"), (7, "h"), (None, "bcdefgh")])
def test_left_truncation(max_new, kept):  # O02
    engine = ScriptedEngine([[1]])
    run_episode(SingleTurnExecutor(), engine, "abcdefgh", max_length=8, max_new_tokens=max_new)
    assert engine.requests[0].token_ids == ids(kept)


@pytest.mark.parametrize("max_new", [8, 9, 100])
def test_no_room_for_the_prompt_is_refused(max_new):  # O02
    with pytest.raises(ValueError, match=r"`max_new_tokens` .* smaller than `max_length` 8"):
        run_episode(SingleTurnExecutor(), ["x"], "abc", max_length=8, max_new_tokens=max_new)


def test_overlong_prompt_policy():  # B033
    t = run_episode(SingleTurnExecutor(), ["x"], "a" * 17, max_length=20, max_new_tokens=4, overlong="error")
    assert "17 tokens and only 16 fit" in failure(t).message


def test_every_sample_is_its_own_request_with_its_own_seed():
    engine = ScriptedEngine(["x"])
    group = run_group(SingleTurnExecutor(), engine, n_samples=4)
    assert [t.sample_index for t in group] == [0, 1, 2, 3]
    assert len({r.sampling.seed for r in engine.requests}) == 4
    assert {r.group_id for r in engine.requests} == {"test"}


def test_budget_is_always_sent():
    engine = ScriptedEngine(["x"])
    run_episode(SingleTurnExecutor(), engine, "abc", max_length=10)
    assert engine.requests[0].sampling.max_tokens == 7


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [([-0.1, None, -0.2], "logprob 1 of 3"), ([float("nan")] * 3, "logprob 0"), ([-0.1], "3 tokens, 1 log-probs")],
)
def test_bad_logprobs_fail_the_sample(logprobs, message):  # B065
    generation = Generation(token_ids=[1, 2, 3], logprobs=logprobs, versions=[0] * 3, finish_reason="stop")
    t = run_episode(SingleTurnExecutor(), [generation])
    assert (failure(t).border, t.reward, t.num_trainable) == ("engine", None, 0)
    assert message in failure(t).message


def test_failed_generation_leaves_its_siblings_alone():  # B064, O04
    def script(token_ids, sampling, calls=[]):  # noqa: B006
        calls.append(1)
        return EngineError("engine 0: down") if len(calls) == 2 else "fine"

    group = run_group(SingleTurnExecutor(), script, n_samples=4)
    assert [t.failed for t in group] == [False, True, False, False]
    assert failure(group[1]).border == "engine"
    assert failure(group[1]).message == "EngineError: engine 0: down"


def test_aborted_request_is_not_trained_on():
    generation = Generation(token_ids=[1], logprobs=[-0.1], versions=[0], finish_reason="abort")
    t = run_episode(SingleTurnExecutor(), [generation])
    assert (t.stop_reason, t.failed, t.num_trainable) == (StopReason.ABORTED, True, 0)


# --- several turns --------------------------------------------------------------------------------------------------


def test_multi_turn_tokens_and_sums():
    steps = (more("+", rewards=0.25, extra_logs={"a": 1, "b": 2}), last(1.0, extra_logs={"a": 3}))
    t = run_episode(agent(*steps), ["x", "yz"], "p")
    assert t.token_ids == [*ids("px"), EOS, *ids("+yz"), EOS]
    assert t.trainable == [0, 1, 1, 0, 1, 1, 1]
    assert [(u.start, u.end, u.reward) for u in t.turns] == [(1, 3, 0.25), (4, 7, 1.0)]
    assert all((lp != 0.0) == bool(m) for lp, m in zip(t.logprobs, t.trainable, strict=True))
    assert (t.reward, t.score, t.stop_reason) == (1.25, 1.25, StopReason.DONE)
    assert t.extra_logs == {"a": 3.0, "b": 2.0}


def test_sampled_ids_are_never_tokenised_again():  # B074, B081
    generation = Generation(token_ids=[97, 300, 98], logprobs=[-0.1] * 3, versions=[0] * 3, finish_reason="stop")
    engine = ScriptedEngine([generation])
    t = run_episode(agent(more("f"), last()), engine, "p")
    assert engine.requests[1].token_ids == [*ids("p"), 97, 300, 98, *ids("f")]
    assert t.token_ids[1:4] == [97, 300, 98]


def test_scores_last_given_wins_and_zero_is_a_score():  # B055
    assert run_episode(agent(more(scores=0.5), last(-1.0, scores=0.0)), ["x"]).score == 0.0
    assert run_episode(agent(more(scores=0.5), last(2.0)), ["x"]).score == 0.5
    assert run_episode(agent(more(rewards=1.0), last(2.0)), ["x"]).score == 3.0


@pytest.mark.parametrize("reward", [1, 1.0, True, [1.0]])
def test_reward_types(reward):  # O05
    t = run_episode(agent(more(rewards=0), last(reward, scores=reward)), ["x"])
    assert (t.reward, t.score) == (1.0, 1.0)


@pytest.mark.parametrize("feedback", [None, ""])
def test_empty_feedback(feedback):  # O05
    t = run_episode(agent(more(feedback), last(feedback=feedback)), ["x"], "p")
    assert t.token_ids == [*ids("px"), EOS, *ids("x"), EOS]


def test_states_of_a_step():
    seen = []
    run_episode(agent(more("+f"), last(), on_step=seen.append), ["x", "y"], "p", label={"k": 1}, max_new_tokens=9)
    assert [s["observation_text"] for s in seen] == ["p", "px<|end|>+f"]
    assert [s["action_text"] for s in seen] == ["x<|end|>", "y<|end|>"]
    assert seen[0]["label"] == {"k": 1}
    assert seen[0]["sampling_params"] == SamplingParams(max_tokens=9)


def test_every_instance_keeps_its_own_prompt():  # B078, B061
    class Random(AgentInstanceBase):
        count = 0

        async def reset(self, states, **kwargs):
            Random.count += 1
            self.k = Random.count
            await asyncio.sleep(0.001 * (8 - self.k))
            return {"observation": f"task-{self.k} "}

        async def step(self, states, **kwargs):
            assert f"task-{self.k} " in states["observation_text"]
            return last(self.k)

    group = run_group(Random, ["x"], n_samples=7)
    texts = [ByteTokenizer().decode(t.token_ids[: t.prompt_length]) for t in group]
    assert texts == [f"task-{t.reward:.0f} " for t in group]


def test_step_sampling_params_replace_the_current_ones():
    engine = ScriptedEngine(["x"])
    run_episode(agent(more(sampling_params={"temperature": 0.1, "max_tokens": 2}), more(), last()), engine)
    temperatures = [r.sampling.temperature for r in engine.requests]
    assert temperatures == [1.0, 0.1, 0.1]
    assert len({r.sampling.seed for r in engine.requests}) == 3


def test_siblings_do_not_share_sampling_params():
    def script(token_ids, sampling):
        return "x"

    class Hot(AgentInstanceBase):
        hot = True

        def __init__(self):
            self.mine, Hot.hot = Hot.hot, False
            self.turn = 0

        async def step(self, states, **kwargs):
            self.turn += 1
            changed = {"temperature": 0.3} if self.mine else None
            return {**(last() if self.turn == 2 else more()), "sampling_params": changed}

    engine = ScriptedEngine(script)
    run_group(Hot, engine, n_samples=2)
    assert sorted(r.sampling.temperature for r in engine.requests) == [0.3, 1.0, 1.0, 1.0]


def test_turn_budgets():  # B069: --rollout.max_new_tokens caps each turn, the context caps the sample
    def sent(max_length):
        engine = ScriptedEngine([[1, 2, 3, 4]])
        run_episode(agent(more("12345"), last()), engine, "12345678", max_length=max_length, max_new_tokens=10)
        return [r.sampling.max_tokens for r in engine.requests]

    assert sent(32) == [10, 10]
    assert sent(21) == [10, 4]  # 21 - 17
    assert sent(18) == [10, 1]


@pytest.mark.parametrize("feedback", ["12345", "123456"])
def test_context_full_of_feedback(feedback):  # B059
    t = run_episode(agent(more(feedback)), [[1, 2, 3]], "abcd", max_length=12, max_new_tokens=8)
    assert t.truncated
    assert t.stop_reason is StopReason.LENGTH
    assert len(t.token_ids) == 12
    assert [(u.start, u.end) for u in t.turns] == [(4, 7)]
    assert t.trainable == [0] * 4 + [1] * 3 + [0] * 5


def test_feedback_after_the_last_step_is_kept_within_the_context():
    t = run_episode(agent(last(1.0, "123456789")), [[1, 2, 3]], "abcd", max_length=12, max_new_tokens=8)
    assert len(t.token_ids) == 12
    assert (t.stop_reason, t.truncated, t.reward) == (StopReason.DONE, False, 1.0)


def test_feedback_that_does_not_fit_drops_its_images():
    steps = (more("1", environment_images=["kept"]), more("123456", environment_images=["dropped"]))
    t = run_episode(agent(*steps), [[1]], "abcd", max_length=12, max_new_tokens=4)
    assert t.images == ("kept",)
    assert t.truncated


@pytest.mark.parametrize("answer", [[1], []])
def test_never_done_ends_at_the_turn_limit(answer):  # B068: also with empty generations
    t = run_episode(agent(more("")), [answer], max_turns=5)
    assert (t.stop_reason, t.truncated, len(t.turns)) == (StopReason.MAX_TURNS, True, 5)


def test_never_done_ends_at_the_context():  # B068
    t = run_episode(agent(more("")), [[1]], "ab", max_length=10, max_new_tokens=2, max_turns=64)
    assert (t.stop_reason, len(t.token_ids)) == (StopReason.LENGTH, 10)


@pytest.mark.parametrize("answers", [([1, 2, 3, 4], "x"), ("x", [1, 2, 3, 4])])
def test_n02_a_turn_that_is_cut_makes_a_truncated_episode(answers):
    """Whichever turn it is, and whatever the environment makes of it."""
    t = run_episode(agent(more("."), last(1.0)), list(answers), "ab", max_new_tokens=3)
    assert sorted(turn.finish_reason for turn in t.turns) == ["length", "stop"]
    assert (t.stop_reason, t.truncated, t.reward) == (StopReason.LENGTH, True, 1.0)


def test_n02_a_cut_turn_is_told_apart_from_the_turn_limit_and_from_failures():
    assert run_episode(agent(more("")), [[1, 2, 3]], max_new_tokens=2, max_turns=3).stop_reason is StopReason.LENGTH
    failed = run_episode(agent(more("."), {}), [[1, 2, 3]], max_new_tokens=2)
    assert failed.failed
    assert failed.stop_reason is StopReason.FAILED


# --- token-level control --------------------------------------------------------------------------------------------


def custom(result, *, images=True):
    """An executor whose execute samples once and returns result(token_ids, generation)."""

    class With(AgentExecutorBase):
        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
            prompt_ids = hf_tokenizer.encode(prompt, add_special_tokens=False)
            return result(prompt_ids, await llm_engine.generate(prompt_ids, sampling_params))

    class Without(AgentExecutorBase):
        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):  # type: ignore
            prompt_ids = hf_tokenizer.encode(prompt, add_special_tokens=False)
            return result(prompt_ids, await llm_engine.generate(prompt_ids, sampling_params))

    return With if images else Without


def as_dict(prompt_ids, generation, **changes):
    tokens = [*prompt_ids, *generation.token_ids]
    ranges = [(len(prompt_ids), len(tokens))]
    return {"observation_tokens": tokens, "action_ranges": ranges, "reward": [0.5], **changes}


@pytest.mark.parametrize("images", [True, False])
def test_execute_returns_a_dict(images):  # O01
    t = run_episode(custom(as_dict, images=images), ScriptedEngine(["xy"], version=4), "p", label="l")
    assert t.token_ids == [*ids("pxy"), EOS]
    assert t.trainable == [0, 1, 1, 1]
    assert t.versions == [-1, 4, 4, 4]
    assert t.logprobs[1:] == [-(1 + i % 7) / 10 for i in (*ids("xy"), EOS)]
    assert (t.reward, t.score, t.label, t.truncated) == (0.5, 0.5, "l", False)


@pytest.mark.parametrize(("said", "truncated"), [(None, True), (True, True), (False, False)])
def test_n02_a_dict_is_truncated_where_its_call_was_cut_unless_it_says_otherwise(said, truncated):
    t = run_episode(custom(lambda p, g: as_dict(p, g, truncated=said)), [[1, 2, 3]], "p", max_new_tokens=2)
    assert (t.turns[0].finish_reason, t.truncated) == ("length", truncated)
    assert t.stop_reason is (StopReason.LENGTH if truncated else StopReason.DONE)


def test_n02_a_trajectory_of_an_executor_is_truncated_where_its_call_was_cut():
    def own(prompt_ids, generation):
        recorder = Recorder(prompt_ids)
        recorder.append_sampled(generation)
        t = recorder.finish(PromptItem(group_id="g", prompt="p"), 0, Outcome(stop_reason=StopReason.DONE, reward=1.0))
        return replace(t, stop_reason=StopReason.DONE)

    assert run_episode(custom(own), [[1, 2, 3]], "p", max_new_tokens=2).stop_reason is StopReason.LENGTH
    assert run_episode(custom(own), [[1, 2, 3]], "p", max_new_tokens=4).stop_reason is StopReason.DONE


@pytest.mark.parametrize("reason", ["error", "repetition", "eos", ""])
def test_n09_a_finish_reason_that_is_none_fails_the_sample_by_name(reason):
    generation = Generation(token_ids=[9], logprobs=[-0.1], versions=[0], finish_reason=reason)
    for executor in (SingleTurnExecutor(), agent(last()), custom(as_dict)):
        t = run_episode(executor, [generation])
        assert failure(t).border == "engine"
        assert f"finish_reason {reason!r}; an answer ends with one of stop, length, abort" in failure(t).message


def test_execute_result_is_cut_to_the_context():
    t = run_episode(custom(as_dict), [[1, 2, 3, 4]], "abcd", max_length=6)
    assert t.token_ids == [*ids("abcd"), 1, 2]
    assert t.truncated
    assert [(u.start, u.end) for u in t.turns] == [(4, 6)]


def test_execute_with_tokens_that_nobody_sampled():
    def forged(prompt_ids, generation):
        return {"observation_tokens": [*prompt_ids, 1, 2], "action_ranges": [(1, 3)], "reward": 1.0}

    t = run_episode(custom(forged), ["x"], "p")
    assert "were not sampled by llm_engine" in failure(t).message
    given = run_episode(custom(lambda p, g: {**forged(p, g), "rollout_log_probs": [0.0, -1.0, -2.0]}), ["x"], "p")
    assert given.logprobs == [0.0, -1.0, -2.0]


@pytest.mark.parametrize("result", [None, "text", {"observation_tokens": [1]}, []])
def test_execute_with_a_wrong_result(result):
    t = run_episode(custom(lambda p, g: result), ["x"])
    assert "execute() returned a dict without" in failure(t).message or "execute() must return" in failure(t).message


def test_execute_without_super_init_and_with_vllm_like_params():
    class Executor(MultiTurnAgentExecutor):
        def __init__(self):
            self.agent_class = agent(last(2.0))

    assert run_episode(Executor, ["x"]).reward == 2.0


def test_max_tokens_zero_never_reaches_the_engine():  # B069
    engine = ScriptedEngine(["x"])
    t = run_episode(agent(more(sampling_params={"max_tokens": 0}), last()), engine)
    assert len(engine.requests) == 1
    assert "max_tokens must be at least 1, got 0" in failure(t).message
