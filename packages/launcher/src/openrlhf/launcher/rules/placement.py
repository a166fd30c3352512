"""Rank arithmetic: which roles share GPUs, and whether the numbers fit. Names the legal values nearest to the asked."""

from __future__ import annotations

import math
from collections.abc import Iterator

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.placement import (
    ENGINE,
    NAMES,
    SECTIONS,
    data_parallel_ranks,
    devices,
    engines_share,
    groups,
    roles,
    section,
)
from openrlhf.launcher.rules.violation import Rule, Violation, broken, value_at
from openrlhf.learner.spec import Role

P = TrainPPOConfig
Found = Iterator[Violation]


def same_shape(c: P, m: Machine) -> Found:
    """Roles on the same GPUs have the same nodes and GPUs per node."""
    switch = "train.colocate_all"
    for group in groups(c):
        first, *others = [SECTIONS[member] for member in group.members if member not in NAMES] or [""]
        if not c.train.colocate_all:
            switch = "train.colocate_actor_ref" if first == "actor" else "train.colocate_critic_reward"
        for other in others:
            for name in ("num_nodes", "num_gpus_per_node"):
                wanted = value_at(c, f"{first}.{name}")
                if wanted != value_at(c, f"{other}.{name}"):
                    problem = f"--{switch} puts {first} and {other} on the same GPUs, so both need the same number"
                    yield broken(c, f"{first}.{name} {other}.{name}", problem, f"--{other}.{name} {wanted}")


def engines_cover_actor(c: P, m: Machine) -> Found:
    """Hybrid engine: every GPU of the actor belongs to exactly one engine."""
    have, need = devices(c, ENGINE), c.actor.world_size
    if not engines_share(c) or not have or have == need:
        return
    tp = c.vllm.tensor_parallel_size
    fixes = [f"--vllm.num_engines {need // size} --vllm.tensor_parallel_size {size}" for size in _nearest(need, tp)]
    yield broken(
        c,
        "train.colocate_all actor.num_nodes actor.num_gpus_per_node vllm.num_engines vllm.tensor_parallel_size",
        f"the engines take {c.vllm.num_engines} x {tp} = {have} GPUs and the actor {need}, and they share them",
        " or ".join(fixes),
    )


def pairs_exist(c: P, m: Machine) -> Found:
    """Colocating a role that the run does not have."""
    pairs = {"colocate_actor_ref": (Role.REFERENCE,), "colocate_critic_reward": (Role.CRITIC, Role.REWARD)}
    for switch, members in pairs.items():
        absent = [SECTIONS[role] for role in members if role not in roles(c)]
        if getattr(c.train, switch) and absent and not c.train.colocate_all:
            problem = f"the run has no {' and no '.join(absent)}"
            yield broken(c, f"train.{switch}", problem, f"leave --train.{switch} out")


def fits_machine(c: P, m: Machine) -> Found:
    """The run fits on the GPUs that are there."""
    if not m.gpus:
        return
    for role in roles(c):
        if section(c, role).num_gpus_per_node > m.gpus:
            name = f"{SECTIONS[role]}.num_gpus_per_node"
            yield broken(c, name, f"a node has {m.gpus} GPUs", f"--{name} {m.gpus} or less")
    width = c.vllm.tensor_parallel_size
    if width > m.gpus:
        problem = f"an engine lies on one node, and a node has {m.gpus} GPUs"
        yield broken(c, "vllm.tensor_parallel_size", problem, f"--vllm.tensor_parallel_size {m.gpus} or less")
    if (width := c.judge.tensor_parallel_size) > m.gpus and c.judge.engines:
        problem = f"an engine lies on one node, and a node has {m.gpus} GPUs"
        yield broken(c, "judge.tensor_parallel_size", problem, f"--judge.tensor_parallel_size {m.gpus} or less")
    taken = groups(c)
    total = sum(group.devices for group in taken)
    if m.total_gpus is not None and total > m.total_gpus:
        parts = ", ".join(f"{group}: {group.devices}" for group in taken)
        yield broken(
            c,
            "actor.num_gpus_per_node train.colocate_all vllm.num_engines vllm.tensor_parallel_size",
            f"the run takes {total} GPUs ({parts}) and {m.total_gpus} are there",
            "--train.colocate_all, or fewer GPUs per role",
        )


def groups_divide(c: P, m: Machine) -> Found:
    """Whole groups of tensor-parallel ranks, and of those that have the tokens of a row."""
    for name in ("ds.tensor_parallel_size", "ds.ring_attn_size"):
        size = value_at(c, name)
        for role in roles(c):
            ranks, flags = section(c, role).world_size, SECTIONS[role]
            if ranks % size:
                near = " or ".join(str(n) for n in _nearest(ranks, size))
                problem = f"{ranks} ranks cannot be cut into groups of {size}"
                yield broken(c, f"{flags}.num_nodes {flags}.num_gpus_per_node {name}", problem, f"--{name} {near}")


def zpg_divides(c: P, m: Machine) -> Found:
    """Whole secondary partitions of ZeRO++."""
    ranks = c.actor.world_size
    if c.ds.zpg > 1 and ranks % c.ds.zpg:
        near = " or ".join(str(n) for n in _nearest(ranks, c.ds.zpg))
        problem = f"{ranks} ranks cannot be cut into partitions of {c.ds.zpg}"
        yield broken(c, "actor.num_nodes actor.num_gpus_per_node ds.zpg", problem, f"--ds.zpg {near}")
    if c.ds.zpg > 1 and c.ds.zero_stage != 3:
        yield broken(c, "ds.zpg ds.zero_stage", "only ZeRO-3 has secondary partitions", "--ds.zero_stage 3")


def enough_samples(c: P, m: Machine) -> Found:
    """Every rank gets at least one micro-batch of a rollout batch."""
    if c.train.dynamic_batch_enable:
        return
    samples = c.rollout.batch_size * c.rollout.n_samples_per_prompt
    parallel = data_parallel_ranks(c)
    if samples // max(1, c.rollout.micro_batch_size) < parallel:
        yield broken(
            c,
            "rollout.batch_size rollout.n_samples_per_prompt rollout.micro_batch_size actor.num_gpus_per_node",
            f"{samples} samples in micro-batches of {c.rollout.micro_batch_size} leave some of {parallel} ranks idle",
            f"--rollout.micro_batch_size {max(1, samples // parallel)} or less"
            if samples >= parallel
            else f"--rollout.batch_size {-(-parallel // c.rollout.n_samples_per_prompt)} or more",
        )


def _nearest(total: int, asked: int) -> list[int]:
    """The divisors of `total` nearest to `asked`: one below or equal, one above."""
    small = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
    divisors = sorted({*small, *(total // n for n in small)})
    below = [n for n in divisors if n <= asked][-1:]
    above = [n for n in divisors if n > asked][:1]
    return below + above


RULES: tuple[Rule, ...] = (
    same_shape,
    engines_cover_actor,
    pairs_exist,
    fits_machine,
    groups_divide,
    zpg_divides,
    enough_samples,
)
