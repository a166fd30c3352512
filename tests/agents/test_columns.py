"""Columns of the prompts' rows on their way to reward functions and agents."""

import pytest

from openrlhf.agents.chat.executor import OpenAIServerExecutor
from openrlhf.agents.executor import AgentExecutorBase, AgentInstanceBase, SingleTurnExecutor
from openrlhf.agents.files import CodeFileError
from openrlhf.agents.reward_file import check_reward_file
from openrlhf.agents.rewards import normalize_rewards
from openrlhf.agents.testing import run_group
from support.agents_rewards import code_of, with_pool

COLUMNS = {"level": 3, "tests": [{"input": "1", "output": "2"}], "q": "taken"}


def rewards_of(source, columns):
    async def call(pool):
        return await pool.score(["qa", "qb"], ["q", "q"], ["1", "2"], responses=["a", "b"], columns=columns)

    return with_pool(code_of(source), call)


@pytest.mark.parametrize(
    ("signature", "given"),
    [
        ("queries, prompts, labels", []),
        ("queries, prompts, labels, level", ["level"]),
        ("queries, prompts, labels, tests=None, other=7", ["other", "tests"]),
        ("queries, prompts, labels, *, level, responses", ["level", "responses"]),
        ("q, prompts, labels, **kwargs", ["level", "responses", "tests"]),
        ("queries, prompts, labels, **kwargs", ["level", "q", "responses", "tests"]),
        ("queries, prompts, labels, level, **kwargs", ["level", "q", "responses", "tests"]),
    ],
)
def test_a_function_gets_the_columns_that_it_names(signature, given):
    lists = set(signature.split(", ")[:1])
    source = f"""
        def reward_func({signature}):
            seen = dict(locals())
            seen |= seen.pop("kwargs", {{}})
            names = sorted(set(seen) - {{"queries", "prompts", "labels"}} - {lists!r})
            assert names == {given!r}, names
            assert seen.get("level", [3, 3]) == [3, 3]
            assert seen.get("responses", ["a", "b"]) == ["a", "b"]
            return [1.0, 2.0]
    """
    columns = {name: [value] * 2 for name, value in COLUMNS.items()}
    assert rewards_of(source, columns).rewards == [1.0, 2.0]


def test_an_argument_that_is_no_column_is_found_before_anything_starts():
    code = code_of("def reward_func(queries, prompts, labels, level, tests, responses, more=1): return [1.0]")
    assert check_reward_file(code, columns=("tests", "level"), run=False) == code
    assert check_reward_file(code, columns=None, run=False) == code
    with pytest.raises(CodeFileError, match=r"no column 'tests', those that travel are level \(`extra_keys`\)"):
        check_reward_file(code, columns=("level",), run=False)
    with pytest.raises(CodeFileError, match=r"no column 'level', none travels \(`extra_keys`\)"):
        check_reward_file(code, run=False)


def test_objects_with_call_are_checked_where_the_file_is_imported():
    code = code_of("class S:\n def __call__(self, q, p, l, level): return [1.0] * len(q)\nreward_func = S()")
    check_reward_file(code, columns=("level",))
    with pytest.raises(CodeFileError, match="there is no column 'level'"):
        check_reward_file(code)


class Source:
    """Keeps what it was asked."""

    def __init__(self):
        self.calls = []

    async def score(self, queries, prompts, labels, **further):
        self.calls.append(further)
        return normalize_rewards([1.0] * len(queries), len(queries))


def test_a_source_gets_one_value_per_query_and_nothing_where_there_are_none():
    source = Source()
    run_group(SingleTurnExecutor(source), ["a", "b"], n_samples=2, columns={"level": 3})
    run_group(SingleTurnExecutor(source), ["a"], n_samples=1)
    assert [call.get("columns") for call in source.calls] == [{"level": [3, 3]}, None]
    assert "columns" not in source.calls[1]


class Reads(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        states["columns"]["tests"].append("mine")
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        done = len(states["columns"]["tests"]) == 2
        return {"rewards": states["columns"]["level"], "environment_feedback": "", "done": done}


class Executes(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        ids = hf_tokenizer.encode(prompt)
        answer = (await llm_engine.generate(ids, sampling_params)).outputs[0]
        tokens = ids + list(answer.token_ids)
        reward = llm_engine.columns["level"]
        return {"observation_tokens": tokens, "action_ranges": [(len(ids), len(tokens))], "reward": reward}


class Chats(OpenAIServerExecutor):
    async def run_agent(self, prompt, label, session_id, columns=None):
        assert columns is not None
        import httpx

        async with httpx.AsyncClient(headers={"authorization": f"Bearer {self.api_key}"}) as client:
            body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
            answer = await client.post(f"{self.session_url(session_id)}/chat/completions", json=body)
            answer.raise_for_status()
        return columns["level"]


@pytest.mark.parametrize("agent", [Reads, Executes, Chats])
def test_agents_get_the_columns_each_sample_its_own(agent):
    columns = {"level": 3, "tests": ["given"]}
    samples = run_group(agent, ["x"], n_samples=3, columns=columns)
    assert [(s.reward, s.failure) for s in samples] == [(3.0, None)] * 3
    assert columns == {"level": 3, "tests": ["given"]}
