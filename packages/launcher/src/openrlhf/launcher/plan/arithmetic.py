"""Batch arithmetic of a run: prompts, samples, optimiser steps, micro-batches, forwards and bytes of a weight push."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.horizon import optimizer_step_horizon
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.placement import NAMES, SECTIONS, Group, data_parallel_ranks, engines, groups, roles, section
from openrlhf.launcher.plan.memory import ITEMSIZE
from openrlhf.launcher.plan.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Batches:
    """From prompts to optimiser steps. None: not known without the size of the dataset.

    data_parallel_ranks: those with samples of their own, or groups of `ranks_per_sample`; per_rank is of each of them.
    """

    prompts_per_rollout: int
    samples_per_rollout: int
    optimizer_steps_per_rollout: int
    samples_per_optimizer_step: int
    samples_in_last_step: int
    data_parallel_ranks: int
    ranks_per_sample: int
    samples_per_rank: int
    micro_batches_per_rank: int | None
    samples_of_a_prompt_per_pass: int
    prompts: int | None
    rollouts: int | None
    prompts_in_last_rollout: int | None
    lr_horizon: int | None


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Roles that share GPUs."""

    members: str
    devices: int
    detail: str


@dataclass(frozen=True, kw_only=True)
class Room:
    """GPUs that the run takes, and the nodes that hold them.

    shares: roles that share GPUs -> GPUs. nodes: those of the run as it was described. needed: those that it takes.
    """

    total: int
    shares: dict[str, int]
    per_node: int
    nodes: int
    needed: int

    @property
    def fits(self) -> bool:
        """Whether the nodes of the run hold it."""
        return self.needed <= self.nodes


@dataclass(frozen=True, kw_only=True)
class Sync:
    """One weight push."""

    backend: str
    bytes: int
    buckets: int
    engines: int


def batches(c: TrainPPOConfig, prompts: int | None) -> Batches:
    """The batch arithmetic of a resolved configuration."""
    per_rollout, n, size = c.rollout.batch_size, c.rollout.n_samples_per_prompt, c.train.batch_size
    samples = per_rollout * n
    steps = math.ceil(samples / size)
    parallel = data_parallel_ranks(c)
    share = math.ceil(min(size, samples) / parallel)
    total = None if prompts is None else min(prompts, c.data.max_samples)
    return Batches(
        prompts_per_rollout=per_rollout,
        samples_per_rollout=samples,
        optimizer_steps_per_rollout=steps * c.train.max_epochs,
        samples_per_optimizer_step=min(size, samples),
        samples_in_last_step=samples - (steps - 1) * size,
        data_parallel_ranks=parallel,
        ranks_per_sample=c.ds.ranks_per_sample,
        samples_per_rank=share,
        micro_batches_per_rank=None if c.train.dynamic_batch_enable else math.ceil(share / c.train.micro_batch_size),
        samples_of_a_prompt_per_pass=samples_of_a_prompt(c),
        prompts=total,
        rollouts=None if total is None else math.ceil(total / per_rollout) * c.train.num_episodes,
        prompts_in_last_rollout=None if total is None else total - (math.ceil(total / per_rollout) - 1) * per_rollout,
        lr_horizon=c.train.max_steps if total is None else optimizer_step_horizon(c.rollout, c.train, total),
    )


def samples_of_a_prompt(c: TrainPPOConfig) -> int:
    """How many samples of a prompt meet in a training pass, which computes the prompt once for them; 1 without sharing.

    Where a rollout batch is cut into several optimiser steps its samples are drawn at random: so many on average.
    """
    if not c.shares_prompt or c.data.max_images_per_prompt > 0:
        return 1
    n = c.rollout.n_samples_per_prompt
    in_step = n * min(1.0, c.train.batch_size / (c.rollout.batch_size * n))
    return max(1, int(in_step if c.train.dynamic_batch_enable else min(in_step, c.train.micro_batch_size)))


def placement(c: TrainPPOConfig) -> list[Placed]:
    """Which roles share which number of devices."""
    return [Placed(members=str(group), devices=group.devices, detail=_detail(c, group)) for group in groups(c)]


def _detail(c: TrainPPOConfig, group: Group) -> str:
    details = []
    for member in group.members:
        if member in NAMES:
            count, width = engines(c, member)
            details.append(f"{count} engines x TP {width}")
        else:
            shape = section(c, member)
            details.append(f"{SECTIONS[member]} {shape.num_nodes} x {shape.num_gpus_per_node}")
    return ", ".join(details)


def room(c: TrainPPOConfig, machine: Machine) -> Room | None:
    """What the run takes of nodes like those of `machine`; None without GPUs. Nodes that nobody named: its roles'."""
    if not machine.gpus:
        return None
    taken = {str(group): group.devices for group in groups(c)}
    total, width = sum(taken.values()), c.vllm.tensor_parallel_size
    whole_engines = math.ceil((c.vllm.num_engines or 0) / max(1, machine.gpus // width))  # none lies on two nodes
    return Room(
        total=total,
        shares=taken,
        per_node=machine.gpus,
        nodes=machine.nodes or max(section(c, role).num_nodes for role in roles(c)),
        needed=max(math.ceil(total / machine.gpus), whole_engines),
    )


def forwards(c: TrainPPOConfig) -> list[str]:
    """The passes over a rollout batch, in order."""
    steps = math.ceil(c.rollout.batch_size * c.rollout.n_samples_per_prompt / c.train.batch_size) * c.train.max_epochs
    passes = ["generation by the engines"]
    if c.has_reward_model:
        passes.append("rewards by the reward model")
    if c.has_reference:
        by = "policy without its adapters" if c.base_is_reference else "reference model"
        passes.append(f"log-probs by the {by}")
    if steps > 1:
        passes.append("old log-probs by the policy")
    if c.has_critic:
        passes.append("values by the critic")
    trained = "policy and critic" if c.has_critic else "policy"
    passes.append(f"forward and backward of the {trained}, {c.train.max_epochs} time(s) over the batch")
    return passes


def weight_sync(c: TrainPPOConfig, shape: ModelShape) -> Sync:
    """Bytes that one weight push sends to each engine: all parameters, or adapters alone.

    The first push always sends all, those after it what is trained.
    """
    count = shape.adapter_parameters(c.ds.lora) if c.vllm.lora_push == "adapter" else shape.parameters
    size = count * ITEMSIZE[c.ds.param_dtype]
    return Sync(
        backend=c.vllm.sync_backend,
        bytes=size,
        buckets=math.ceil(size / (c.vllm.sync_bucket_mb * 2**20)),
        engines=c.vllm.num_engines or 0,
    )


def count_prompts(c: TrainPPOConfig) -> int | None:
    """Prompts in local JSONL files, by counting lines; None if a dataset is anything else."""
    total = 0
    for name in (c.data.prompt_dataset or "").split(","):
        path = Path(name)
        if path.suffix != ".jsonl" or not path.is_file():
            return None
        with path.open("rb") as file:
            total += sum(1 for line in file if line.strip())
    return total
