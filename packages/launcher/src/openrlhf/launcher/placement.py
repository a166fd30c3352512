"""Where every part of a run goes: which roles share devices, and which actor gets which of them.

Pure functions of the configuration: the rules, `plan` and Ray (`ray/placement.py`, which reserves what is planned here)
all ask here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from openrlhf.launcher.config import ActorConfig, CriticConfig, PlacementConfig, RefConfig, RewardConfig, TrainPPOConfig
from openrlhf.learner.spec import Role

ENGINE = "engine"
"""The engines, among the roles."""

JUDGE = "judge"
"""The engines of a judge, among the roles; they share devices with nobody."""

SECTIONS: Mapping[str, str] = {
    Role.POLICY: "actor",
    Role.CRITIC: "critic",
    Role.REFERENCE: "ref",
    Role.REWARD: "reward",
}
"""A role, by the name that the field gives it -> the section of its flags, by which users know it."""

NAMES = {ENGINE: "engines", JUDGE: "judge"}
"""Members that are no role of a learner, as users know them."""

AGENT = "agent"
"""The agent workers, which run agents and reward functions: a part of a run without devices."""

REST = "rest"
"""Where nodes are set apart for some parts of a run, what the nodes of all other parts are called."""

PART_RESOURCE = "openrlhf-part-"
"""What resources of Ray start with that say whose nodes these are."""

NODE_CAPACITY, NODE_SHARE = 1000.0, 0.001
"""What a node has of the resource that says whose it is, and what a part that must be there takes of it."""

CPU_SHARE = 0.001
"""What a bundle asks of a node's CPUs where no GPU tells the ranks apart: enough to be placed, too little to count."""

SHARE = 0.2
"""What an actor holds of a GPU and its CPU where several share them: room for four models and an engine."""


def roles(config: TrainPPOConfig) -> tuple[Role, ...]:
    """The learner roles that the run has."""
    there = {
        Role.POLICY: config.trains,
        Role.CRITIC: config.has_critic,
        Role.REFERENCE: config.has_reference and not config.base_is_reference and config.ref.remote_url is None,
        Role.REWARD: config.has_reward_model,
    }
    return tuple(role for role, present in there.items() if present)


def section(config: TrainPPOConfig, role: str) -> ActorConfig | CriticConfig | RefConfig | RewardConfig:
    """The flags of a role."""
    return getattr(config, SECTIONS[role])


def called(member: str) -> str:
    """A role, the engines or a judge, as users know them."""
    return NAMES.get(member) or SECTIONS[member]


def model_flag(config: TrainPPOConfig, role: str) -> str:
    """The flag that names a role's model: without one of its own the reference is the policy before training."""
    if role == Role.REFERENCE and not config.ref.model_name_or_path:
        role = Role.POLICY
    return f"{SECTIONS[role]}.model_name_or_path"


def model_path(path: str) -> str:
    """Absolute for a local folder: workers run in other working directories."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else path


def engines_share(config: TrainPPOConfig) -> bool:
    """The hybrid engine: engines on the devices of the models, which work while those rest."""
    return config.train.colocate_all and not config.train.async_enable


@dataclass(frozen=True, kw_only=True)
class Group:
    """Roles (and `ENGINE`) on the same devices, or one alone. devices: how many."""

    members: tuple[str, ...]
    devices: int

    @property
    def shared(self) -> bool:
        return len(self.members) > 1

    def __str__(self) -> str:
        """The members as users know them."""
        return " + ".join(map(called, self.members))


def groups(config: TrainPPOConfig) -> list[Group]:
    """All roles of the run and its engines, by the devices that they share."""
    return [Group(members=m, devices=max(devices(config, member) for member in m)) for m in _sets(config) if m]


def _sets(config: TrainPPOConfig) -> Iterator[tuple[str, ...]]:
    yield from _policy_sets(config)
    if config.judge.engines:
        yield (JUDGE,)


def _policy_sets(config: TrainPPOConfig) -> Iterator[tuple[str, ...]]:
    here, train = roles(config), config.train
    if train.colocate_all:
        yield from [(*here, ENGINE)] if engines_share(config) else [here, (ENGINE,)]
        return
    pairs: list[tuple[str, ...]] = []
    if train.colocate_actor_ref:
        pairs.append(tuple(role for role in (Role.POLICY, Role.REFERENCE) if role in here))
    if train.colocate_critic_reward:
        pairs.append(tuple(role for role in (Role.CRITIC, Role.REWARD) if role in here))
    yield from pairs
    yield from ((role,) for role in here if not any(role in pair for pair in pairs))
    yield (ENGINE,)


def devices(config: TrainPPOConfig, member: str) -> int:
    """Devices of a role, of all engines or of a judge's."""
    if member in NAMES:
        count, width = engines(config, member)
        return count * width
    return section(config, member).world_size


def engines(config: TrainPPOConfig, member: str) -> tuple[int, int]:
    """How many engines sample, or judge, and on how many devices each."""
    if member == JUDGE:
        return config.judge.engines, config.judge.tensor_parallel_size
    return config.vllm.num_engines or 0, config.vllm.tensor_parallel_size


def shares_device(config: TrainPPOConfig, member: str) -> bool:
    """Whether others have processes on its devices."""
    return any(member in group.members for group in groups(config) if group.shared)


