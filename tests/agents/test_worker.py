"""The worker around an executor: seeds, evaluation, concurrency, blocked loops, a thousand episodes."""

import asyncio
import subprocess
import sys
import textwrap
import time

import pytest

from openrlhf.agents.config import AgentConfig, RewardFunctionConfig
from openrlhf.agents.context import EpisodeSettings
from openrlhf.agents.executor import MultiTurnAgentExecutor, SingleTurnExecutor
from openrlhf.agents.recorder import failed_group
from openrlhf.agents.sampling import sample_seed
from openrlhf.agents.testing import ByteTokenizer, ScriptedEngine
from openrlhf.agents.types import Failure, PromptItem, StopReason
from openrlhf.agents.watchdog import BLOCKED_EXIT_CODE, LoopWatchdog
from openrlhf.agents.worker import AgentWorker
from support.agents_blocking import BLOCKING


def make_worker(executor, engine, on_blocked=None, **agent):
    settings = EpisodeSettings(n_samples=2, max_length=4096, seed=5, agent=AgentConfig(**agent))
    return AgentWorker(executor, engine, ByteTokenizer(), settings, on_blocked=on_blocked)


def test_seeds_and_evaluation():  # B056
    engine = ScriptedEngine(["x"])
    worker = make_worker(SingleTurnExecutor(), engine)
    item = PromptItem(group_id="g", prompt="p", position=7, episode=1)
    asyncio.run(worker.run_group(item))
    asyncio.run(worker.run_group(item, evaluation=True, n_samples=4, temperature=0.0))
    assert [r.sampling.seed for r in engine.requests[:2]] == [sample_seed(5, False, 1, 7, s, 0) for s in (0, 1)]
    assert [r.sampling.seed for r in engine.requests[2:]] == [sample_seed(5, True, 1, 7, s, 0) for s in range(4)]
    assert [r.sampling.temperature for r in engine.requests] == [1.0] * 2 + [0.0] * 4


def test_closing_ends_the_groups_under_way(caplog):
    async def script(token_ids, sampling):
        await asyncio.sleep(60)

    worker = make_worker(SingleTurnExecutor(), ScriptedEngine(script))

    async def main():
        group = asyncio.ensure_future(worker.run_group(PromptItem(group_id="g", prompt="p")))
        await asyncio.sleep(0.01)
        await worker.close()
        with pytest.raises(asyncio.CancelledError):
            await group

    asyncio.run(main())
    assert caplog.text == ""


def test_concurrency_limit():
    running, most = 0, 0

    async def script(token_ids, sampling):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return "x"

    worker = make_worker(SingleTurnExecutor(), ScriptedEngine(script), max_concurrency=3)

    async def main():
        items = [PromptItem(group_id=str(i), prompt="p") for i in range(6)]
        return await asyncio.gather(*(worker.run_group(item) for item in items))

    assert not any(t.failed for group in asyncio.run(main()) for t in group)
    assert most == 3


def test_waiting_for_a_place_is_not_the_agents_time():
    worker = make_worker(SingleTurnExecutor(), ScriptedEngine(["x"], delay=0.3), max_concurrency=1, timeout=0.1)
    group = asyncio.run(worker.run_group(PromptItem(group_id="g", prompt="p"), n_samples=4))
    assert not any(t.failed for t in group)


def test_limits_are_checked():
    with pytest.raises(ValueError, match=r"`agent.max_turns` must be at least 1, got 0"):
        AgentConfig(max_turns=0)
    with pytest.raises(ValueError, match=r"`reward.timeout` must be more than 0 seconds, got 0"):
        RewardFunctionConfig(timeout=0)


class Many:
    """Eight turns; three of a thousand misbehave."""

    def __init__(self):
        self.turn = 0

    async def reset(self, states):
        self.kind = states["observation"]
        return {"observation": self.kind}

    async def step(self, states):
        self.turn += 1
        if self.kind == "raise":
            raise ValueError("bad agent")
        if self.kind == "hang":
            await asyncio.sleep(1e6)
        done = self.turn >= 8 and self.kind != "never"
        return {"rewards": 0.5, "environment_feedback": "<|end|><|user|>again<|end|><|assistant|>", "done": done}


def run_many(episodes):
    """The samples, and the CPU seconds of a request."""
    engine = ScriptedEngine(["an answer of some length"], keep_requests=False)
    worker = make_worker(MultiTurnAgentExecutor(Many), engine, timeout=2.0)
    kinds = {3: "raise", 4: "hang", 5: "never"}

    async def main():
        items = [PromptItem(group_id=str(i), prompt=kinds.get(i, "hello")) for i in range(episodes)]
        return await asyncio.gather(*(worker.run_group(item, n_samples=1) for item in items))

    started = time.process_time()
    samples = [group[0] for group in asyncio.run(main())]
    return samples, (time.process_time() - started) / engine.num_requests


def test_a_thousand_episodes_of_eight_turns():
    samples, cpu_of_many = run_many(1000)
    assert cpu_of_many < 3 * run_many(100)[1]  # a request costs the same, however many run
    assert [s.stop_reason for s in samples[3:6]] == [StopReason.FAILED, StopReason.TIMEOUT, StopReason.MAX_TURNS]
    assert sum(s.reward == 4.0 and not s.failed for s in samples) == 997


@pytest.mark.parametrize("statement", ["time.sleep(60)", "while True: pass"])
def test_a_blocked_loop_is_reported_by_file_and_line(tmp_path, statement):
    program = textwrap.dedent(BLOCKING).replace("{statement}", statement)
    file = tmp_path / "blocking_agent.py"
    file.write_text(program)
    line = next(i for i, text in enumerate(program.splitlines(), 1) if statement in text)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == BLOCKED_EXIT_CODE
    assert f"by step() in {file}:{line}" in done.stderr


def test_a_living_loop_is_left_alone():
    async def main():
        reports = []
        watchdog = LoopWatchdog(0.6, reports.append)
        watchdog.start()
        await asyncio.sleep(1.2)
        watchdog.stop()
        return reports

    assert asyncio.run(main()) == []


def test_samples_of_a_lost_worker():
    item = PromptItem(group_id="g", prompt="p", label="l")
    group = failed_group(item, 3, Failure(border="agent", message="worker 0 was replaced"))
    assert [(t.sample_index, t.failed, t.reward, t.label) for t in group] == [(i, True, None, "l") for i in range(3)]
