"""What a job runs on its nodes: the one description that a submission, a batch script and every node agree on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from openrlhf.launcher.slurm.ports import BASE

PartKind = Literal["ray", "ranks", "program"]


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """What to run. command: an argument vector. resume: arguments added in every life but the first.

    part: `ray` for a Ray node on every node and the command on the first; `ranks` for the command on every node, once
    per GPU of it (once without GPUs), as ranks of one process group; `program` for the command alone, on one node.
    checkpoints: where it saves, to see progress, and what a warning makes it do; empty: it saves nothing.
    start_seconds: for all nodes to be there. interface: the network interface that nodes talk over; empty: by their
    names. apart: of every further part of a heterogeneous job, which members of the run its nodes are for.
    """

    command: tuple[str, ...]
    part: PartKind = "ray"
    resume: tuple[str, ...] = ()
    checkpoints: str = ""
    max_restarts: int = 3
    port_base: int = BASE
    temp_dir: str = ""
    interface: str = ""
    apart: tuple[tuple[str, ...], ...] = ()
    start_seconds: float = 600.0

    def argv(self, restarts: int) -> list[str]:
        """The command of a life. The newest checkpoint is found by the trainer, so nothing here grows stale."""
        return [*self.command, *(self.resume if restarts else ())]

    def node_command(self) -> list[str]:
        """The node runner with this spec as a command."""
        return [self.command[0], "-m", "openrlhf.launcher.slurm.node", json.dumps(asdict(self))]


def from_json(text: str) -> NodeSpec:
    """The spec of `NodeSpec.node_command`."""
    values = json.loads(text)
    apart = tuple(tuple(part) for part in values["apart"])
    return NodeSpec(**values | {name: tuple(values[name]) for name in ("command", "resume")} | {"apart": apart})


@dataclass(frozen=True)
class NodeCheck:
    """A subcommand of `openrlhf-launch` with these words on every node of a job, which is ended with its status."""

    python: str
    words: tuple[str, ...]
    name: str = "selfcheck"

    def __call__(self) -> int:
        """Run it on this node."""
        import sys

        from openrlhf.launcher.main import main

        code = main([self.name, *self.words])
        if code:
            sys.exit(code)
        return code

    def node_command(self) -> Sequence[str]:
        """The same as a command."""
        return [self.python, "-m", "openrlhf.launcher.main", self.name, *self.words]
