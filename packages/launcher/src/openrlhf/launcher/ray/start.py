"""Starts the parts of a run on a connected Ray: engines first, they take longest; learners and agent workers beside."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from openrlhf.agents.context import EpisodeSettings
from openrlhf.agents.engine import SamplingParams
from openrlhf.core.config import Truncation
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.config import RefConfig, RewardConfig, TrainPPOConfig
from openrlhf.launcher.environments import sampler
from openrlhf.launcher.horizon import optimizer_step_horizon
from openrlhf.launcher.placement import (
    AGENT,
    ENGINE,
    NAMES,
    NODE_SHARE,
    engines_share,
    model_flag,
    model_path,
    node_resource,
    plan_placement,
    section,
    shares_device,
)
from openrlhf.launcher.preflight import Prepared
from openrlhf.launcher.ranks.config import RankConfig, rank_config
from openrlhf.launcher.ray.agent_actor import AgentActor, AgentSpec
from openrlhf.launcher.ray.cluster import Cluster, StartTimes
from openrlhf.launcher.ray.devices import extra_noset
from openrlhf.launcher.ray.elastic import open_elastic
from openrlhf.launcher.ray.engine_fleet import EngineFleet, spawner
from openrlhf.launcher.ray.engine_watch import INTERVAL, EngineWatch
from openrlhf.launcher.ray.judges import Judges, start_judges
from openrlhf.launcher.ray.learner_actor import ACTORS, LearnerActor, RankAddress, RemoteReferenceActor
from openrlhf.launcher.ray.learner_group import Push, RayLearner
from openrlhf.launcher.ray.placement import Reservation
from openrlhf.launcher.ray.rank_group import RankGroup
from openrlhf.launcher.ray.remote import Remote
from openrlhf.launcher.ray.rollout import RayRollout
from openrlhf.launcher.ray.warm import runtime_env
from openrlhf.launcher.ray.weight_push import Pause, WeightPush, check_plan
from openrlhf.launcher.record.place import record_place
from openrlhf.launcher.resolve import adapter_targets
from openrlhf.launcher.rewards.sources import reward_seconds, reward_spec
from openrlhf.launcher.rules.violation import value_at
from openrlhf.launcher.saved import config_toml
from openrlhf.launcher.threads import RankThreads, ThreadPlan, plan_threads
from openrlhf.launcher.tracing import trace_target
from openrlhf.launcher.trainer.loop import TrainerParts
from openrlhf.launcher.trainer.protocols import MetricSink
from openrlhf.launcher.vision import VisionModel
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.rollout.config import VLLM_ENGINE, RolloutConfig
from openrlhf.rollout.engine_spec import EngineSpec

log = logging.getLogger(__name__)

SETUP_TIMEOUT = 1800.0
REQUEST_TIMEOUT = 3600.0
"""Bound of one generation call within a group's bound: long answers take long, a dead engine is seen at once."""
SIGN_OF_LIFE_TIMEOUT = 60.0
"""What an agent worker may take to answer beyond the time for which its own watchdog lets an agent block it."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """All processes of a run, ready. groups: the ranks of every role that it has."""

    fleet: EngineFleet
    rollout: RayRollout
    groups: dict[str, RankGroup[Any]]
    times: StartTimes


async def start_workers(config: TrainPPOConfig, prepared: Prepared, cluster: Cluster) -> Workers:
    """Start engines, learner ranks and agent workers; return when all are ready."""
    times = StartTimes(dict(cluster.seconds))
    environment = cluster.worker_environment() | extra_noset(os.environ)
    reservation = Reservation(plan_placement(config, gpus=cluster.gpus, nodes=cluster.nodes, apart=cluster.apart))
    threads = None if cluster.gpus else plan_threads(config, cores=cluster.cores, nodes=cluster.nodes)
    if threads is not None:
        log.info("threads per process, of %d cores: %s", cluster.cores, threads)
    fleet = start_fleet(config, prepared, reservation, environment, gpus=cluster.gpus, threads=threads)
    if engines_share(config) and cluster.gpus:
        # vLLM measures what is free on the device, and fails where that changes meanwhile
        await fleet.wait_started()
        if config.vllm.enable_sleep:
            await fleet.sleep()
    groups = start_learners(config, prepared, reservation, environment, threads)
    judges = start_judges(config, fleet.specs[0], reservation, environment)
    rollout = start_rollout(config, prepared, fleet, environment, judges, apart=cluster.apart)
    ranks = {role: times.of(role, set_up()) for role, (_, set_up) in groups.items()}
    engines, _, _ = await asyncio.gather(
        times.of("engines", fleet.wait_started()),
        times.of("agents", rollout.start()),
        asyncio.gather(*ranks.values()),
    )
    times.seconds |= {"engine_load": max(engines), "total": sum(cluster.seconds.values()) + times.elapsed()}
    log.info("start: %s", times)
    fleet.on_change = rollout.engines_changed
    if judges is not None:
        await judges.wait_started()
        judges.watch(rollout, INTERVAL)
    return Workers(
        fleet=fleet, rollout=rollout, groups={role: group for role, (group, _) in groups.items()}, times=times
    )


async def start_parts(config: TrainPPOConfig, prepared: Prepared, cluster: Cluster, sink: MetricSink) -> TrainerParts:
    """All that the trainer drives, ready."""
    workers = await start_workers(config, prepared, cluster)
    fleet, rollout, train = workers.fleet, workers.rollout, config.train
    push = WeightPush(
        fleet,
        bucket_mb=config.vllm.sync_bucket_mb,
        check=check_plan(config, prepared),
        pause=Pause(clear_cache=train.partial_rollout_recompute_kv) if train.partial_rollout_enable else None,
    )
    learner = ray_learner(config, workers.groups, push)
    elastic = open_elastic(config, cluster, fleet, push, learner.policy)
    recover = partial(push.recover, learner.policy)
    watch = EngineWatch(fleet, recover, rollout, learner.groups, INTERVAL, elastic, cluster.ended)
    rollout.watch = watch
    watch.start()
    return TrainerParts(
        rollout=rollout,
        learner=learner,
        prompts=sampler(prepared.prompts, config.train.seed, prepared.environments, config.data),
        sink=sink,
        eval_prompts=prepared.eval_prompts,
        config_toml=config_toml(TRAIN_PPO_RAY, config),
        sources=prepared.plugins.sources(),
        start_metrics=workers.times.metrics(),
    )


Groups = dict[str, tuple[RankGroup[Any], Callable[[], Awaitable[Any]]]]
"""By role: its ranks, and what sets them up once their processes are there."""


def ray_learner(config: TrainPPOConfig, groups: Mapping[str, RankGroup[Any]], push: Push) -> RayLearner:
    """The learner over the ranks of every role that the run has."""
    return RayLearner(
        policy=groups["policy"],
        reference=groups["policy"] if config.base_is_reference else groups.get("reference"),
        critic=groups.get("critic"),
        reward=groups.get("reward"),
        push=push,
        tokenizer_path=model_path(config.actor.model_name_or_path or ""),
        critic_export=config.critic.save_value_network,
        take_turns=config.train.colocate_all and config.ds.enable_sleep,
    )


def start_fleet(
    config: TrainPPOConfig,
    prepared: Prepared,
    reservation: Reservation,
    environment: Mapping[str, str],
    *,
    gpus: int,
    threads: ThreadPlan | None = None,
) -> EngineFleet:
    """One engine actor per --vllm.num_engines."""
    specs = engine_specs(config, gpus=gpus, vision=prepared.vision, threads=threads)
    spawn = spawner(ENGINE, specs[0], reservation, environment)
    return EngineFleet(specs, spawn, serve=not config.trains, reservation=reservation)


def engine_specs(
    config: TrainPPOConfig, *, gpus: int, vision: VisionModel | None = None, threads: ThreadPlan | None = None
) -> list[EngineSpec]:
    """What every engine is started with."""
    vllm = config.vllm
    assert config.actor.model_name_or_path is not None
    assert vllm.sync_backend != "auto", "resolve() sets --vllm.sync_backend"
    assert vllm.lora_push != "auto", "resolve() sets --vllm.lora_push"
    return [
        EngineSpec(
            model=model_path(config.actor.model_name_or_path),
            engine=vllm.engine_class,
            name=f"engine {i}",
            dtype=vllm.dtype,
            device="cuda" if gpus else "cpu",
            cpu_threads=1 if threads is None else threads.engine,
            max_model_len=config.data.max_len,
            tensor_parallel_size=vllm.tensor_parallel_size,
            executor="ray" if gpus and engines_share(config) else "mp",
            enforce_eager=vllm.enforce_eager,
            gpu_memory_utilization=vllm.gpu_memory_utilization,
            enable_prefix_caching=vllm.enable_prefix_caching,
            enable_sleep=vllm.enable_sleep,
            full_determinism=config.train.full_determinism_enable,
            seed=config.train.seed + i,
            sync_backend=vllm.sync_backend,
            lora_rank=config.ds.lora.rank if vllm.lora_push == "adapter" else 0,
            lora_targets=adapter_targets(config) if vllm.lora_push == "adapter" else (),
            max_images_per_prompt=config.data.max_images_per_prompt,
            suppressed_token_ids=() if vision is None else vision.suppressed,
            stats=vllm.stats_enable,
            engine_args=json.loads(vllm.engine_args),
        )
        for i in range(vllm.num_engines or 0)
    ]


def start_learners(
    config: TrainPPOConfig,
    prepared: Prepared,
    reservation: Reservation,
    environment: Mapping[str, str],
    threads: ThreadPlan | None = None,
) -> Groups:
    """The processes of all learner ranks of all roles."""
    horizon = optimizer_step_horizon(config.rollout, config.train, len(prepared.prompts))
    groups: Groups = {}
    vision = prepared.vision
    processor = None if vision is None else vision.path
    ranks_config = rank_config(
        config,
        pad_token_id=prepared.pad_token_id,
        processor_path=processor,
        shared_vocab=prepared.shared_vocab,
        plugins=prepared.plugins,
        record=record_place(config),
    )
    if prepared.teacher_servers is not None:
        remote = ray.remote(RemoteReferenceActor).options(num_cpus=0, runtime_env={"env_vars": dict(environment)})
        asking = Remote[Any]("teacher's client", remote.remote())
        group = RankGroup[Any](role=Role.REFERENCE, ranks=[asking], hidden_size=prepared.hidden_size, algo=config.algo)
        connected = asking.ask(RemoteReferenceActor.connect, prepared.teacher_servers, ranks_config)
        groups[Role.REFERENCE] = (group, partial(group.wait, [connected], "learner start", SETUP_TIMEOUT))
    for role in reservation.plan.seats:
        if role in NAMES:
            continue
        actor = ray.remote(ACTORS[Role(role)])
        ranks = [
            Remote[Any](
                f"{role} rank {rank}",
                actor.options(**reservation.options(role, rank), runtime_env=runtime_env(environment)).remote(),
            )
            for rank in range(reservation.plan.ranks(role))
        ]
        group = RankGroup(
            role=role,
            ranks=ranks,
            hidden_size=prepared.hidden_size,
            ranks_per_sample=config.ds.ranks_per_sample,
            truncated=truncation(config.rollout).active,
            algo=config.algo,
            follows=role == Role.REFERENCE and config.ref.sync_steps > 0,
            share_prompt=config.shares_prompt,
        )
        spec = learner_spec(config, Role(role), horizon, vision)
        own = None if threads is None else threads.ranks[Role(role)]
        groups[role] = (group, partial(_set_up, group, spec, ranks_config, own))
    return groups


async def _set_up(group: RankGroup[Any], spec: LearnerSpec, config: RankConfig, threads: RankThreads | None) -> None:
    """Tell the ranks who is where; until all have loaded their models."""
    nodes = await group.wait(group.ask_process(LearnerActor.node), "process start", SETUP_TIMEOUT)
    on_node: dict[str, int] = {}
    local_ranks = []
    for node_id, *_ in nodes:
        local_ranks.append(on_node.get(node_id, 0))
        on_node[node_id] = on_node.get(node_id, 0) + 1
    _, master, port, _ = nodes[0]
    addresses = [
        RankAddress(
            rank=rank,
            world_size=len(nodes),
            local_rank=local_ranks[rank],
            local_world_size=on_node[nodes[rank][0]],
            master_address=master,
            master_port=port,
        )
        for rank in range(len(nodes))
    ]
    setting_up = group.scatter(LearnerActor.setup, addresses, spec, config, threads)
    await group.wait(setting_up, "learner start", SETUP_TIMEOUT)


def truncation(rollout: RolloutConfig) -> Truncation:
    """What the engines leave of a distribution when they sample; log-probs are of that."""
    return Truncation(top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p)


def learner_spec(config: TrainPPOConfig, role: Role, horizon: int, vision: VisionModel | None = None) -> LearnerSpec:
    """What a role's ranks load and how they train."""
    entity = {Role.CRITIC: config.critic}.get(role, config.actor)
    path = value_at(config, model_flag(config, role))
    assert path is not None
    own = section(config, role)
    return LearnerSpec(
        role=role,
        model_path=model_path(path),
        ds=config.ds,
        model=entity,
        optim=entity if role in (Role.POLICY, Role.CRITIC) else None,
        batch=config.train,
        temperature=config.rollout.temperature,
        truncation=truncation(config.rollout),
        max_optimizer_steps=horizon,
        score_micro_batch_size=config.rollout.micro_batch_size,
        score_max_tokens=config.rollout.max_tokens_per_gpu,
        aux_loss_coef=config.actor.aux_loss_coef if role in (Role.POLICY, Role.CRITIC) else 0.0,
        freeze_visual_encoder=config.actor.freeze_visual_encoder and role is Role.POLICY,
        suppressed_token_ids=() if vision is None else vision.suppressed,
        follow_alpha=config.ref.sync_alpha if role is Role.REFERENCE and config.ref.sync_steps else None,
        offload=isinstance(own, RefConfig | RewardConfig) and own.offload,
        shares_device=shares_device(config, role),
    )


