"""The process on each node of a job: on the first it gathers the others and decides when and how the run ends.

What runs on the nodes is a part (`parts.py`): Ray with the trainer, or ranks. The command's exit status is the run's.
Whatever happens, its processes and all of their children end with it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from openrlhf.launcher.ray.leftovers import NODE_VARIABLE, sweep
from openrlhf.launcher.ray.node import run_environment
from openrlhf.launcher.slurm.addresses import join_port, known_to_slurm, own_address, resolve
from openrlhf.launcher.slurm.allocation import Allocation
from openrlhf.launcher.slurm.control import Head, Line, find_head
from openrlhf.launcher.slurm.folders import TempDir, choose_temp_dir
from openrlhf.launcher.slurm.parts import Part, Place, make_part, ranks_of
from openrlhf.launcher.slurm.ports import PortBlock, candidates, hold_block
from openrlhf.launcher.slurm.requeue import (
    REFUSED_EXIT,
    REQUEUE_EXIT,
    Decision,
    decide,
    forbid_requeue,
    newest_step,
    requeue,
    was_preempted,
)
from openrlhf.launcher.slurm.spec import NodeSpec

START_EXIT = 90
"""The nodes did not come together."""
LOST_EXIT = 91
"""A node, or its Ray, ended during the run."""
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
POLL = 0.2
WARN_AGAIN = 10.0
"""Seconds between two warnings of a trainer that may not have been listening yet."""
PROBE_SECONDS = 5.0
"""For the other nodes to answer when the trainer has failed: a lost node may be why."""
END_SECONDS = 2.0
"""For an orderly end of the trainer after TERM; Slurm's KillWait may leave us five seconds in all."""


