"""Executors written for vLLM's request outputs and sampling parameters train unchanged."""

import copy

import pytest

from openrlhf.agents.agent_file import check_agent_file, load_executor
from openrlhf.agents.cli import main
from openrlhf.agents.engine import SamplingParams
from openrlhf.agents.executor import AgentExecutorBase
from openrlhf.agents.files import CodeFile, CodeFileError
from openrlhf.agents.sampling import as_sampling
from openrlhf.agents.testing import ByteTokenizer, ScriptedEngine, run_group
from support.agents_reference import SOURCE

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos_token_id


@pytest.fixture
def reference_file(tmp_path):
    path = tmp_path / "reference_agent.py"
    path.write_text(SOURCE)
    return path


def scripted_logprobs(token_ids):
    """What the scripted engine gives for these ids."""
    return [-(1 + i % 7) / 10 for i in token_ids]


def test_r08_every_sample_of_a_reference_executor_is_right(reference_file):
    """Both samples hear "no" first; then one is right, the other says "maybe" and is right after that."""
    second = iter(["yes", "maybe"])

    def script(token_ids, sampling):
        text = TOKENIZER.decode(token_ids)
        return "yes" if "turn 1" in text else next(second) if "turn 0" in text else "no"

    engine = ScriptedEngine(script, version=7)
    samples = run_group(load_executor(reference_file), engine, "ask:", label="yes", n_samples=2, max_new_tokens=64)
    assert [s.failure for s in samples] == [None, None]
    assert [TOKENIZER.decode(s.token_ids) for s in samples] == [
        "ask:no<|end|> turn 0: no. yes<|end|>",
        "ask:no<|end|> turn 0: no. maybe<|end|> turn 1: no. yes<|end|>",
    ]
    assert [(s.reward, s.extra_logs["turns"]) for s in samples] == [(1.0, 2.0), (1.0, 3.0)]
    for sample, words in zip(samples, [["no", "yes"], ["no", "maybe", "yes"]], strict=True):
        assert sample.prompt_length == 4
        ids = [[*word.encode(), EOS] for word in words]
        assert [list(sample.token_ids[t.start : t.end]) for t in sample.turns] == ids
        assert [list(sample.logprobs[t.start : t.end]) for t in sample.turns] == list(map(scripted_logprobs, ids))
        assert sample.extra_logs["characters"] == sum(len(word) + len("<|end|>") for word in words)
        inside = {i for turn in sample.turns for i in range(turn.start, turn.end)}
        assert [i in inside for i in range(len(sample.token_ids))] == [bool(t) for t in sample.trainable]
        assert {sample.versions[i] for i in inside} == {7}
        assert {sample.logprobs[i] for i in range(len(sample.token_ids)) if i not in inside} == {0.0}
    sent = [request.sampling for request in engine.requests]
    assert len({s.seed for s in sent}) == 5
    assert [(s.max_tokens, s.temperature, s.stop) for s in sent] == [(20, 1.0, ())] * 2 + [(20, 0.5, ("yes",))] * 3


@pytest.mark.parametrize("answer", ["yes", "no"])
def test_r08_the_check_of_a_reference_executor_says_ok(reference_file, capsys, answer):
    check_agent_file(reference_file)
    with pytest.raises(SystemExit) as stop:
        main(["check", str(reference_file), "--answer", answer])
    assert "ok: nothing found" in capsys.readouterr().out
    assert stop.value.code == 0


def test_r08_without_log_probs_they_are_the_engines():
    class Executor(AgentExecutorBase):
        # the reference's signature, without `images`
        async def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine
        ):
            out = await llm_engine.generate([1, 2], sampling_params)
            ids = out.outputs[0].token_ids
            assert out.outputs[0].cumulative_logprob == pytest.approx(sum(out.logprobs))
            assert (out.outputs[0].finish_reason, out.outputs[0].index) == ("stop", 0)
            return {"observation_tokens": [1, 2, *ids], "action_ranges": [(2, 2 + len(ids))], "reward": 1.0}

    (sample,) = run_group(Executor, ["ab"])
    assert sample.logprobs == [0.0, 0.0, *scripted_logprobs(sample.token_ids[2:])]


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 2), ("logprobs", 5), ("prompt_logprobs", 1), ("skip_special_tokens", True), ("detokenize", False)],
)
def test_r08_settings_with_one_value_can_be_read_and_not_changed(name, value):
    params = SamplingParams()
    setattr(params, name, getattr(params, name))
    with pytest.raises(ValueError, match=f"sampling_params: {name} is .* and cannot be set to {value}"):
        setattr(params, name, value)


def test_r08_settings_that_no_engine_gets_are_refused():
    with pytest.raises(AttributeError, match="bad_words"):
        SamplingParams().bad_words = ["x"]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"logprobs must be 1 .* got 5"):
        as_sampling({"logprobs": 5})
    assert as_sampling({"logprobs": 1, "n": 1}) == SamplingParams()


def test_r08_sampling_parameters_are_copied_and_read_as_they_were_set():
    params = SamplingParams(max_tokens=9)
    copies = [params.clone(), copy.copy(params), copy.deepcopy(params), as_sampling(params)]
    params.max_tokens, params.stop, params.top_k = 3, "x", 0  # type: ignore[assignment]
    assert copies == [SamplingParams(max_tokens=9)] * 4
    assert as_sampling(params) == SamplingParams(max_tokens=3, stop=("x",), top_k=-1)


def test_r08_an_agent_may_change_its_own_sampling_in_place():
    class Agent:
        async def reset(self, states):
            return states

        async def step(self, states):
            states["sampling_params"].max_tokens = 1
            states["sampling_params"].temperature = 0.0
            return {"rewards": 1.0, "environment_feedback": ".", "done": len(states["observation_text"]) > 9}

    engine = ScriptedEngine(["abc"])
    samples = run_group(Agent, engine, "hello", n_samples=2)
    assert [s.failed for s in samples] == [False, False]
    sent = [(r.sampling.max_tokens, r.sampling.temperature) for r in engine.requests]
    assert sent[:2] == [(4091, 1.0)] * 2
    assert set(sent[2:]) == {(1, 0.0)}


EXECUTORS = {
    "other names": "async def execute(self, text, truth, params, limit, tokenizer, engine):",
    "another order": "async def execute(self, llm_engine, hf_tokenizer, max_length, sampling_params, label, prompt):",
    "keywords": "async def execute(self, *, prompt, label, llm_engine, sampling_params, images=None, **more):",
    "no coroutine": "def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):",
}


@pytest.mark.parametrize("head", EXECUTORS.values(), ids=EXECUTORS)
def test_execute_may_name_and_order_its_arguments(head):
    source = f"""
from openrlhf.utils.agent import AgentExecutorBase
class AgentExecutor(AgentExecutorBase):
    {head}
        given = [v for v in locals().values() if isinstance(v, str)]
        return {{"observation_tokens": [1, 2], "action_ranges": [(1, 2)], "rollout_log_probs": [0.0, -0.1],
            "reward": float(sorted(given) == ["hello", "truth"])}}
"""
    executor = load_executor(CodeFile(path="/nowhere/executor.py", source=source))
    (sample,) = run_group(executor, ["x"], "hello", label="truth")
    assert (sample.failure, sample.reward) == (None, 1.0)


def test_execute_with_another_contract_is_refused_before_anything_starts():
    source = """
from openrlhf.utils.agent import AgentExecutorBase
class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label):
        pass
"""
    with pytest.raises(CodeFileError, match=r"expected execute\(self, prompt, label, .*found execute\(self, prompt"):
        check_agent_file(CodeFile(path="/nowhere/executor.py", source=source))
