"""Processes for tests of pushes in shared memory: a sender and receivers that are killed or stopped in the middle."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch

from openrlhf.rollout.weights.group import GroupAddress, WeightGroup
from openrlhf.rollout.weights.sender import WeightSender
from openrlhf.rollout.weights.wire import plan_buckets, specs_of

TENSORS, BUCKET = 12, 8192
HALFWAY = TENSORS // 2


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    """Tensors of about a bucket each."""
    return [(f"w{i}", torch.full((2000 + i,), float(100 * version + i))) for i in range(TENSORS)]


PLAN = plan_buckets(specs_of(weights(0)), BUCKET)


def receive(address: GroupAddress, rank: int, pipe: Connection, *, stops: bool) -> None:
    """Joins, reads pushes 1, 2, ... until one fails, and tells what it read of each or why it failed.

    stops: in the middle of the first push it says so and then does nothing more.
    """
    torch.set_num_threads(1)
    group = WeightGroup.join(address, rank)
    pipe.send("joined")
    version = 0
    try:
        while True:
            version += 1
            got = {}
            for name, tensor in group.receive(PLAN, version):
                got[name] = tensor.clone()
                if stops and len(got) == HALFWAY:
                    pipe.send("halfway")
                    time.sleep(120)
            pipe.send(all(torch.equal(got[name], tensor) for name, tensor in weights(version)))
    except RuntimeError as error:
        pipe.send(str(error))
    group.close()


def send(pipe: Connection, receivers: int, timeout_s: float) -> None:
    """Opens a group, sends a whole push, then half of one, says so and does nothing more."""
    torch.set_num_threads(1)
    sender = WeightSender(timeout_s=timeout_s)
    pipe.send(sender.open(1 + receivers, 0))
    sender.connect()
    sender.send([weights(1)], PLAN, 1)

    def stream():  # type: ignore[no-untyped-def]
        yield weights(2)[:HALFWAY]
        pipe.send("halfway")
        time.sleep(120)

    sender.send(stream(), PLAN, 2)
