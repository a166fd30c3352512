"""`--het PARTS='OPTIONS'`: nodes of another kind in the same job, for some parts of an RL run.

A heterogeneous job of Slurm. Its first group of nodes, which the job's own options describe, trains; every further one
is for the parts that it names. Ray's nodes say whose they are, and placement puts the parts there.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import NoReturn

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.placement import AGENT, ENGINE, JUDGE, called, check_apart, groups
from openrlhf.launcher.slurm.names import count_gpus, gpus_of_gres
from openrlhf.launcher.slurm.sbatch_arguments import OptionError, check_arguments
from openrlhf.launcher.subcommand_parser import SubcommandParser
from openrlhf.learner.spec import Role

MEMBERS = {called(name): name for name in (ENGINE, JUDGE, Role.CRITIC, Role.REFERENCE, Role.REWARD)} | {"agents": AGENT}
"""What users call a part of a run -> its name in the placement."""

OWN = (
    "partition",
    "account",
    "qos",
    "reservation",
    "constraint",
    "nodelist",
    "exclude",
    "gres",
    "gpus-per-node",
    "mem",
    "mem-per-gpu",
    "mem-per-cpu",
)
"""Options of a group that go to sbatch as they are."""
KNOWN = ("nodes", "cpus-per-task", "exclusive")
"""Its other options."""
INHERITED = ("partition", "account", "qos", "reservation")
"""Options that a group has from the job where it has none of its own."""


def read_groups(options: argparse.Namespace) -> list[argparse.Namespace]:
    """The further groups of `--het`, as options of their own with `members`. Raises OptionError."""
    found = [_read_group(text, options) for text in options.het]
    named = [member for group in found for member in group.members]
    if twice := sorted({name for name in named if named.count(name) > 1}):
        raise OptionError(f"--het names {', '.join(twice)} twice: one group of nodes for each")
    return found


def _read_group(text: str, options: argparse.Namespace) -> argparse.Namespace:
    names, equals, words = text.partition("=")
    members = tuple(name.strip() for name in names.split(","))
    if not equals or not words.strip():
        raise OptionError(f"--het {text!r}: write --het engines='--nodes 2 --gpus-per-node 8'")
    if wrong := [name for name in members if name not in MEMBERS]:
        train = "; the actor trains on the nodes of the job's own options" if "actor" in wrong else ""
        raise OptionError(f"--het {wrong[0]}: this is no part to set nodes apart for: {', '.join(MEMBERS)}{train}")
    parser = _GroupParser("slurm --het", names)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--cpus-per-task", type=int)
    parser.add_argument("--exclusive", action="store_true")
    for name in OWN:
        inherited = name in INHERITED
        parser.add_argument(f"--{name}", default=getattr(options, name.replace("-", "_")) if inherited else None)
    try:
        group = parser.parse_args(shlex.split(words))
        if group.nodes < 1:
            raise ValueError(f"--nodes {group.nodes} must be at least 1")
        check_arguments(argparse.Namespace(**vars(group), sbatch_arg=[], srun_arg=[]), OWN)
    except ValueError as error:
        raise OptionError(f"--het {names}: {error}") from None
    group.members = members
    return group


class _GroupParser(SubcommandParser):
    """Its mistakes are those of `--het`."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; it takes {', '.join(f'--{name}' for name in (*KNOWN, *OWN))}")


def gpus_of(group: argparse.Namespace) -> int:
    """GPUs on each node of a group; 0 where it asks for none."""
    return count_gpus(group.gpus_per_node) if group.gpus_per_node else gpus_of_gres(group.gres or "")


def members_of(found: Sequence[argparse.Namespace]) -> tuple[tuple[str, ...], ...]:
    """The members of each group, as placement calls them."""
    return tuple(tuple(MEMBERS[name] for name in group.members) for group in found)


def check_groups(
    config: TrainPPOConfig, options: argparse.Namespace, found: Sequence[argparse.Namespace], gpus: int
) -> None:
    """Raises OptionError where the run has no such part, or more devices than its nodes.

    gpus: on each of the job's own nodes; 0 where that is not said.
    """
    apart = members_of(found)
    everyone = {member for part in apart for member in part}
    taken = groups(config)
    there = {member for group in taken if group.devices for member in group.members} | {AGENT}
    for group in found:
        if absent := [name for name in group.members if MEMBERS[name] not in there]:
            raise OptionError(f"--het {absent[0]}: the run has none: drop it")
    try:
        check_apart(config, everyone)
    except ValueError as error:
        raise OptionError(f"--het: {error}") from None
    if not gpus:
        return
    places = [("the job's own", options.nodes, gpus, there - everyone)]
    for group, members in zip(found, apart, strict=True):
        places.append((f"--het {','.join(group.members)}: its", group.nodes, gpus_of(group), set(members)))
    for name, nodes, each, members in places:
        here = [group for group in taken if set(group.members) <= members]
        if (need := sum(group.devices for group in here)) > nodes * each:
            parts = ", ".join(f"{group}: {group.devices}" for group in here)
            raise OptionError(f"{name} {nodes} nodes have {nodes * each} GPUs, and {need} are needed ({parts})")
