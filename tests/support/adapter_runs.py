"""The push of a run with real engines and learner ranks on Ray, without agents and a trainer: `WeightPush` alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from openrlhf.agents.engine import Generation, SamplingParams
from openrlhf.core.batch import Batch
from openrlhf.core.config import AlgoConfig, PolicyLossConfig
from openrlhf.launcher.ranks.config import RankConfig
from openrlhf.launcher.ranks.roles import PolicyRank
from openrlhf.launcher.ray.cluster import Cluster
from openrlhf.launcher.ray.engine_actor import EngineActor, engine_actor
from openrlhf.launcher.ray.engine_client import RayEngineClient
from openrlhf.launcher.ray.engine_fleet import EngineFleet
from openrlhf.launcher.ray.learner_actor import LearnerActor, PolicyActor, RankAddress
from openrlhf.launcher.ray.rank_group import RankGroup
from openrlhf.launcher.ray.remote import Remote
from openrlhf.launcher.ray.warm import runtime_env
from openrlhf.launcher.ray.weight_push import CheckPlan, Pause, WeightPush
from openrlhf.learner.config import AdamConfig, DsConfig, LoraConfig, OptimConfig, TrainBatchConfig
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.supervised_objectives import SftObjective
from openrlhf.rollout.engine import engine_class
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import GenerateRequest
from openrlhf.rollout.sync_check import Tolerance

SUPPORT = str(Path(__file__).parents[1])
TARGETS = ("q_proj", "v_proj", "up_proj", "down_proj")
"""Of the layers that an engine fuses only some."""
LORA = LoraConfig(rank=4, alpha=32, target_modules=TARGETS)
MAX_LEN = 256
WORLD = 2
RULES = RankConfig(
    algo=AlgoConfig(),
    policy_loss=PolicyLossConfig(),
    value_clip=0.2,
    max_len=MAX_LEN,
    agg_constant=1.0,
    pad_token_id=0,
)
CHECK = CheckPlan(
    prompts=[[(7 * row + 3 * i) % 250 + 5 for i in range(32)] for row in range(8)],
    answer_tokens=32,
    tolerance=Tolerance(value=1e-4, source="a test"),
)
LONG = SamplingParams(temperature=1.0, max_tokens=160, seed=3, ignore_eos=True)


def make_fleet(cluster: Cluster, model: str, *, serves: bool, count: int = 1, **options: Any) -> EngineFleet:
    """Engines of the model; serves: they serve an adapter. options: of their specs."""
    lora: dict[str, Any] = {"lora_rank": LORA.rank, "lora_targets": TARGETS} if serves else {}
    specs = [
        EngineSpec(model=model, name=f"engine {i}", max_model_len=MAX_LEN, **lora, **options) for i in range(count)
    ]

    def spawn(number: int) -> Remote[EngineActor]:
        own = engine_class(specs[number]).environment(specs[number])
        env = cluster.worker_environment() | own | {"PYTHONPATH": SUPPORT}
        return Remote(specs[number].name, engine_actor().options(num_cpus=0, runtime_env=runtime_env(env)).remote())

    return EngineFleet(specs, spawn)


async def make_policy(
    cluster: Cluster, model: str, *, stage: int, lora: LoraConfig = LORA, dtype: Any = "fp32"
) -> RankGroup[PolicyRank]:
    """Two ranks that train adapters."""
    env = cluster.worker_environment() | {"PYTHONPATH": SUPPORT}
    actor = ray.remote(PolicyActor).options(num_cpus=0, runtime_env=runtime_env(env))
    ranks = [Remote[Any](f"policy rank {rank}", actor.remote()) for rank in range(WORLD)]
    group = RankGroup[PolicyRank](role="policy", ranks=ranks, hidden_size=64)
    ((_, ip, port, _), *_) = await group.wait(group.ask_process(LearnerActor.node), "test")
    spec = LearnerSpec(
        role=Role.POLICY,
        model_path=model,
        ds=DsConfig(zero_stage=stage, param_dtype=dtype, attn_implementation="sdpa", lora=lora),
        optim=OptimConfig(adam=AdamConfig(lr=5e-3), lr_scheduler="constant", lr_warmup_ratio=0.0),
        batch=TrainBatchConfig(micro_batch_size=8, batch_size=8),
        max_optimizer_steps=1000,
    )
    setups = [
        Remote[LearnerActor](rank.name, rank.actor).ask(
            LearnerActor.setup,
            RankAddress(
                rank=number,
                world_size=WORLD,
                local_rank=number,
                local_world_size=WORLD,
                master_address=ip,
                master_port=port,
            ),
            spec,
            RULES,
        )
        for number, rank in enumerate(ranks)
    ]
    await group.wait(setups, "learner start")
    return group


def _step(actor: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 255, (4, 48), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    action = mask.clone()
    action[:, 0] = False
    actor.role.learner.update(
        Batch(tokens=ids, attention_mask=mask, action_mask=action, index=torch.arange(4)), SftObjective()
    )


async def on_ranks(policy: RankGroup[PolicyRank], function: Any, *args: Any) -> list[Any]:
    """Run a function of the actor in every rank."""
    return await policy.wait([rank.actor.__ray_call__.remote(function, *args) for rank in policy.ranks], "test")


async def train(policy: RankGroup[PolicyRank], seed: int) -> None:
    """One optimiser step on random text, the same on both ranks."""
    await on_ranks(policy, _step, seed)


def new_push(fleet: EngineFleet, pause: Pause | None = None, check: CheckPlan = CHECK) -> WeightPush:
    """The launcher's own, over a new connection, with a strict check."""
    return WeightPush(fleet, bucket_mb=1, check=check, pause=pause)


async def asked(fleet: EngineFleet, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generation]:
    """Samples of the first engine."""
    client = RayEngineClient(fleet.engines[0])
    requests = [
        GenerateRequest(request_id=f"t{i}", token_ids=list(p), sampling=sampling) for i, p in enumerate(prompts)
    ]
    return list(await asyncio.gather(*map(client.generate, requests)))


async def end(policy: RankGroup[PolicyRank]) -> None:
    """The ranks' processes are gone."""
    for rank in policy.ranks:
        rank.kill()
