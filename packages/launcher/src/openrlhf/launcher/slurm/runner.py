"""The process on each node of a run. On the head: Ray's head, then the trainer; on the others: a Ray worker.

The trainer's exit status is the run's. Whatever happens, Ray, the trainer and all of their children end with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

from openrlhf.launcher.ray import node as ray_node
from openrlhf.launcher.ray.leftovers import NODE_VARIABLE, sweep
from openrlhf.launcher.secret_flags import VARIABLE as SECRET_FLAGS
from openrlhf.launcher.slurm.addresses import join_port, own_address, resolve
from openrlhf.launcher.slurm.allocation import Allocation
from openrlhf.launcher.slurm.control import Head, Line, find_head
from openrlhf.launcher.slurm.folders import TempDir, choose_temp_dir
from openrlhf.launcher.slurm.ports import BASE, HeldBlock, candidates, hold_block
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

START_EXIT = 90
"""The cluster did not come up."""
LOST_EXIT = 91
"""A node or its Ray ended during the run."""
POLL = 0.2
WARN_AGAIN = 10.0
"""Seconds between two warnings of a trainer that may not have been listening yet."""
PROBE_SECONDS = 5.0
"""For the other nodes to answer when the trainer has failed: a lost node may be why."""
END_SECONDS = 2.0
"""For an orderly end of the trainer after TERM; Slurm's KillWait may leave us five seconds in all."""


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """What to run. command: the trainer, an argument vector. resume: arguments added in every life but the first.

    checkpoints: where the trainer saves, to see progress; empty: unknown. start_seconds: for all nodes to be there.
    """

    command: tuple[str, ...]
    resume: tuple[str, ...] = ()
    checkpoints: str = ""
    max_restarts: int = 3
    port_base: int = BASE
    temp_dir: str = ""
    start_seconds: float = 600.0

    def argv(self, restarts: int) -> list[str]:
        """The command of a life. The newest checkpoint is found by the trainer, so nothing here grows stale."""
        return [*self.command, *(self.resume if restarts else ())]

    def node_command(self) -> list[str]:
        """The node runner with this spec as a command."""
        return [self.command[0], "-m", "openrlhf.launcher.slurm.node", json.dumps(asdict(self))]


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
        self.node_environ = ray_node.run_environment(self.environ, token=self.token, mark=self.mark)
        folder = block = None
        try:
            path, note = choose_temp_dir(here.job_id, self.environ, self.spec.temp_dir)
            if note:
                self.say(note)
            folder = TempDir(path)
            block = hold_block(candidates(here.job_id, self.spec.port_base))
            self.say(f"node {here.index} of {len(here.nodes)}, ports from {block.block.first}, Ray in {path}")
            return HeadRun(self, block, path).run() if here.is_head else WorkerRun(self, block).run()
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
    """The head's part: Ray's head, the other nodes, the trainer."""

    def __init__(self, runner: NodeRunner, block: HeldBlock, temp_dir: Path) -> None:
        self.runner, self.spec, self.here = runner, runner.spec, runner.allocation
        self.block, self.temp_dir = block.block, temp_dir
        self.ip = own_address(self.here.host, nodes=len(self.here.nodes))
        self.address = join_port(self.ip, self.block.first)
        self.checkpoints = Path(self.spec.checkpoints) if self.spec.checkpoints else None
        self.first_step = newest_step(self.checkpoints)
        self.trainer: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """From Ray's start to the trainer's exit status."""
        self.head = Head(self.block.control, self.runner.token, self.here.nodes)
        self.ray = ray_node.RayNode(self._arguments(), self.runner.node_environ)
        try:
            self._wait_for_nodes()
            return self._train()
        finally:
            if self.trainer is not None:
                ray_node.end_child(self.trainer, END_SECONDS)
            self.head.end()
            self.ray.stop()

    def _arguments(self) -> list[str]:
        common = ray_node.node_arguments(cpus=self.here.cpus, gpus=self.here.gpus)
        own = ["--head", f"--node-ip-address={self.ip}", f"--temp-dir={self.temp_dir}", "--include-dashboard=false"]
        return [*own, *self.block.head_arguments(), *common, *self.block.node_arguments()]

    def _poll(self) -> None:
        self.head.poll(POLL, lambda: {"address": self.address})
        self.runner.check_end()
        self._check_nodes()
        code = self.ray.poll()
        if code is not None:
            self._lost(f"Ray on the head ended with {code}")

    def _check_nodes(self) -> None:
        for name, why in self.head.lost.items():
            self._lost(f"{name} left the run: {why}")

    def _lost(self, why: str) -> None:
        if self.trainer is None:
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
        command = [sys.executable, "-m", "openrlhf.launcher.ray.node", self.address, str(count), str(seconds)]
        alive = ray_node.start_shielded(command, self.runner.node_environ)
        try:
            while alive.poll() is None or self.head.missing:
                self._poll()
                if self.runner.signals.warned:
                    raise EndedError(REFUSED_EXIT, "warned before the trainer started; no requeue: nothing was done")
                if time.monotonic() > deadline or alive.poll() not in (None, 0):
                    names = ", ".join(self.head.missing) or "none, but Ray has fewer"
                    raise EndedError(START_EXIT, f"after {seconds:.0f} s {count} nodes are not up; missing: {names}")
        finally:
            alive.kill()
            alive.wait()
        self.ray.is_up()
        self.runner.say(f"all {count} nodes are up: {', '.join(self.here.nodes)}")

    def _train(self) -> int:
        secret = {k: v for k, v in self.runner.environ.items() if k == SECRET_FLAGS}
        environ = self.runner.node_environ | {"RAY_ADDRESS": self.address} | secret
        argv = self.spec.argv(self.here.restarts)
        self.trainer = ray_node.start_shielded(argv, environ)
        warned_at = None
        while (code := self.trainer.poll()) is None:
            self._poll()
            if self.runner.signals.warned and (warned_at is None or time.monotonic() - warned_at > WARN_AGAIN):
                if warned_at is None:
                    self.runner.say("warned: asking the trainer to save and end")
                warned_at = time.monotonic()
                self.trainer.send_signal(signal.SIGUSR1)
        self.runner.check_end()
        if warned_at is None or code not in (REQUEUE_EXIT, -signal.SIGUSR1):
            if code:
                self.head.probe(PROBE_SECONDS)
                self._check_nodes()
            return code if code >= 0 else 128 - code
        decision = self._decide()
        self.runner.say(f"{'requeue' if decision.requeue else 'no requeue'}: {decision.reason}")
        return REQUEUE_EXIT if decision.requeue else REFUSED_EXIT

    def _decide(self) -> Decision:
        return decide(
            restarts=self.here.restarts,
            limit=self.spec.max_restarts,
            before=self.first_step if self.checkpoints else -1,
            after=newest_step(self.checkpoints) if self.checkpoints else 0,
            preempted=was_preempted(self.here.job_id),
        )


