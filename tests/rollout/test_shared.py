"""Pushes in shared memory: what is killed, stopped or kept in the middle, how much memory is used and what is left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from openrlhf.rollout.weights.group import GroupAddress, WeightGroup
from openrlhf.rollout.weights.sender import WeightSender
from openrlhf.rollout.weights.shared import RING, SharedReceiver
from openrlhf.rollout.weights.wire import BucketPlan, plan_buckets, specs_of
from support import weight_processes
from support.weight_processes import BUCKET, PLAN, weights

CONTEXT = multiprocessing.get_context("spawn")
PATIENCE_S = 60.0


class Children:
    """Processes of `weight_processes`; all are killed at the end."""

    def __init__(self) -> None:
        self.processes: list[Any] = []

    def start(self, target: Any, *args: Any, **kwargs: Any) -> tuple[Any, Connection]:
        ours, theirs = CONTEXT.Pipe()
        places = {weight_processes.send: (theirs, *args), weight_processes.receive: (*args, theirs)}
        process = CONTEXT.Process(target=target, args=places[target], kwargs=kwargs)
        process.start()
        theirs.close()
        self.processes.append(process)
        return process, ours

    def receivers(self, address: GroupAddress, stops: list[bool]) -> list[tuple[Any, Connection]]:
        return [self.start(weight_processes.receive, address, 1 + i, stops=stop) for i, stop in enumerate(stops)]


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    shared_files = sorted(os.listdir("/dev/shm"))
    yield made
    for process in made.processes:
        process.kill()
        process.join(PATIENCE_S)
    left = set(os.listdir("/dev/shm")) - set(shared_files)
    assert not [name for name in left if "openrlhf" in name]
    gc.collect()  # errors refer to what was under way
    assert open_memory() == []


def open_memory() -> list[str]:
    """Slots that this process still has."""
    names = []
    for file in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{file}"))
        except FileNotFoundError:
            continue
    return [name for name in names if "openrlhf-weights" in name]


def said(pipe: Connection) -> Any:
    assert pipe.poll(PATIENCE_S)
    return pipe.recv()


def test_a_receiver_killed_in_the_middle_ends_the_push_and_a_new_one_gets_everything(children: Children) -> None:
    sender = WeightSender(timeout_s=PATIENCE_S)
    staying, leaving = children.receivers(sender.open(3, 0), [False, True])
    sender.connect()
    pushing = ThreadPoolExecutor(1).submit(sender.send, [weights(1)], PLAN, 1)
    assert [said(leaving[1]), said(leaving[1])] == ["joined", "halfway"]
    began = time.monotonic()
    leaving[0].kill()
    with pytest.raises(RuntimeError, match="engine worker 2 is gone"):
        pushing.result(PATIENCE_S)
    assert said(staying[1]) == "joined"
    # it had all of it before the other was killed, and then waited for the next one
    assert said(staying[1]) in (True, "weight push: the trainer is gone")
    assert time.monotonic() - began < PATIENCE_S / 2  # at once, and not when the time is out
    again = children.receivers(sender.open(3, 1), [False, False])
    sender.connect()
    sender.send([weights(1)], PLAN, 1)
    assert [[said(pipe), said(pipe)] for _, pipe in again] == [["joined", True]] * 2
    sender.close()


def test_a_sender_killed_in_the_middle_frees_its_receivers_at_once(children: Children) -> None:
    sender, pipe = children.start(weight_processes.send, 2, PATIENCE_S)
    receivers = children.receivers(said(pipe), [False, False])
    assert said(pipe) == "halfway"
    began = time.monotonic()
    sender.kill()
    for _, answers in receivers:
        assert [said(answers), said(answers)] == ["joined", True]
        assert "the trainer is gone" in said(answers)
    assert time.monotonic() - began < PATIENCE_S / 2


def test_a_receiver_that_stops_fails_the_push_when_the_time_is_out(children: Children) -> None:
    sender = WeightSender(timeout_s=PATIENCE_S)
    ((process, pipe),) = children.receivers(sender.open(2, 0), [False])
    sender.connect()
    shared: Any = sender._group.shared  # type: ignore[union-attr]
    shared._timeout_s = 1.0
    assert said(pipe) == "joined"
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"engine workers \[1\] did not answer within 1 s"):
        sender.send([weights(1)], PLAN, 1)


def test_a_sender_that_stops_fails_the_push_when_the_time_is_out(children: Children) -> None:
    _, pipe = children.start(weight_processes.send, 1, PATIENCE_S)
    group = WeightGroup.join(said(pipe), 1)
    assert dict(group.receive(PLAN, 1))
    receiver: Any = group._receiver
    receiver._connection.settimeout(1.0)
    with pytest.raises(RuntimeError, match="the trainer did not answer within 1 s"):
        list(group.receive(PLAN, 2))
    group.close()


@pytest.fixture
def joined() -> Iterator[tuple[WeightSender, list[WeightGroup]]]:
    """A sender with two receivers in this process."""
    with ThreadPoolExecutor(2) as pool:
        sender = WeightSender(timeout_s=PATIENCE_S)
        address = sender.open(3, 0)
        joining = [pool.submit(WeightGroup.join, address, rank) for rank in (1, 2)]
        sender.connect()
        groups = [future.result() for future in joining]
    yield sender, groups
    sender.close()
    for group in groups:
        group.close()


def read(group: WeightGroup, plan: BucketPlan, version: int) -> dict[str, torch.Tensor]:
    """A push, copied."""
    return {name: tensor.clone() for name, tensor in group.receive(plan, version)}


def same(got: dict[str, torch.Tensor], wanted: list[tuple[str, torch.Tensor]]) -> bool:
    return list(got) == [name for name, _ in wanted] and all(torch.equal(got[name], own) for name, own in wanted)


def slots(sender: WeightSender) -> int:
    return len(sender._group.shared._slots)  # type: ignore[union-attr]


def test_pushes_use_the_memory_of_a_few_messages(joined: tuple[WeightSender, list[WeightGroup]]) -> None:
    sender, groups = joined
    assert len(PLAN.buckets) > RING

    with ThreadPoolExecutor(2) as pool:
        for version in range(1, 4):
            reading = [pool.submit(read, group, PLAN, version) for group in groups]
            sender.send([weights(version)], PLAN, version)
            assert all(same(future.result(PATIENCE_S), weights(version)) for future in reading)
            assert slots(sender) == RING


def test_what_a_receiver_keeps_or_changes_is_its_own(joined: tuple[WeightSender, list[WeightGroup]]) -> None:
    sender, groups = joined
    kept: dict[int, list[torch.Tensor]] = {}

    def keep(group: WeightGroup, version: int) -> None:
        kept[version] = [tensor for _, tensor in group.receive(PLAN, version)]

    def spoil(group: WeightGroup, version: int) -> bool:
        right = []
        for (_, tensor), (_, own) in zip(group.receive(PLAN, version), weights(version), strict=True):
            right.append(torch.equal(tensor, own))
            tensor.zero_()
        return all(right)

    with ThreadPoolExecutor(2) as pool:
        for version in (1, 2):
            keeping, spoiling = pool.submit(keep, groups[0], version), pool.submit(spoil, groups[1], version)
            sender.send([weights(version)], PLAN, version)
            keeping.result(PATIENCE_S)
            assert spoiling.result(PATIENCE_S)
    assert slots(sender) > RING
    for version in (1, 2):  # those of push 1 lay in slots of their own during push 2
        assert all(torch.equal(t, own) for t, (_, own) in zip(kept[version], weights(version), strict=True))


def test_a_slot_grows_for_a_larger_tensor(joined: tuple[WeightSender, list[WeightGroup]]) -> None:
    sender, groups = joined
    named = [*weights(1), ("large", torch.arange(50_000.0)), *[(f"then-{n}", t) for n, t in weights(2)]]
    plan = plan_buckets(specs_of(named), BUCKET)
    with ThreadPoolExecutor(2) as pool:
        for version in (1, 2):
            reading = [pool.submit(read, group, plan, version) for group in groups]
            sender.send([named], plan, version)
            assert all(same(future.result(PATIENCE_S), named) for future in reading)
    assert slots(sender) == RING


def test_workers_of_another_host_take_gloo_in_the_same_push(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    reach = SharedReceiver.reach
    elsewhere = classmethod(lambda cls, name, rank, **more: None if rank == 1 else reach(name, rank, **more))
    monkeypatch.setattr(SharedReceiver, "reach", elsewhere)
    sender = WeightSender(timeout_s=PATIENCE_S)
    with ThreadPoolExecutor(3) as pool:
        address = sender.open(4, 0)
        joining = [pool.submit(WeightGroup.join, address, rank) for rank in (1, 2, 3)]
        sender.connect()
        groups = [future.result(PATIENCE_S) for future in joining]
        assert [group.far for group in groups] == [True, False, False]
        for version in (1, 2):
            reading = [pool.submit(read, group, PLAN, version) for group in groups]
            sender.send([weights(version)], PLAN, version)
            assert all(same(future.result(PATIENCE_S), weights(version)) for future in reading)
    assert "weights go to 2 engine workers in shared memory, to 1 over gloo" in caplog.text
    sender.close()
    for group in groups:
        group.close()


def test_a_machine_without_such_memory_takes_gloo_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    sender = WeightSender(timeout_s=PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(WeightGroup.join, sender.open(2, 0), 1)
        sender.connect()
        group = joining.result(PATIENCE_S)
        reading = pool.submit(read, group, PLAN, 1)
        sender.send([weights(1)], PLAN, 1)
        assert same(reading.result(PATIENCE_S), weights(1))
    assert caplog.text.count("weights go over gloo: this machine has no shared memory for them") == 1
    sender.close()
    group.close()


def test_an_engine_that_was_told_another_push_says_so(joined: tuple[WeightSender, list[WeightGroup]]) -> None:
    sender, groups = joined
    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(read, group, PLAN, 7) for group in groups]
        sending = pool.submit(sender.send, [weights(6)], PLAN, 6)
        for future, group in zip(reading, groups, strict=True):
            with pytest.raises(RuntimeError, match=r"the trainer pushes version 6 .* was told version 7"):
                future.result(PATIENCE_S)
            group.close()
        with pytest.raises(RuntimeError, match="is gone"):
            sending.result(PATIENCE_S)


def test_open_files_are_two_per_slot_and_process(joined: tuple[WeightSender, list[WeightGroup]]) -> None:
    sender, groups = joined
    with ThreadPoolExecutor(2) as pool:
        for version in range(1, 6):
            reading = [pool.submit(read, group, PLAN, version) for group in groups]
            sender.send([weights(version)], PLAN, version)
            assert all(same(future.result(PATIENCE_S), weights(version)) for future in reading)
    gc.collect()
    assert 0 < len(open_memory()) <= 2 * RING * (1 + len(groups))


def test_an_end_that_is_dropped_closes_without_a_warning() -> None:
    sender = WeightSender(timeout_s=PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(WeightGroup.join, sender.open(2, 0), 1)
        sender.connect()
        group = joining.result(PATIENCE_S)
    dropped = WeightSender(timeout_s=PATIENCE_S)
    dropped.open(2, 0)  # whose meeting point nobody has reached
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del sender, joining, dropped
        gc.collect()
        with pytest.raises(RuntimeError, match="the trainer is gone"):
            list(group.receive(PLAN, 1))
        del group
        gc.collect()
    assert not [str(w.message) for w in caught if issubclass(w.category, ResourceWarning)]