def start_rollout(
    config: TrainPPOConfig,
    prepared: Prepared,
    fleet: EngineFleet,
    environment: Mapping[str, str],
    judges: Judges | None = None,
    *,
    apart: Collection[str] = (),
) -> RayRollout:
    """The agent workers, connected to the engines. apart: the parts that have nodes of their own."""
    there = {node_resource(AGENT, apart): NODE_SHARE} if apart else {}
    spec = agent_spec(config, prepared)
    actor = ray.remote(AgentActor)
    spec_ref = ray.put(spec)

    def spawn(number: int) -> Remote[AgentActor]:
        made = actor.options(num_cpus=0, max_concurrency=10_000, runtime_env=runtime_env(environment), resources=there)
        asked = () if judges is None else (judges.engines,)
        return Remote(f"agent worker {number}", made.remote(spec_ref, fleet.engines, number, *asked))

    turns = config.agent.max_turns if config.train.agent_func_path else 1
    bound = (config.agent.timeout + REQUEST_TIMEOUT) * turns + reward_seconds(config) + 60.0
    rollout = RayRollout(
        spawn,
        fleet,
        workers=config.agent.num_workers,
        group_timeout=bound,
        silence=config.agent.timeout + SIGN_OF_LIFE_TIMEOUT,
        decode=prepared.tokenizer.decode,
        n_samples=config.rollout.n_samples_per_prompt,
        max_len=config.data.max_len,
    )
    rollout.has_rewards = config.reward.remote_url is not None
    rollout.judges = judges
    return rollout


def agent_spec(config: TrainPPOConfig, prepared: Prepared) -> AgentSpec:
    """What every agent worker loads."""
    rollout = config.rollout
    assert config.actor.model_name_or_path is not None
    return AgentSpec(
        tokenizer_path=model_path(config.actor.model_name_or_path),
        settings=EpisodeSettings(
            sampling=SamplingParams(
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                min_p=rollout.min_p,
                stop_token_ids=prepared.stop_token_ids,
            ),
            n_samples=rollout.n_samples_per_prompt,
            max_length=config.data.max_len,
            max_new_tokens=rollout.max_new_tokens,
            seed=config.train.seed,
            agent=config.agent,
            overlong=config.data.overlong_prompts,
            guided=config.vllm.engine_class == VLLM_ENGINE,
        ),
        vision=prepared.vision is not None,
        reward_model=config.has_reward_model,
        rewards_optional=config.rewards_optional,
        agent_file=prepared.agent_file,
        environments=prepared.environments,
        rewards=reward_spec(config, prepared.reward_sources),
        tracing=trace_target(config),
    )
