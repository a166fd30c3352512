"""Episodes that raise, hang or break the contract are data."""

import asyncio
import logging

import pytest

from openrlhf.agents.testing import ScriptedEngine, run_episode, run_group
from openrlhf.agents.types import StopReason
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase
from support.agents_episodes import EOS, agent, failure, ids, last


class Fails(AgentInstanceBase):
    """Raises at the place that its label names."""

    def __init__(self):
        if Fails.in_init:
            raise RuntimeError("boom-init")

    in_init = False

    async def reset(self, states, **kwargs):
        self.where = states["label"]
        if self.where == "reset":
            raise ValueError("boom-3")
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        if self.where == "step":
            raise ValueError("boom-3")
        if self.where == "exit":
            raise SystemExit(3)
        if self.where == "after":
            return {"rewards": "no number", "done": True}
        return last()


@pytest.mark.parametrize(("where", "text"), [("reset", "boom-3"), ("step", "boom-3"), ("exit", "SystemExit: 3")])
def test_exceptions_are_data(where, text):  # B067
    t = run_episode(Fails, ["x"], label=where)
    assert (t.stop_reason, failure(t).border, t.reward, t.score) == (StopReason.FAILED, "agent", None, None)
    assert text in failure(t).message
    assert "test_failures.py" in failure(t).traceback


def test_exception_in_the_constructor(monkeypatch):  # B067
    monkeypatch.setattr(Fails, "in_init", True)
    t = run_episode(Fails, ["x"])
    assert "boom-init" in failure(t).message


def test_contract_violation_names_the_contract():
    t = run_episode(Fails, ["x"], label="after")
    assert '"rewards" must be one number' in failure(t).message
    no_done = run_episode(agent({"rewards": 1.0, "environment_feedback": ""}), ["x"])
    assert "['done'] missing" in failure(no_done).message
    no_feedback = run_episode(agent({"rewards": 1.0, "done": False}), ["x"])
    assert "['environment_feedback'] missing" in failure(no_feedback).message
    nan = run_episode(agent(last(float("nan"))), ["x"])
    assert 'non-finite "rewards"' in failure(nan).message


def test_failure_is_logged_once_with_its_traceback(caplog):  # B067
    with caplog.at_level(logging.WARNING):
        run_group(Fails, ["x"], label="step", n_samples=2)
    records = [r for r in caplog.records if "boom-3" in r.getMessage()]
    assert len(records) == 1
    assert "in step" in records[0].getMessage()


def test_step_that_hangs():  # B068
    class Hangs(AgentInstanceBase):
        async def step(self, states, **kwargs):
            await asyncio.sleep(1e6)
            return last()

    t = run_episode(Hangs, ["x"], "p", timeout=0.05)
    assert (t.stop_reason, failure(t).border) == (StopReason.TIMEOUT, "timeout")
    assert failure(t).message == "step() of turn 1 took longer than `agent.timeout` 0.05 s"
    assert t.token_ids == [*ids("px"), EOS]  # kept to look at
    assert t.num_trainable == 0


def test_execute_that_hangs_or_ignores_its_cancellation(monkeypatch):
    monkeypatch.setattr("openrlhf.agents.supervise.GRACE", 0.05)

    class Hangs(AgentExecutorBase):
        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
            for _ in range(10):
                try:
                    await asyncio.sleep(0.2)
                except asyncio.CancelledError:
                    if label != "stubborn":
                        raise

    for label in ("", "stubborn"):
        t = run_episode(Hangs(), ["x"], label=label, timeout=0.05)
        assert (t.stop_reason, failure(t).border) == (StopReason.TIMEOUT, "timeout")
        assert "no call to the engine" in failure(t).message


def test_a_slow_engine_is_not_the_agents_time():
    t = run_episode(agent(last()), ScriptedEngine(["x"], delay=0.3), timeout=0.1)
    assert not t.failed


async def wait_for_a_cancelled_task():
    task = asyncio.create_task(asyncio.sleep(10))
    task.cancel()
    await task


async def cancel_itself():
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (wait_for_a_cancelled_task, "CancelledError: something that the agent waited for was cancelled"),
        (cancel_itself, "the agent cancelled the task that it runs in"),
    ],
)
def test_a_cancellation_inside_the_agent_is_no_time_out(act, message):  # B067
    class Agent:
        async def reset(self, states):
            return states

        async def step(self, states):
            await act()

    (trajectory,) = run_group(Agent, ["x"])
    assert trajectory.failure is not None
    assert (trajectory.failure.border, trajectory.failure.message) == ("agent", message)
    assert trajectory.stop_reason is StopReason.FAILED


def test_n15_a_request_that_cannot_be_made_is_the_agents_failure():
    class Agent:
        async def reset(self, states):
            return states

        async def step(self, states):
            states["sampling_params"].max_tokens = 0
            return {"rewards": 0.0, "environment_feedback": ".", "done": False}

    (trajectory,) = run_group(Agent, ["x"])
    assert trajectory.failure is not None
    assert (trajectory.failure.border, "max_tokens must be at least 1" in trajectory.failure.message) == ("agent", True)
