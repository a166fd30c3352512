"""The processes of a job on one node: a Ray node, with the trainer on the first one; or ranks of one process group.

All are shielded from Slurm's warning signals until they listen themselves, and end with `stop`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from openrlhf.launcher.placement import NODE_CAPACITY, REST, node_resource
from openrlhf.launcher.ray import node as ray_node
from openrlhf.launcher.secret_flags import VARIABLE as SECRET_FLAGS
from openrlhf.launcher.signals import SAVED_EXIT
from openrlhf.launcher.slurm.allocation import Allocation
from openrlhf.launcher.slurm.ports import PortBlock
from openrlhf.launcher.slurm.spec import NodeSpec
from openrlhf.launcher.threads import VARIABLE as THREADS

SAVED = (SAVED_EXIT, -signal.SIGUSR1)
"""What a process that was warned ends with; the second where it was not listening yet."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a part is. ip: how other nodes reach this one. environ: of its processes. temp_dir: Ray's folder."""

    here: Allocation
    block: PortBlock
    ip: str
    environ: Mapping[str, str]
    temp_dir: Path | None = None


class Part(Protocol):
    """What the node runner asks of a part. `begin`, then `up` once all nodes are there, `stop` in the end."""

    everywhere: bool
    """Whether the command runs on every node, so that the run ends when it has ended on all of them."""

    def begin(self, address: str) -> None:
        """Start what other nodes join, or what joins the head's `address`."""
        ...

    def gathered(self) -> bool:
        """Whether all nodes are there, as far as this part can see. Raises ValueError when that will not be."""
        ...

    def up(self, argv: Sequence[str]) -> None:
        """All nodes are there: start the command, on the nodes where it runs."""
        ...

    def failure(self) -> str:
        """Why this node cannot go on; empty while it can."""
        ...

    def poll(self) -> int | None:
        """The command's exit status on this node, None while it runs or where it does not; SAVED_EXIT if it saved."""
        ...

    def warn(self) -> None:
        """Ask the command to save and end."""
        ...

    def end(self, seconds: float) -> None:
        """TERM to the command, KILL after so many seconds."""
        ...

    def stop(self) -> None:
        """End everything on this node."""
        ...


def make_part(spec: NodeSpec, place: Place) -> Part:
    """The part that a spec names."""
    return RayPart(spec, place) if spec.part == "ray" else RanksPart(spec, place)


class RayPart:
    """A Ray node; on the head also the command, with the address of that Ray."""

    everywhere = False

    def __init__(self, spec: NodeSpec, place: Place) -> None:
        self._spec, self._place = spec, place
        self._main: subprocess.Popen[bytes] | None = None
        self._waiting: subprocess.Popen[bytes] | None = None

    def begin(self, address: str) -> None:
        here, block, self._address = self._place.here, self._place.block, address
        if here.is_head:
            own = ["--head", f"--temp-dir={self._place.temp_dir}", "--include-dashboard=false"]
            own += block.head_arguments()
        else:
            own = [f"--address={address}"]
        common = ray_node.node_arguments(cpus=here.cpus, gpus=here.gpus, resources=self._resources())
        arguments = [*own, f"--node-ip-address={self._place.ip}", *common, *block.node_arguments()]
        self._ray = ray_node.RayNode(arguments, self._place.environ)
        if here.is_head:
            words = [address, str(len(here.nodes)), str(self._spec.start_seconds)]
            command = [sys.executable, "-m", "openrlhf.launcher.ray.node", *words]
            self._waiting = ray_node.start_shielded(command, self._place.environ)

    def _resources(self) -> dict[str, float]:
        """Whose node this is, for placement: with parts of a heterogeneous job every node is somebody's."""
        group, apart = self._place.here.group, self._spec.apart
        members = (REST,) if group == 0 else apart[group - 1] if apart else ()
        everyone = {member for part in apart for member in part}
        return {node_resource(member, everyone): NODE_CAPACITY for member in members} if everyone else {}

    def gathered(self) -> bool:
        code = None if self._waiting is None else self._waiting.poll()
        if code:
            raise ValueError("Ray has fewer nodes than the job")
        return code == 0

    def up(self, argv: Sequence[str]) -> None:
        self._ray.is_up()  # from now on its end costs the run what ran here: the head has to know
        if self._place.here.is_head:
            environ = {**self._place.environ, **_secret_flags(), "RAY_ADDRESS": self._address}
            self._main = ray_node.start_shielded(argv, environ)

    def failure(self) -> str:
        code = self._ray.poll()
        return "" if code is None else f"Ray ended with {code}"

    def poll(self) -> int | None:
        return None if self._main is None else _saved_or(self._main.poll())

    def warn(self) -> None:
        if self._main is not None:
            self._main.send_signal(signal.SIGUSR1)

    def end(self, seconds: float) -> None:
        ray_node.end_children([p for p in (self._main, self._waiting) if p is not None], seconds)

    def stop(self) -> None:
        self.end(0)
        self._ray.stop()


class RanksPart:
    """The command once per GPU of this node, told who is where as torchrun tells it; or one program."""

    everywhere = True

    def __init__(self, spec: NodeSpec, place: Place) -> None:
        self._spec, self._place = spec, place
        self._ranks: list[subprocess.Popen[bytes]] = []

    def begin(self, address: str) -> None:
        self._master, _, self._port = address.rpartition(":")

    def gathered(self) -> bool:
        return True

    def up(self, argv: Sequence[str]) -> None:
        count = ranks_of(self._spec, self._place.here)
        for i in range(count):
            environ = {**self._place.environ, **_secret_flags(), **self._rank_environment(i, count)}
            self._ranks.append(ray_node.start_shielded(argv, environ))

    def _rank_environment(self, local: int, count: int) -> dict[str, str]:
        if self._spec.part == "program":
            return {}
        here = self._place.here
        threads = self._place.environ.get(THREADS) or str(max(1, here.cpus // count))
        return {
            "RANK": str(here.index * count + local),
            "WORLD_SIZE": str(len(here.nodes) * count),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": self._master.strip("[]"),
            "MASTER_PORT": self._port,
            THREADS: threads,
        }

    def failure(self) -> str:
        return ""

    def poll(self) -> int | None:
        codes = [_saved_or(rank.poll()) for rank in self._ranks]
        failed = [code for code in codes if code not in (None, 0, SAVED_EXIT)]
        if failed:
            return failed[0]
        if not codes or None in codes:
            return None
        return max(code for code in codes if code is not None)

    def warn(self) -> None:
        for rank in self._ranks:
            rank.send_signal(signal.SIGUSR1)

    def end(self, seconds: float) -> None:
        ray_node.end_children(self._ranks, seconds)

    def stop(self) -> None:
        self.end(ray_node.STOP_SECONDS)


def ranks_of(spec: NodeSpec, here: Allocation) -> int:
    """Processes of the command on a node."""
    return max(1, here.gpus) if spec.part == "ranks" else 1


def _saved_or(code: int | None) -> int | None:
    """An exit status as a shell shows it: 128 + n for signal n."""
    if code in SAVED:
        return SAVED_EXIT
    return code if code is None or code >= 0 else 128 - code


def _secret_flags() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k == SECRET_FLAGS}
