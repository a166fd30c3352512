"""`openrlhf-launch join RUN`: this machine becomes a node of the run's Ray, with engines on it, until it is told to go.

Made for a job that may be pre-empted: what ends it takes the node's engines with it, and the run goes on without them.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from openrlhf.launcher.machine import detect_machine
from openrlhf.launcher.ray.leftovers import NODE_VARIABLE, sweep
from openrlhf.launcher.ray.node import RayNode, node_arguments, run_environment
from openrlhf.launcher.redaction import report_error
from openrlhf.launcher.scaling.command import ANSWER_SECONDS, RUN_HELP
from openrlhf.launcher.scaling.desk import NotYetError, Order, RunningRun, ask, find_desk, read_run
from openrlhf.launcher.slurm.addresses import own_address
from openrlhf.launcher.slurm.allocation import read_allocation
from openrlhf.launcher.slurm.folders import TempDir, choose_temp_dir
from openrlhf.launcher.slurm.ports import candidates, hold_block
from openrlhf.launcher.slurm.requeue import REQUEUE_EXIT
from openrlhf.launcher.slurm.runner import EndedError, Signals
from openrlhf.launcher.subcommand_parser import SubcommandParser
from openrlhf.launcher.threads import usable_cores

UP_SECONDS = 300.0
"""For this node to be there, counted from the start of its Ray."""
POLL = 0.5
AGAIN = 5.0
"""Seconds until a run is asked again that does not see this machine yet."""
MAX_JOINS = 5
NO_JOB = 10**8
"""More than the number of any job of Slurm."""
LOST_EXIT = 91
"""The node's Ray ended while the run went on, or its engines always do."""


def main(argv: Sequence[str]) -> int:
    """Take part until the run ends or INT or TERM comes (0), or until a warning (USR1, USR2): 85, so that a job of
    `openrlhf-launch slurm` goes back into the queue. 91 when Ray ends here, 1 when refused."""
    options = read_options(argv)
    signals = Signals()
    signals.install()
    try:
        place = find_desk(options.run)
        Joining(place, read_run(place), signals, options.interface).take_part(options.engines)
    except EndedError as end:
        sys.stderr.write(f"openrlhf-launch join: {end}\n")
        return end.code
    except (OSError, ValueError) as error:
        return report_error(error)


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    """The words of the command line; ends the process with 2 for wrong ones."""
    parser = SubcommandParser(
        "join",
        "Make this machine a node of a running run's Ray and let engines join on it. They leave when this ends.",
        "%(prog)s RUN [options]",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--engines", type=int, metavar="K", help="engines on this machine (default: as many as its GPUs hold; 1 on CPU)"
    )
    parser.add_argument("--interface", default="", help="network interface over which the run reaches this machine")
    options = parser.parse_args(argv)
    if options.engines is not None and options.engines < 1:
        parser.error(f"--engines {options.engines}: give 1 at least")
    return options


class Joining:
    """One machine's part in a run."""

    def __init__(self, place: Path, run: RunningRun, signals: Signals, interface: str) -> None:
        self.place, self.run, self.signals, self.interface = place, run, signals, interface
        self.name = f"openrlhf-joined-{secrets.token_hex(6)}"
        self.host, self.gpus, self.cpus = socket.gethostname(), detect_machine().gpus, usable_cores()
        if "SLURM_JOB_ID" in os.environ:  # what the job was granted, where the site does not hide the rest
            here = read_allocation(os.environ, detected_gpus=self.gpus)
            self.host, self.gpus, self.cpus = here.host, here.gpus, here.cpus
        self.gpus = self.gpus if run.gpus else 0

    def take_part(self, engines: int | None) -> NoReturn:
        """From Ray's start to its end. Raises EndedError, or ValueError with the run's refusal."""
        room = self.gpus // self.run.width if self.run.gpus else self.cpus
        wanted = engines or (room if self.run.gpus else 1)
        if wanted > room or not room:
            raise ValueError(
                f"--engines {wanted}: this machine has {self.gpus} GPUs and {self.cpus} cores, room for {room} engines "
                f"of {self.run.width} {'GPUs' if self.run.gpus else 'cores'}"
            )
        block = hold_block(candidates(os.getpid()))
        alone = self.run.host == socket.gethostname()
        ip = own_address(self.host, nodes=1 if alone else 2, interface=self.interface)
        folder = own_folder(os.environ)
        own = [f"--address={self.run.ray}", f"--node-ip-address={ip}", f"--resources={json.dumps({self.name: 1})}"]
        own.append(f"--temp-dir={folder.path}")
        arguments = [*own, *node_arguments(cpus=self.cpus, gpus=self.gpus), *block.block.node_arguments()]
        self.ray = RayNode(arguments, node_environment(os.environ, self.run.token, self.name))
        try:
            self._stay(wanted)
        finally:
            self.ray.stop()
            sweep(self.name, folder.path, variable=NODE_VARIABLE, grace=1.0)
            folder.close()
            block.close()

    def _stay(self, wanted: int) -> NoReturn:
        """Have so many engines here until the end; one that is lost while this machine is well joins again."""
        there: list[str] = []
        for _ in range(MAX_JOINS):
            there += self._join(wanted - len(there))
            self.ray.is_up()
            sys.stdout.write(f"joined: {', '.join(there)}\n")
            sys.stdout.flush()
            while len(there) == wanted:
                time.sleep(POLL)
                there = [name for name in self._check().engines if name in there]
        raise EndedError(LOST_EXIT, f"engines on this machine were lost {MAX_JOINS} times: see the run's log")

    def _join(self, wanted: int) -> list[str]:
        """Until the engines are there: the run refuses as long as it does not see this node."""
        deadline, order = time.monotonic() + UP_SECONDS, Order(more=wanted, on=self.name)
        while True:
            try:
                return ask(self.place, order, timeout=ANSWER_SECONDS, alive=self._check)["joined"]
            except NotYetError:
                self._check()
                if time.monotonic() > deadline:
                    raise
                time.sleep(AGAIN)

    def _check(self) -> RunningRun:
        """The run as it is now. Raises EndedError when this machine is to leave."""
        if self.signals.ended_by or self.signals.warned:
            code = 0 if self.signals.ended_by else REQUEUE_EXIT
            raise EndedError(code, "told to end: the engines of this machine leave")
        code = self.ray.poll()
        try:
            run = read_run(self.place)
        except ValueError as error:
            raise EndedError(0, str(error)) from None
        if code is not None:
            raise EndedError(LOST_EXIT, f"Ray on this machine ended with {code}")
        return run


def own_folder(environ: Mapping[str, str]) -> TempDir:
    """Where Ray's files of this machine are. The run's own folder may be one that only its job's nodes have."""
    path, note = choose_temp_dir(int(environ.get("SLURM_JOB_ID", NO_JOB + secrets.randbelow(NO_JOB))), environ)
    if note:
        sys.stderr.write(f"openrlhf-launch join: {note}\n")
    return TempDir(path)


def node_environment(environ: Mapping[str, str], token: str, mark: str) -> dict[str, str]:
    """Of the node's Ray. Without a token the run's Ray is one that the user started, and has the user's own rules."""
    made = run_environment(environ, token=token, mark=mark)
    if token:
        return made
    auth = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    return {k: v for k, v in made.items() if k not in auth} | {k: environ[k] for k in auth if k in environ}
