from __future__ import annotations

import math

import pytest

from openrlhf.rollout.sync_check import SyncError, check_sequences, compare, default_tolerance


@pytest.mark.parametrize("vocab_size", [16, 261, 151936])
def test_sequences_are_fixed_and_inside_the_vocabulary(vocab_size: int) -> None:
    rows = check_sequences(vocab_size)
    assert [len(r) for r in rows] == [16] * 4
    assert rows == check_sequences(vocab_size)
    assert all(vocab_size // 8 <= t < vocab_size * 5 // 8 + 1 for r in rows for t in r)
    assert len({tuple(r) for r in rows}) == 4


def test_mean_of_absolute_differences_without_the_first_tokens() -> None:
    trainer = [[9.0, -1.0, -2.0], [9.0, -3.0, -4.0]]
    engine = [[0.0, -1.1, -2.0], [0.0, -2.7, -4.0]]
    assert compare(trainer, engine, tolerance=0.2, engine="engine-0") == pytest.approx(0.1)


def test_too_large_a_difference_names_engine_place_and_numbers() -> None:
    with pytest.raises(SyncError) as caught:
        compare([[0.0, -1.0], [0.0, -3.0]], [[0.0, -1.0], [0.0, -4.5]], tolerance=1e-3, engine="engine-1")
    message = str(caught.value)
    for part in ("engine-1", "0.75", "0.001", "`sync_tolerance`", "sequence 1, token 1", "-3", "-4.5"):
        assert part in message


def test_nan_never_passes() -> None:
    with pytest.raises(SyncError, match="engine nan"):
        compare([[0.0, -1.0, -1.0]], [[0.0, math.nan, -1.0]], tolerance=100.0, engine="engine-0")


def test_other_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="engine-0"):
        compare([[0.0, -1.0]], [[0.0]], tolerance=1.0, engine="engine-0")


def test_default_tolerances() -> None:
    assert [default_tolerance(d) for d in ("float32", "bfloat16", "float16")] == [1e-3, 0.05, 0.05]
