"""An agent worker's actor: the engines that it knows, the samples that it gives back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.agents.recorder import Outcome, Recorder
from openrlhf.agents.types import PromptItem, StopReason
from openrlhf.launcher.ray.agent_actor import AgentActor
from openrlhf.launcher.ray.engine_actor import EngineActor
from openrlhf.launcher.ray.remote import Remote


async def value(content: Any) -> Any:
    return content


def test_an_engine_that_stays_keeps_its_client() -> None:
    first, second, new = (Remote[EngineActor](f"engine {i}", object()) for i in (0, 1, 1))
    spec: Any = None

    async def main() -> None:
        worker = AgentActor(spec, [first, second], 0)
        before = worker._clients
        await worker.set_engines([first, new])
        assert worker._clients[0] is before[0]
        assert worker._clients[1].engine is new
        assert await worker.engines_down() == {}

    asyncio.run(main())


@pytest.mark.parametrize("reward_model", [False, True])
def test_b148_only_a_reward_model_may_be_left_to_score_a_sample(reward_model: bool) -> None:
    """Without one, an agent that returns no reward would end the run in the controller."""
    item = PromptItem(group_id="g", prompt="p")
    unscored = Recorder([1]).finish(item, 0, Outcome(stop_reason=StopReason.DONE))
    spec = SimpleNamespace(reward_model=reward_model, rewards_optional=False, settings=SimpleNamespace(max_length=64))
    actor = AgentActor(spec, [], 0)  # type: ignore[arg-type]
    actor._worker = SimpleNamespace(run_group=lambda *args, **options: value([unscored]))  # type: ignore[assignment]
    infos, trajectories = asyncio.run(actor.run_group(item, None))
    assert [info.failed for info in infos] == [t.failed for t in trajectories] == [not reward_model]
