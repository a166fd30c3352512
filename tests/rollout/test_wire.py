from __future__ import annotations

import pytest
import torch

from openrlhf.rollout.weights.wire import (
    BucketPlan,
    Packer,
    TensorSpec,
    aligned,
    plan_buckets,
    specs_of,
    torch_dtype,
    unpack,
)


def tensors() -> list[tuple[str, torch.Tensor]]:
    return [
        ("embed", torch.arange(12.0).reshape(3, 4)),
        ("q", torch.arange(4.0).reshape(2, 2)),
        ("steps", torch.tensor([7, 8], dtype=torch.int64)),
        ("norm", torch.ones(3)),
        ("scalar", torch.tensor(5.0)),
    ]


def test_buckets_keep_the_order_and_close_at_size_and_dtype() -> None:
    plan = plan_buckets(specs_of(tensors()), bucket_bytes=64)
    assert [[t.name for t in b.tensors] for b in plan.buckets] == [["embed", "q"], ["steps"], ["norm", "scalar"]]
    assert [b.dtype for b in plan.buckets] == ["float32", "int64", "float32"]
    assert [b.numel for b in plan.buckets] == [16, 2, 4]
    assert plan.nbytes == 64 + 16 + 16


def test_tensors_that_would_leave_the_next_one_between_two_places_travel_wider() -> None:
    specs = [TensorSpec("a", "bfloat16", (3,)), TensorSpec("b", "float32", (1,)), TensorSpec("c", "bfloat16", (2, 5))]
    assert [(s.name, s.dtype, s.nbytes) for s in aligned(specs)] == [
        ("a", "float32", 12),
        ("b", "float32", 4),
        ("c", "bfloat16", 20),
    ]
    assert aligned([specs[0], specs[2]]) == [specs[0], specs[2]]  # of one dtype: any place is right
    assert aligned([]) == []


def test_a_tensor_larger_than_a_bucket_travels_alone() -> None:
    specs = [TensorSpec("a", "float32", (2,)), TensorSpec("big", "float32", (100,)), TensorSpec("b", "float32", (2,))]
    assert [len(b.tensors) for b in plan_buckets(specs, 16).buckets] == [1, 1, 1]


def test_a_plan_survives_a_remote_call() -> None:
    plan = plan_buckets(specs_of(tensors()), 64)
    copy = BucketPlan.from_dict(plan.to_dict())
    assert copy == plan
    assert copy.digest == plan.digest
    assert plan_buckets(specs_of(tensors()), 48).digest != plan.digest


def test_pack_and_unpack_give_the_same_tensors() -> None:
    named = tensors()
    plan = plan_buckets(specs_of(named), 64)
    packer = Packer(plan)
    flats = [flat for name, tensor in named for flat in packer.add(name, tensor)]
    packer.finish()
    assert [f.dtype for f in flats] == [torch.float32, torch.int64, torch.float32]
    received = dict(pair for bucket, flat in zip(plan.buckets, flats, strict=True) for pair in unpack(bucket, flat))
    assert list(received) == [name for name, _ in named]
    for name, tensor in named:
        assert torch.equal(received[name], tensor)
        assert received[name].shape == tensor.shape


def test_packing_copies_and_casts_to_the_wire_dtype() -> None:
    source = torch.tensor([1.0, 1.0 + 2**-10])
    plan = plan_buckets(specs_of([("w", source), ("n", torch.tensor([3]))], dtype="bfloat16"), 64)
    assert [t.dtype for t in plan.tensors] == ["bfloat16", "int64"]
    (flat,) = Packer(plan).add("w", source)
    source.zero_()
    assert flat.tolist() == [1.0, 1.0]


def test_a_transposed_view_is_sent_in_its_logical_order() -> None:
    matrix = torch.arange(6.0).reshape(2, 3).T
    plan = plan_buckets(specs_of([("w", matrix)]), 64)
    (flat,) = Packer(plan).add("w", matrix)
    assert flat.tolist() == [0, 3, 1, 4, 2, 5]


def test_a_stream_that_does_not_follow_the_plan_is_refused() -> None:
    packer = Packer(plan_buckets(specs_of(tensors()), 64))
    with pytest.raises(ValueError, match=r"'q' has shape \(4,\), the push plan says \(2, 2\)"):
        packer.add("q", torch.zeros(4))
    packer = Packer(plan_buckets(specs_of(tensors()), 64))
    with pytest.raises(ValueError, match="'lm_head' is not in the push plan"):
        packer.add("lm_head", torch.zeros(1))
    packer.add("embed", torch.zeros(3, 4))
    with pytest.raises(ValueError, match="'embed' is not in the push plan, or came twice"):
        packer.add("embed", torch.zeros(3, 4))
    with pytest.raises(ValueError, match="without 4 planned weights, the first 'norm'"):
        packer.finish()


@pytest.mark.parametrize(
    ("specs", "size", "message"),
    [
        ([], 64, "at least one tensor"),
        ([TensorSpec("a", "float32", (1,))] * 2, 64, "'a' appears twice"),
        ([TensorSpec("a", "float32", (1,))], 0, "`bucket_bytes`"),
    ],
)
def test_impossible_plans_are_refused(specs: list[TensorSpec], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_buckets(specs, size)


def test_unknown_dtype() -> None:
    with pytest.raises(ValueError, match="'float31' is not a torch dtype"):
        torch_dtype("float31")
