from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.agents.types import StopReason, Trajectory, Turn
from openrlhf.core.batch import Batch
from openrlhf.launcher.ranks.batches import RankBatch, build_batch
from openrlhf.launcher.samples import SampleRef, cut
from openrlhf.launcher.trainer.plan import cut_mini_batches, split_over_ranks


def trajectory(**changes: Any) -> Trajectory:
    """Prompt [5, 6], first turn [7, 8] at version 3, environment [9], second turn [10] at version 4."""
    sample = Trajectory(
        token_ids=[5, 6, 7, 8, 9, 10],
        trainable=[0, 0, 1, 1, 0, 1],
        logprobs=[0.0, 0.0, -0.25, -0.5, 0.0, -1.0],
        versions=[-1, -1, 3, 3, -1, 4],
        prompt_length=2,
        turns=[Turn(start=2, end=4, finish_reason="stop"), Turn(start=5, end=6, finish_reason="stop")],
        stop_reason=StopReason.DONE,
        group_id="e0-p0",
        sample_index=0,
        reward=1.0,
        score=0.5,
    )
    return replace(sample, **changes)


SHORT = trajectory(
    token_ids=[4, 3],
    trainable=[0, 1],
    logprobs=[0.0, -2.0],
    versions=[-1, 5],
    prompt_length=1,
    turns=[Turn(start=1, end=2, finish_reason="stop")],
)


def test_two_samples_by_hand() -> None:
    batch = build_batch([trajectory(), SHORT], indices=[7, 3], rewards=[0.5, -1.0], max_len=100, pad_token_id=99)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 10], [4, 3, 99, 99, 99, 99]]
    assert batch.attention_mask.int().tolist() == [[1] * 6, [1, 1, 0, 0, 0, 0]]
    assert batch.action_mask.int().tolist() == [[0, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0]]
    assert batch.index.tolist() == [7, 3]
    assert batch.rollout_logprobs is not None
    assert batch.rollout_logprobs.tolist() == [[0.0, 0.0, -0.25, -0.5, 0.0, -1.0], [0.0, -2.0, 0.0, 0.0, 0.0, 0.0]]
    assert batch.versions is not None
    assert batch.versions.tolist() == [[-1, -1, 3, 3, -1, 4], [-1, 5, -1, -1, -1, -1]]
    assert batch.rewards is not None
    assert batch.rewards.tolist() == [0.5, -1.0]
    assert batch.extra is None


def test_cut_to_max_len() -> None:
    batch = build_batch([trajectory(), SHORT], indices=[0, 1], rewards=[0.0, 0.0], max_len=3)
    assert batch.tokens.tolist() == [[5, 6, 7], [4, 3, 0]]
    assert batch.action_mask.int().tolist() == [[0, 0, 1], [0, 1, 0]]
    short = cut(trajectory(), 3)
    assert list(short.turns) == [Turn(start=2, end=3, finish_reason="length")]
    assert short.stop_reason is StopReason.LENGTH
    assert cut(trajectory(), 6) == trajectory()


def test_numbers_on_tokens_that_were_not_sampled_are_ignored() -> None:
    odd = trajectory(logprobs=[math.nan, -9.0, -0.25, -0.5, -math.inf, -1.0], versions=[8, 8, 3, 3, 8, 4])
    batch = build_batch([odd], indices=[0], rewards=[0.0], max_len=10)
    clean = build_batch([trajectory()], indices=[0], rewards=[0.0], max_len=10)
    assert batch.rollout_logprobs is not None
    assert clean.rollout_logprobs is not None
    assert torch.equal(batch.rollout_logprobs, clean.rollout_logprobs)
    assert batch.versions is not None
    assert batch.versions.tolist() == [[-1, -1, 3, 3, -1, 4]]


class Sizes:
    """Stands for a processor: an image's only tensor is its length."""

    def tokens(self, image: bytes) -> list[int]:
        return [9] * len(image)

    def tensors(self, image: bytes) -> dict[str, torch.Tensor]:
        return {"size": torch.tensor([len(image)])}


def test_images_stay_with_their_sample() -> None:
    rows = [SHORT, trajectory(images=[b"a", b"bcd"]), trajectory(images=[b"ef"])]
    batch = build_batch(rows, indices=[0, 1, 2], rewards=[0.0] * 3, max_len=10, image_processor=Sizes())
    assert batch.extra is not None
    assert [None if t is None else t.tolist() for t in batch.extra["size"]] == [None, [1, 3], [2]]
    chosen = batch.select([2, 0]).extra
    assert chosen is not None
    assert [None if t is None else t.tolist() for t in chosen["size"]] == [[2], None]


def test_images_need_a_vision_model() -> None:
    with pytest.raises(ValueError, match="no vision-language model"):
        build_batch([trajectory(images=[b"a"])], indices=[0], rewards=[0.0], max_len=10)


def test_no_samples() -> None:
    batch = build_batch([], indices=[], rewards=[], max_len=10)
    assert batch.tokens.shape == (0, 0)


def test_errors() -> None:
    with pytest.raises(ValueError, match="1 trajectories, 2 indices, 1 rewards"):
        build_batch([SHORT], indices=[0, 1], rewards=[0.0], max_len=10)
    with pytest.raises(ValueError, match=r"sample 4 \(e0-p0\): its first token is marked as sampled"):
        build_batch([replace(SHORT, trainable=[1, 1])], indices=[4], rewards=[0.0], max_len=10)


