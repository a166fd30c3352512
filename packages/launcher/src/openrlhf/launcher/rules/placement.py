"""Rank arithmetic: which roles share GPUs, and whether the numbers fit. Names the legal values nearest to the asked."""

from __future__ import annotations

import math
from collections.abc import Iterator

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.rules.violation import Rule, Violation, broken

P = TrainPPOConfig
Found = Iterator[Violation]


def roles(c: P) -> list[str]:
    """The learner roles that the run has."""
    present = {"actor": True, "critic": c.has_critic, "ref": c.has_reference, "reward": c.has_reward_model}
    return [role for role, there in present.items() if there]


def ranks(c: P, role: str) -> int:
    """World size of a role."""
    return getattr(c, role).world_size


def groups(c: P) -> list[list[str]]:
    """Roles by the GPUs they share; `engines` are one of the members."""
    here = roles(c)
    if c.train.colocate_all:
        return [here, ["engines"]] if c.train.async_enable else [[*here, "engines"]]
    pairs = []
    if c.train.colocate_actor_ref:
        pairs.append(("actor", "ref"))
    if c.train.colocate_critic_reward:
        pairs.append(("critic", "reward"))
    found: list[list[str]] = [[r for r in pair if r in here] for pair in pairs]
    alone = [role for role in here if not any(role in group for group in found)]
    return [g for g in [*found, *([role] for role in alone), ["engines"]] if g]


def gpus_of(c: P, member: str) -> int:
    """Devices of a role or of all engines."""
    if member == "engines":
        return (c.vllm.num_engines or 0) * c.vllm.tensor_parallel_size
    return ranks(c, member)


def shares(c: P) -> dict[str, int]:
    """GPUs that the run takes, by the roles that share them."""
    return {" + ".join(group): max(gpus_of(c, member) for member in group) for group in groups(c)}


def same_shape(c: P, m: Machine) -> Found:
    """Roles on the same GPUs have the same nodes and GPUs per node."""
    switch = "train.colocate_all"
    for group in groups(c):
        members = [r for r in group if r != "engines"]
        if not c.train.colocate_all:
            switch = "train.colocate_actor_ref" if "actor" in group else "train.colocate_critic_reward"
        first = members[0] if members else ""
        for other in members[1:]:
            a, b = getattr(c, first), getattr(c, other)
            for name in ("num_nodes", "num_gpus_per_node"):
                if getattr(a, name) != getattr(b, name):
                    problem = f"--{switch} puts {first} and {other} on the same GPUs, so both need the same number"
                    fix = f"--{other}.{name} {getattr(a, name)}"
                    yield broken(c, f"{first}.{name} {other}.{name}", problem, fix)


def engines_cover_actor(c: P, m: Machine) -> Found:
    """Hybrid engine: every GPU of the actor belongs to exactly one engine."""
    if not c.train.colocate_all or c.train.async_enable or not c.vllm.num_engines:
        return
    have, need = gpus_of(c, "engines"), ranks(c, "actor")
    if have == need:
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
    for switch, members in (("colocate_actor_ref", ("ref",)), ("colocate_critic_reward", ("critic", "reward"))):
        absent = [role for role in members if role not in roles(c)]
        if getattr(c.train, switch) and absent and not c.train.colocate_all:
            problem = f"the run has no {' and no '.join(absent)}"
            yield broken(c, f"train.{switch}", problem, f"leave --train.{switch} out")


def fits_machine(c: P, m: Machine) -> Found:
    """The run fits on the GPUs that are there."""
    if not m.gpus:
        return
    for role in roles(c):
        per_node = getattr(c, role).num_gpus_per_node
        if per_node > m.gpus:
            problem = f"a node has {m.gpus} GPUs"
            yield broken(c, f"{role}.num_gpus_per_node", problem, f"--{role}.num_gpus_per_node {m.gpus} or less")
    width = c.vllm.tensor_parallel_size
    if width > m.gpus:
        problem = f"an engine lies on one node, and a node has {m.gpus} GPUs"
        yield broken(c, "vllm.tensor_parallel_size", problem, f"--vllm.tensor_parallel_size {m.gpus} or less")
    total = m.total_gpus
    taken = shares(c)
    if total is not None and sum(taken.values()) > total:
        parts = ", ".join(f"{names}: {count}" for names, count in taken.items())
        yield broken(
            c,
            "actor.num_gpus_per_node train.colocate_all vllm.num_engines vllm.tensor_parallel_size",
            f"the run takes {sum(taken.values())} GPUs ({parts}) and {total} are there",
            "--train.colocate_all, or fewer GPUs per role",
        )


def tensor_parallel_divides(c: P, m: Machine) -> Found:
    """Whole groups of tensor-parallel ranks."""
    size = c.ds.tensor_parallel_size
    for role in roles(c):
        if ranks(c, role) % size:
            near = " or ".join(str(n) for n in _nearest(ranks(c, role), size))
            problem = f"{ranks(c, role)} ranks cannot be cut into groups of {size}"
            names = f"{role}.num_nodes {role}.num_gpus_per_node ds.tensor_parallel_size"
            yield broken(c, names, problem, f"--ds.tensor_parallel_size {near}")


def zpg_divides(c: P, m: Machine) -> Found:
    """Whole secondary partitions of ZeRO++."""
    if c.ds.zpg > 1 and ranks(c, "actor") % c.ds.zpg:
        near = " or ".join(str(n) for n in _nearest(ranks(c, "actor"), c.ds.zpg))
        problem = f"{ranks(c, 'actor')} ranks cannot be cut into partitions of {c.ds.zpg}"
        yield broken(c, "actor.num_nodes actor.num_gpus_per_node ds.zpg", problem, f"--ds.zpg {near}")
    if c.ds.zpg > 1 and c.ds.zero_stage != 3:
        yield broken(c, "ds.zpg ds.zero_stage", "only ZeRO-3 has secondary partitions", "--ds.zero_stage 3")


def enough_samples(c: P, m: Machine) -> Found:
    """Every rank gets at least one micro-batch of a rollout batch."""
    if c.train.dynamic_batch_enable:
        return
    samples = c.rollout.batch_size * c.rollout.n_samples_per_prompt
    parallel = max(1, ranks(c, "actor") // c.ds.tensor_parallel_size)
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
    tensor_parallel_divides,
    zpg_divides,
    enough_samples,
)