class WorkerRun:
    """Another node's part: find the head, join its Ray, leave when it says so."""

    def __init__(self, runner: NodeRunner, block: HeldBlock) -> None:
        self.runner, self.block = runner, block.block

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
            return [a for a in resolve(here.head) if not a.startswith("127.") and a != "::1"] or resolve(here.head)

        return find_head(addresses, ports, self.runner.token, here.index, spec.start_seconds)

    def _take_part(self, line: Line, address: str) -> int:
        here = self.runner.allocation
        ip = own_address(here.host, nodes=len(here.nodes))
        arguments = [*ray_node.node_arguments(cpus=here.cpus, gpus=here.gpus), *self.block.node_arguments()]
        own = [f"--address={address}", f"--node-ip-address={ip}"]
        ray = ray_node.RayNode([*own, *arguments], self.runner.node_environ)
        try:
            while True:
                self.runner.check_end()
                code = ray.poll()
                if code is not None:
                    line.send(failed=f"its Ray ended with {code}")
                    raise EndedError(0, f"Ray on this node ended with {code}: the head decides what follows")
                message = line.receive(POLL)
                if message is not None and message.get("end"):
                    return 0
                if message is not None and message.get("ping"):
                    line.send(pong=True)
        except ConnectionError as error:
            raise EndedError(LOST_EXIT, f"the head is gone ({error}): leaving") from None
        finally:
            ray.stop()
