from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.launcher.data.blend import blend
from openrlhf.launcher.data.locate import mixing_probabilities


def places(
    sizes: list[int], probs: list[float] | None, max_samples: int = 10**8, seed: int = 0
) -> list[tuple[int, int]]:
    plan = blend(sizes, probs=probs, max_samples=max_samples, seed=seed)
    return list(zip(plan.source.tolist(), plan.row.tolist(), strict=True))


def test_concatenation_and_caps() -> None:
    assert places([2, 1], None) == [(0, 0), (0, 1), (1, 0)]
    assert places([3, 3], None, max_samples=2) == [(0, 0), (0, 1)]
    assert places([1, 3], None, max_samples=2) == [(0, 0), (1, 0)]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=4),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
def test_interleaving_ends_when_the_last_source_is_exhausted(sizes: list[int], weights: list[int], seed: int) -> None:
    weights = weights[: len(sizes)]
    probs = [w / sum(weights) for w in weights]
    plan = places(sizes, probs, seed=seed)
    assert set(plan) == {(s, r) for s, n in enumerate(sizes) for r in range(n)}
    assert len(set(plan[:-1])) < len(set(plan))
    for source, size in enumerate(sizes):
        rows = [r for s, r in plan if s == source]
        assert rows == [i % size for i in range(len(rows))]
    assert plan == places(sizes, probs, seed=seed)


def test_interleaving_follows_the_probabilities() -> None:
    counts = Counter(s for s, _ in places([1000, 3000], [0.25, 0.75]))
    assert counts[0] / counts.total() == pytest.approx(0.25, abs=0.03)


def test_probabilities() -> None:
    assert mixing_probabilities("0.25, 0.75", 2) == [0.25, 0.75]
    for text, message in (
        ("0.5", "2 datasets and 1 probabilities"),
        ("a,b", "numbers above 0"),
        ("0,1", "numbers above 0"),
        ("0.5,0.6", "add up to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            mixing_probabilities(text, 2)


def test_odd_mixtures_are_refused() -> None:
    with pytest.raises(ValueError, match="dataset number 2 has no rows"):
        places([3, 0], [0.5, 0.5])
    with pytest.raises(ValueError, match="too uneven"):
        places([1, 1], [1 - 1e-12, 1e-12])
