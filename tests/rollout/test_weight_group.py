from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from openrlhf.rollout.weights.group import WeightGroup
from openrlhf.rollout.weights.sender import WeightSender, header
from openrlhf.rollout.weights.wire import BucketPlan, plan_buckets, specs_of


def receive(group: WeightGroup, plan: BucketPlan, version: int = 1) -> dict[str, torch.Tensor]:
    """What an engine worker does, without vLLM."""
    return {name: tensor.clone() for name, tensor in group.receive(plan, version)}


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(f"w{i}", torch.randn(50 + i, generator=generator)) for i in range(8)]


@pytest.fixture
def pool():  # type: ignore[no-untyped-def]
    with ThreadPoolExecutor(8) as executor:
        yield executor


@pytest.fixture(params=[True, False], ids=["shared", "gloo"])
def shared(request: pytest.FixtureRequest) -> bool:
    """Whether workers on the sender's host read in shared memory."""
    return request.param


def connect(sender: WeightSender, pool: ThreadPoolExecutor, engines: int, generation: int = 0) -> list[WeightGroup]:
    address = sender.open(1 + engines, generation)
    joining = [pool.submit(WeightGroup.join, address, 1 + i) for i in range(engines)]
    sender.connect()
    return [j.result(timeout=20) for j in joining]


def test_every_engine_receives_every_push_unchanged(pool: ThreadPoolExecutor, shared: bool) -> None:  # B128
    sender = WeightSender(shared=shared)
    engines = connect(sender, pool, 3)
    plan = plan_buckets(specs_of(weights(0)), 500)
    assert len(plan.buckets) > 2
    for version in range(2):
        named = weights(version)
        receiving = [pool.submit(receive, g, plan, version) for g in engines]
        report = sender.send([named[:3], named[3:]], plan, version)
        assert report.nbytes == sum(t.nbytes for _, t in named)
        assert report.messages == len(plan.buckets) + 1
        for result in receiving:
            got = result.result(timeout=20)
            assert list(got) == [n for n, _ in named]
            assert all(torch.equal(got[n], t) for n, t in named)
    sender.close()
    for group in engines:
        group.close()


def test_a_broken_stream_frees_the_engines_at_once_and_a_new_generation_works(
    pool: ThreadPoolExecutor, shared: bool
) -> None:
    sender = WeightSender(timeout_s=280.0, shared=shared)  # the wait below is far shorter: nobody waits for this one
    plan = plan_buckets(specs_of(weights(0)), 500)
    (engine,) = connect(sender, pool, 1)
    receiving = pool.submit(receive, engine, plan)
    with pytest.raises(ValueError, match="without 3 planned weights"):
        sender.send([weights(0)[:5]], plan, 1)
    with pytest.raises(RuntimeError):
        receiving.result(timeout=60)
    engine.close()
    (engine,) = connect(sender, pool, 1, generation=1)
    receiving = pool.submit(receive, engine, plan, 2)
    sender.send([weights(2)], plan, 2)
    assert torch.equal(receiving.result(timeout=20)["w7"], weights(2)[7][1])
    sender.close()
    engine.close()


def test_an_engine_that_is_gone_fails_the_push_within_the_time_out(pool: ThreadPoolExecutor, shared: bool) -> None:
    sender = WeightSender(timeout_s=2.0, shared=shared)
    staying, leaving = connect(sender, pool, 2)
    leaving.close()
    plan = plan_buckets(specs_of(weights(0)), 500)
    receiving = pool.submit(receive, staying, plan)
    with pytest.raises(RuntimeError):
        sender.send([weights(0)], plan, 1)
    with pytest.raises(RuntimeError):
        receiving.result(timeout=60)
    staying.close()


def test_meeting_nobody_names_the_group_and_the_time_out(shared: bool) -> None:
    sender = WeightSender(timeout_s=0.5, shared=shared)
    address = sender.open(2, generation=3)
    with pytest.raises(RuntimeError, match=r"weight group generation 3: rank 0 of 2 could not meet .* within 0.5 s"):
        sender.connect()
    sender.close()
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 could not reach the sender at 127\.0\.0\.1"):
        WeightGroup.join(address, 1)


def test_the_header_tells_versions_and_plans_apart() -> None:
    one = plan_buckets(specs_of(weights(0)), 500)
    other = plan_buckets(specs_of(weights(0)[:-1]), 500)
    assert header(one, 1).tolist() != header(other, 1).tolist()
    assert header(one, 1).tolist() != header(one, 2).tolist()


def test_it_leaves_torch_distributed_alone(pool: ThreadPoolExecutor) -> None:
    sender = WeightSender()
    (engine,) = connect(sender, pool, 1)
    assert not torch.distributed.is_initialized()
    sender.close()
    engine.close()
    assert threading.active_count() < 30


def test_an_engine_that_fails_while_it_loads_frees_the_trainer_at_once(pool: ThreadPoolExecutor, shared: bool) -> None:
    named = [(f"t{i}", torch.zeros(12_000)) for i in range(40)]
    plan = plan_buckets(specs_of(named), 50_000)
    sender = WeightSender(timeout_s=20, shared=shared)
    (group,) = connect(sender, pool, 1)
    errors = []  # their tracebacks go on referring to what was under way

    def load() -> None:
        try:
            for name, _ in group.receive(plan, 1):
                if name == "t5":
                    raise ValueError("load broke")
        except ValueError as error:
            group.close()
            errors.append(error)

    loading = pool.submit(load)
    with pytest.raises(RuntimeError) as caught:
        sender.send([named], plan, 1)
    # gloo says "Connection reset by peer" when the stream ended, "Application timeout" when the trainer waited in vain
    assert "timeout" not in str(caught.value).lower()
    assert "did not answer" not in str(caught.value)
    loading.result(5)
    assert len(errors) == 1