def data_parallel_ranks(config: TrainPPOConfig) -> int:
    """Ranks of the policy that work on samples of their own."""
    return max(1, config.actor.world_size // config.ds.ranks_per_sample)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A placement group to be made: `bundles` resource dicts, packed onto few nodes or spread over all."""

    name: str
    bundles: tuple[dict[str, float], ...]
    strategy: str = "PACK"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One actor's place: bundle number in its pool (None: anywhere) and the resources that it holds.

    workers: bundles of the processes that the actor itself starts through Ray, which hold its share of the GPUs.
    nodes: the resource of the nodes that it must be on, where it has no pool; empty: on any.
    """

    pool: str | None
    bundle: int
    num_gpus: float
    workers: tuple[int, ...] = ()
    nodes: str = ""

    @property
    def num_cpus(self) -> float:
        """A CPU per GPU, in the same shares."""
        return 0 if self.workers else min(self.num_gpus, 1)


@dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """All pools, and the seats of every role and of the engines. apart: the parts that have nodes of their own."""

    pools: tuple[Pool, ...]
    seats: dict[str, tuple[Seat, ...]]

    apart: frozenset[str] = frozenset()

    def ranks(self, role: str) -> int:
        return len(self.seats.get(role, ()))

    def part_of(self, role: str) -> dict[str, float]:
        """What a role takes of the resource of its nodes; nothing where none are set apart."""
        return {node_resource(role, self.apart): NODE_SHARE} if self.apart else {}


def node_resource(member: str, apart: Collection[str]) -> str:
    """The resource of Ray that the nodes of a part have; empty where no nodes are set apart for any (`apart`)."""
    return f"{PART_RESOURCE}{member if member in apart else REST}" if apart else ""


def nodes_apart(resources: Iterable[str]) -> frozenset[str]:
    """The parts that a cluster with these resources has nodes for."""
    named = {name.removeprefix(PART_RESOURCE) for name in resources if name.startswith(PART_RESOURCE)}
    return frozenset(named - {REST})


def plan_placement(config: TrainPPOConfig, *, gpus: int, nodes: int = 1, apart: Collection[str] = ()) -> PlacementPlan:
    """On GPUs a pool per group of roles that share them.

    On a CPU there is nothing to share: no pool on one node, and one bundle per node on several. apart: the parts that
    have nodes of their own, which all others keep away from. Raises ValueError for parts that share devices and shall
    not share nodes.
    """
    plan = replace(_plan_gpus(config) if gpus else _plan_cpus(config, nodes), apart=frozenset(apart))
    if not apart:
        return plan
    check_apart(config, apart)
    pools = []
    for pool in plan.pools:
        own = plan.part_of(pool.name.split("+")[0])
        pools.append(replace(pool, bundles=tuple(bundle | own for bundle in pool.bundles)))
    seats = {
        member: tuple(s if s.pool else replace(s, nodes=node_resource(member, apart)) for s in placed)
        for member, placed in plan.seats.items()
    }
    return replace(plan, pools=tuple(pools), seats=seats)


def check_apart(config: TrainPPOConfig, apart: Collection[str]) -> None:
    """Raises ValueError for parts that share devices of which some alone have nodes of their own."""
    for group in groups(config):
        there = [member for member in group.members if member in apart]
        if there and len(there) < len(group.members):
            names = " and ".join(map(called, there))
            raise ValueError(
                f"{group} share devices, so {names} cannot have nodes of their own: drop --train.colocate_*"
            )


def _plan_cpus(config: TrainPPOConfig, nodes: int) -> PlacementPlan:
    pools: list[Pool] = []
    seats: dict[str, tuple[Seat, ...]] = {
        role: _seat_cpu_ranks(role, section(config, role), pools) for role in roles(config)
    }
    for member in (ENGINE, JUDGE) if config.judge.engines else (ENGINE,):
        count, _ = engines(config, member)
        if nodes > 1:
            pools.append(Pool(name=member, bundles=({"CPU": CPU_SHARE},) * count, strategy="SPREAD"))
            seats[member] = tuple(Seat(pool=member, bundle=i, num_gpus=0) for i in range(count))
        else:
            seats[member] = (Seat(pool=None, bundle=0, num_gpus=0),) * count
    return PlacementPlan(pools=tuple(pools), seats=seats)


def _seat_cpu_ranks(role: str, shape: PlacementConfig, pools: list[Pool]) -> tuple[Seat, ...]:
    ranks, per_node = shape.world_size, shape.num_gpus_per_node
    if shape.num_nodes > 1:
        pools.append(Pool(name=role, bundles=({"CPU": CPU_SHARE},) * shape.num_nodes, strategy="STRICT_SPREAD"))
        return tuple(Seat(pool=role, bundle=i // per_node, num_gpus=0) for i in range(ranks))
    return (Seat(pool=None, bundle=0, num_gpus=0),) * ranks


def _plan_gpus(config: TrainPPOConfig) -> PlacementPlan:
    pools: list[Pool] = []
    seats: dict[str, tuple[Seat, ...]] = {}
    for group in groups(config):
        name = "+".join(group.members)
        count, width = engines(config, JUDGE if JUDGE in group.members else ENGINE)
        if group.members in ((ENGINE,), (JUDGE,)):  # an engine is whole on one node
            if count:
                pools.append(Pool(name=name, bundles=({"GPU": float(width), "CPU": float(width)},) * count))
                seats[name] = tuple(Seat(pool=name, bundle=i, num_gpus=float(width)) for i in range(count))
            continue
        pools.append(Pool(name=name, bundles=({"GPU": 1.0, "CPU": 1.0},) * group.devices))
        share = SHARE if group.shared else 1.0
        for member in group.members:
            if member == ENGINE and width > 1:
                places = [tuple(range(i * width, (i + 1) * width)) for i in range(count)]
                seats[ENGINE] = tuple(Seat(pool=name, bundle=p[0], num_gpus=0, workers=p) for p in places)
            else:
                seats[member] = tuple(Seat(pool=name, bundle=i, num_gpus=share) for i in range(devices(config, member)))
    return PlacementPlan(pools=tuple(pools), seats=seats)