@st.composite
def samples(draw: st.DrawFn) -> Trajectory:
    mask = [0, *draw(st.lists(st.integers(0, 1), max_size=12))]
    return Trajectory(
        token_ids=draw(st.lists(st.integers(1, 50), min_size=len(mask), max_size=len(mask))),
        trainable=mask,
        logprobs=[-0.5 * m for m in mask],
        versions=[m - 1 for m in mask],
        prompt_length=1,
        turns=[],
        stop_reason=StopReason.STOP,
        group_id="g",
        sample_index=0,
    )


@given(rows=st.lists(samples(), max_size=5), max_len=st.integers(1, 15))
def test_batch_holds_what_cut_leaves(rows: list[Trajectory], max_len: int) -> None:
    batch = build_batch(rows, indices=range(len(rows)), rewards=[0.0] * len(rows), max_len=max_len, pad_token_id=0)
    short = [cut(r, max_len) for r in rows]
    assert batch.lengths.tolist() == [len(r.token_ids) for r in short]
    assert batch.action_mask.sum(-1).tolist() == [r.num_trainable for r in short]
    assert not (batch.action_mask & ~batch.attention_mask).any()
    assert batch.tokens.shape[1] == max((len(r.token_ids) for r in short), default=0)
    for row, tokens, length in zip(rows, batch.tokens.tolist(), batch.lengths.tolist(), strict=True):
        assert tokens[:length] == list(row.token_ids)[:length]
        assert set(tokens[length:]) <= {0}


def shares_of(lengths: list[int], ranks: int, batch_size: int) -> list[RankBatch]:
    """What every rank holds of a rollout batch of samples with these lengths, cut and balanced as in a run."""
    samples = [SampleRef(handle="h", position=i, index=i, reward=0.0, length=n) for i, n in enumerate(lengths)]
    cut = cut_mini_batches(samples, batch_size=batch_size, seed=3, step=0)
    split = [split_over_ranks(part, ranks, hidden_size=4096) for part in cut]
    found = []
    for rank in range(ranks):
        own = [sample for parts in split for sample in parts[rank]]
        numbers = iter(range(len(own)))
        rows = [[next(numbers) for _ in parts[rank]] for parts in split]
        width = max((s.length for s in own), default=1)
        mask = torch.arange(width) < torch.tensor([s.length for s in own], dtype=torch.long)[:, None]
        batch = Batch(
            tokens=torch.zeros(mask.shape, dtype=torch.long),
            attention_mask=mask,
            action_mask=torch.zeros_like(mask),
            index=torch.tensor([s.index for s in own], dtype=torch.long),
        )
        found.append(RankBatch(batch=batch, rows=rows))
    return found


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 16))
def test_dealing_anew_keeps_sizes_and_samples(lengths: list[int], ranks: int, batch_size: int) -> None:
    for share in shares_of(lengths, ranks, batch_size):
        dealt = share.dealt("members 1 0 1")
        assert [len(rows) for rows in dealt.rows] == [len(rows) for rows in share.rows]
        assert sorted(row for rows in dealt.rows for row in rows) == list(range(share.batch.size))
        assert dealt.batch is share.batch
        assert dealt.rows == share.dealt("members 1 0 1").rows
        assert share.dealt(None) is share


def test_dealing_anew_mixes_and_stays_balanced() -> None:
    drawn = torch.randn(512, generator=torch.Generator().manual_seed(0)).mul(0.8).add(5.0).exp()
    lengths = [int(n) for n in drawn.clamp(1, 2000)]
    shares = shares_of(lengths, 4, 64)
    dealt = [share.dealt("members 1 0 1") for share in shares]
    pairs = [
        {frozenset((a, b)) for rows in s.rows for a in rows for b in rows if a != b} for s in (shares[0], dealt[0])
    ]
    assert len(pairs[0] & pairs[1]) < 0.3 * len(pairs[0])  # 1 of 8 by chance

    def imbalance(parts: list[RankBatch]) -> float:
        """Mean over mini-batches: tokens of the fullest rank over those of the mean."""
        tokens = torch.stack([torch.stack([s.batch.lengths[rows].sum() for rows in s.rows]) for s in parts]).double()
        return float((tokens.amax(0) / tokens.mean(0)).mean())

    alone = [share.dealt(f"members 1 0 1 rank {rank}") for rank, share in enumerate(shares)]
    cut, same_seed, own_seeds = imbalance(shares), imbalance(dealt), imbalance(alone)
    print(f"fullest rank over mean: cut {cut:.3f}, dealt {same_seed:.3f}, each with a seed of its own {own_seeds:.3f}")
    assert same_seed - 1 < 0.5 * (own_seeds - 1)


def test_temperatures_of_turns_that_had_their_own() -> None:
    warm = [Turn(start=2, end=4, finish_reason="stop", temperature=1.5), Turn(start=5, end=6, finish_reason="stop")]
    batch = build_batch([trajectory(turns=warm), SHORT], indices=[0, 1], rewards=[0.0, 0.0], max_len=100)
    assert batch.temperatures is not None
    assert batch.temperatures.tolist() == [[0.0, 0.0, 1.5, 1.5, 0.0, 0.0], [0.0] * 6]
    assert build_batch([trajectory(), SHORT], indices=[0, 1], rewards=[0.0, 0.0], max_len=100).temperatures is None
    cut_batch = build_batch([trajectory(turns=warm)], indices=[0], rewards=[0.0], max_len=3)
    assert cut_batch.temperatures is not None
    assert cut_batch.temperatures.tolist() == [[0.0, 0.0, 1.5]]
