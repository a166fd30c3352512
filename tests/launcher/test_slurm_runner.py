"""A node of a run beside the head: what it makes of an end of its Ray. Ray is a stand-in here."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from openrlhf.launcher.command_line import USAGE_EXIT
from openrlhf.launcher.ray import node
from openrlhf.launcher.redaction import FAILED
from openrlhf.launcher.signals import ALARM_EXIT, SAVED_EXIT
from openrlhf.launcher.slurm import runner
from openrlhf.launcher.slurm.allocation import Allocation
from openrlhf.launcher.slurm.control import Head
from openrlhf.launcher.slurm.parts import Place, make_part
from openrlhf.launcher.slurm.ports import PortBlock
from openrlhf.launcher.slurm.requeue import REFUSED_EXIT, REQUEUE_EXIT
from openrlhf.launcher.slurm.runner import LOST_EXIT, START_EXIT, EndedError, NodeRunner, WorkerRun
from openrlhf.launcher.slurm.spec import NodeSpec

NODES = ("n0", "n1")


@dataclass
class EndingRay:
    """Ends once it is said to be up; until then it would be started again."""

    up: bool = False
    stopped: bool = False

    def __call__(self, *args: Any) -> EndingRay:
        return self

    def poll(self) -> int | None:
        return 7 if self.up else None

    def is_up(self) -> None:
        self.up = True

    def stop(self) -> None:
        self.stopped = True


def test_a_ray_that_ends_early_in_a_run_is_told_to_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started again it would come without what the trainer ran in it: the head has to requeue."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        block = PortBlock(probe.getsockname()[1] - 9)
    ray = EndingRay()
    monkeypatch.setattr(node, "RayNode", ray)
    monkeypatch.setattr(runner, "candidates", lambda job, base: [block])
    monkeypatch.setattr(runner, "resolve", lambda host: ["127.0.0.1"])
    here = Allocation(job_id=1, nodes=NODES, index=1, cpus=1, gpus=0)
    own = NodeRunner(NodeSpec(command=("trainer",)), here, "secret")
    part = make_part(own.spec, Place(here=here, block=block, ip="127.0.0.1", environ={}))
    head = Head(block.control, "secret", NODES)
    ended: list[EndedError] = []

    def take_part() -> None:
        try:
            WorkerRun(own, part).run()
        except EndedError as end:
            ended.append(end)

    worker = threading.Thread(target=take_part)
    worker.start()
    while head.missing:
        head.poll(0.05, lambda: {"address": "127.0.0.1:1"})
    assert not head.lost
    head.tell(up=True)
    while not head.lost:
        head.poll(0.05, lambda: {"address": "127.0.0.1:1"})
    worker.join()
    head.end()
    assert head.lost == {"n1": "its Ray ended with 7"}
    assert "the head decides what follows" in str(ended[0])
    assert ray.stopped


def test_every_exit_status_means_one_thing() -> None:
    codes = [SAVED_EXIT, ALARM_EXIT, REFUSED_EXIT, START_EXIT, LOST_EXIT, USAGE_EXIT, FAILED]
    assert len(set(codes)) == len(codes)
    assert REQUEUE_EXIT == SAVED_EXIT  # the trainer's word for "start me again", handed on