@dataclass
class Signals:
    """What was asked of this process so far."""

    warned: bool = False
    ended_by: int = 0

    def install(self) -> None:
        """USR1 and USR2 warn, INT and TERM end."""
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, self._warn)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._end)

    def _warn(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        self.warned = True

    def _end(self, signum: int, frame: FrameType | None) -> None:
        del frame
        self.ended_by = self.ended_by or signum


class EndedError(Exception):
    """The run is over with exit status `code`; the text says why."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass
class NodeRunner:
    """One life of a run on one node. token: the job's secret, the same on all nodes."""

    spec: NodeSpec
    allocation: Allocation
    token: str
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    signals: Signals = field(default_factory=Signals)

    def run(self) -> int:
        """Take part until the end of the run. Returns this node's exit status."""
        here = self.allocation
        self.mark = f"{here.job_id}.{here.restarts}.{here.index}"
        folder = block = None
        try:
            if self.spec.part == "ray":
                path, note = choose_temp_dir(here.job_id, self.environ, self.spec.temp_dir)
                if note:
                    self.say(note)
                folder = TempDir(path)
            block = hold_block(candidates(here.job_id, self.spec.port_base))
            return self._take_part(block.block, folder)
        except EndedError as end:
            self.say(str(end))
            return end.code
        except (ValueError, OSError) as error:
            self.say(str(error))
            return START_EXIT
        finally:
            sweep(self.mark, variable=NODE_VARIABLE, grace=1.0)
            if folder is not None:
                folder.close()
            if block is not None:
                block.close()

    def _take_part(self, block: PortBlock, folder: TempDir | None) -> int:
        here = self.allocation
        where = "" if folder is None else f", Ray in {folder.path}"
        self.say(f"node {here.index} of {len(here.nodes)}, ports from {block.first}{where}")
        interface = self.spec.interface
        ip = own_address(here.host, nodes=len(here.nodes), interface=interface)
        environ = run_environment(self.environ, token=self.token, mark=self.mark)
        if interface:
            environ = dict.fromkeys(INTERFACE_VARIABLES, interface) | environ  # what the user has set wins
        temp_dir = None if folder is None else folder.path
        part = make_part(self.spec, Place(here=here, block=block, ip=ip, environ=environ, temp_dir=temp_dir))
        if here.is_head:
            return HeadRun(self, part, block.control, join_port(ip, block.first)).run()
        return WorkerRun(self, part).run()

    def say(self, text: str) -> None:
        """A line in the node's log."""
        sys.stderr.write(f"openrlhf-launch [{self.allocation.host}] {text}\n")
        sys.stderr.flush()

    def check_end(self) -> None:
        """Raise EndedError once INT or TERM came."""
        if self.signals.ended_by:
            name = signal.Signals(self.signals.ended_by).name
            raise EndedError(128 + self.signals.ended_by, f"{name} received: ending the run")


class HeadRun:
    """The head's part: it gathers the other nodes, and decides when and how the run ends."""

    def __init__(self, runner: NodeRunner, part: Part, control: int, address: str) -> None:
        self.runner, self.spec, self.here = runner, runner.spec, runner.allocation
        self.part, self.control, self.address = part, control, address
        self.checkpoints = Path(self.spec.checkpoints) if self.spec.checkpoints else None
        self.first_step = newest_step(self.checkpoints)
        self.started = False

    def run(self) -> int:
        """From the first node to the command's exit status."""
        self.head = Head(self.control, self.runner.token, self.here.nodes, ranks_of(self.spec, self.here))
        self.part.begin(self.address)
        try:
            self._wait_for_nodes()
            return self._run_command()
        finally:
            self.part.end(END_SECONDS)
            self.head.end()
            self.part.stop()

    def _poll(self) -> None:
        self.head.poll(POLL, lambda: {"address": self.address})
        self.runner.check_end()
        self._check_nodes()
        if why := self.part.failure():
            self._lost(f"{why} on the head")

    def _check_nodes(self) -> None:
        for name, why in self.head.lost.items():
            self._lost(f"{name} left the run: {why}")

    def _lost(self, why: str) -> None:
        if not self.started:
            raise EndedError(START_EXIT, why)
        decision = self._decide()
        verb = "requeue" if decision.requeue else "no requeue"
        if decision.requeue:
            requeue(self.here.job_id)  # srun ends with the highest status, which may be the lost node's
        else:
            forbid_requeue(self.here.job_id)
        raise EndedError(REQUEUE_EXIT if decision.requeue else LOST_EXIT, f"{why}; {verb}: {decision.reason}")

    def _wait_for_nodes(self) -> None:
        seconds, count = self.spec.start_seconds, len(self.here.nodes)
        deadline = time.monotonic() + seconds
        while self.head.missing or not self.part.gathered():
            self._poll()
            if self.runner.signals.warned and self.checkpoints:
                raise EndedError(REFUSED_EXIT, "warned before the trainer started; no requeue: nothing was done")
            if time.monotonic() > deadline:
                names = ", ".join(self.head.missing) or "none, but Ray has fewer"
                raise EndedError(START_EXIT, f"after {seconds:.0f} s {count} nodes are not up; missing: {names}")
        self.head.tell(up=True)
        self.runner.say(f"all {count} nodes are up: {', '.join(self.here.nodes)}")

    def _run_command(self) -> int:
        self.part.up(self.spec.argv(self.here.restarts))
        self.started = True
        warned_at = None
        while (code := self._status()) is None:
            self._poll()
            due = warned_at is None or time.monotonic() - warned_at > WARN_AGAIN
            if self.runner.signals.warned and self.checkpoints and due:
                if warned_at is None:
                    self.runner.say("warned: asking the trainer to save and end")
                warned_at = time.monotonic()
                self.part.warn()
        self.runner.check_end()
        if warned_at is None or code != REQUEUE_EXIT:
            if code:
                self.head.probe(PROBE_SECONDS)
                self._check_nodes()
            return code
        decision = self._decide()
        self.runner.say(f"{'requeue' if decision.requeue else 'no requeue'}: {decision.reason}")
        return REQUEUE_EXIT if decision.requeue else REFUSED_EXIT

    def _status(self) -> int | None:
        """The command's exit status; where it runs on every node, the first failure, else the last end."""
        own = self.part.poll()
        if not self.part.everywhere or own not in (None, 0, REQUEUE_EXIT):
            return own
        for index, code in self.head.ended.items():
            if code not in (0, REQUEUE_EXIT):
                self.runner.say(f"{self.here.nodes[index]}: a process of the run ended with {code}; see its log")
                return code
        if own is None or len(self.head.ended) < len(self.here.nodes) - 1:
            return None
        return max(own, *self.head.ended.values(), 0)

    def _decide(self) -> Decision:
        return decide(
            restarts=self.here.restarts,
            limit=self.spec.max_restarts,
            before=self.first_step if self.checkpoints else -1,
            after=newest_step(self.checkpoints) if self.checkpoints else 0,
            preempted=was_preempted(self.here.job_id),
        )


class WorkerRun:
    """Another node's part: find the head, join it, leave when it says so."""

    def __init__(self, runner: NodeRunner, part: Part) -> None:
        self.runner, self.part = runner, part

    def run(self) -> int:
        """0 after an orderly end, whatever the run's own exit status is: that is the head's to report."""
        line, welcome = self._find()
        try:
            return self._take_part(line, str(welcome["address"]))
        finally:
            line.close()

    def _find(self) -> tuple[Line, dict[str, object]]:
        here, spec = self.runner.allocation, self.runner.spec
        ports = [block.control for block in candidates(here.job_id, spec.port_base)]

        def addresses() -> list[str]:
            self.runner.check_end()
            found = resolve(here.head) or known_to_slurm(here.head)
            return [a for a in found if not a.startswith("127.") and a != "::1"] or found

        return find_head(addresses, ports, self.runner.token, here.index, spec.start_seconds, ranks_of(spec, here))

    def _take_part(self, line: Line, address: str) -> int:
        here, spec, told = self.runner.allocation, self.runner.spec, False
        self.part.begin(address)
        try:
            while True:
                self.runner.check_end()
                if why := self.part.failure():
                    line.send(failed=f"its {why}")
                    raise EndedError(0, f"{why} on this node: the head decides what follows")
                if not told and (code := self.part.poll()) is not None:
                    told = True
                    line.send(ended=code)
                message = line.receive(POLL)
                if message is not None and message.get("end"):
                    return 0
                if message is not None and message.get("up"):
                    self.part.up(spec.argv(here.restarts))
                if message is not None and message.get("ping"):
                    line.send(pong=True)
        except ConnectionError as error:
            raise EndedError(LOST_EXIT, f"the head is gone ({error}): leaving") from None
        finally:
            self.part.stop()
