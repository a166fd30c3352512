"""`Batch` and its padding."""

from __future__ import annotations

import pytest
import torch

from openrlhf.core.batch import Batch, pad_rows
from support.core_helpers import check


def make() -> Batch:
    attention = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    return Batch(
        tokens=torch.arange(12).view(3, 4),
        attention_mask=attention,
        action_mask=attention & torch.tensor([[0, 0, 1, 1]], dtype=torch.bool),
        index=torch.tensor([5, 6, 7]),
        values=torch.arange(12.0).view(3, 4),
        rewards=torch.tensor([1.0, 2.0, 3.0]),
        extra={"images": ["a", "b", "c"]},
    )


def test_lengths_and_size() -> None:
    batch = make()
    assert batch.size == 3
    assert batch.lengths.tolist() == [4, 2, 3]


def test_select_cuts_to_the_longest_row() -> None:
    part = make().select([2, 1])
    assert part.tokens.tolist() == [[8, 9, 10], [4, 5, 6]]
    assert part.index.tolist() == [7, 6]
    assert part.rewards is not None
    assert part.rewards.tolist() == [3, 2]
    assert part.extra == {"images": ["c", "b"]}
    assert part.old_logprobs is None
    assert make().select([]).tokens.shape == (0, 0)


def test_with_and_to() -> None:
    batch = make().with_(values=None).to("cpu")
    assert batch.values is None
    assert batch.extra == {"images": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(3)}, r"tokens must be \[B, T\]"),
        ({"values": torch.zeros(3, 5)}, r"values must have shape \(3, 4\), got \(3, 5\)"),
        ({"rewards": torch.zeros(3, 4)}, r"rewards must have shape \(3,\)"),
    ],
)
def test_shapes_are_checked(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().with_(**change)


def test_pad_rows() -> None:
    check(pad_rows([[1, 2], [], [3]], width=3, value=-1, dtype=torch.float32), [[1, 2, -1], [-1, -1, -1], [3, -1, -1]])
