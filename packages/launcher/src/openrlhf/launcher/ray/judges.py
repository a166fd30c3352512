"""Engines of a judge (`--judge.model_name_or_path`): they serve the model that they load, and get no weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.placement import JUDGE, model_path
from openrlhf.launcher.ray.agent_actor import AgentActor
from openrlhf.launcher.ray.engine_actor import EngineActor
from openrlhf.launcher.ray.engine_fleet import EngineFleet, spawner
from openrlhf.launcher.ray.placement import Reservation
from openrlhf.launcher.ray.remote import Remote, ask_living
from openrlhf.launcher.ray.rollout import ASK_TIMEOUT, RayRollout
from openrlhf.rollout.engine_spec import EngineSpec

log = logging.getLogger(__name__)


def judge_specs(config: TrainPPOConfig, like: EngineSpec) -> list[EngineSpec]:
    """What each of them is started with. like: an engine that samples, whose device, dtype and class they share."""
    judge = config.judge
    return [
        replace(
            like,
            model=model_path(judge.model_name_or_path or ""),
            name=f"{JUDGE} {i}",
            max_model_len=judge.max_len,
            tensor_parallel_size=judge.tensor_parallel_size,
            executor="mp",
            enable_prefix_caching=True,
            enable_sleep=False,
            seed=config.train.seed + i,
            lora_rank=0,
            lora_targets=(),
            max_images_per_prompt=0,
            suppressed_token_ids=(),
            stats=False,
            engine_args={},
        )
        for i in range(judge.engines)
    ]


class Judges:
    """The engines of a judge and the task that looks after them; an engine that is gone is started again."""

    def __init__(self, specs: Sequence[EngineSpec], spawn: Callable[[int], Remote[EngineActor]]) -> None:
        self._fleet = EngineFleet(specs, spawn, serve=True)
        self._watching: asyncio.Task[None] | None = None

    @property
    def engines(self) -> Sequence[Remote[EngineActor]]:
        """The actors that serve now."""
        return self._fleet.engines

    async def wait_started(self) -> list[float]:
        """Until every engine has its model: the seconds of loading."""
        return await self._fleet.wait_started()

    def watch(self, rollout: RayRollout, interval: float) -> None:
        """Look after them from now on; what can't be mended ends the run. Agent workers are told of new ones."""

        async def tell(engines: Sequence[Remote[EngineActor]]) -> None:
            await ask_living(rollout.workers, "judges", ASK_TIMEOUT, AgentActor.set_judges, list(engines))

        async def look() -> None:
            while True:
                await asyncio.sleep(interval)
                try:
                    if await self._fleet.gone():
                        await self._fleet.revive()
                        await self._fleet.announce()
                    elif any(await ask_living(rollout.workers, "judges", ASK_TIMEOUT, AgentActor.judges_down)):
                        await tell(self.engines)  # some worker gave one up that is well
                except Exception as error:
                    rollout.fail(error)
                    return

        self._fleet.on_change = tell
        self._watching = asyncio.create_task(look(), name="judge watch")

    async def shutdown(self) -> None:
        """End them."""
        if self._watching is not None:
            self._watching.cancel()
        await self._fleet.shutdown()


def start_judges(
    config: TrainPPOConfig, like: EngineSpec, reservation: Reservation, environment: Mapping[str, str]
) -> Judges | None:
    """The engines of the run's judge, where it has one in the cluster. like: an engine that samples."""
    specs = judge_specs(config, like)
    return Judges(specs, spawner(JUDGE, specs[0], reservation, environment)) if specs else None
