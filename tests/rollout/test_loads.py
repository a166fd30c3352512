"""The least load, against looking at all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from openrlhf.rollout.loads import Loads


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3)), max_size=200))
def test_the_first_of_the_least_loaded(count: int, changes: list[tuple[int, int]]) -> None:
    loads, known = Loads(range(count)), dict.fromkeys(range(count), 0)
    for key, amount in changes:
        if key < count and not amount:
            loads.drop(key)
            known.pop(key, None)
        else:
            loads.add(key, amount)
            if key in known:
                known[key] += amount
        assert loads.least() == min(known, key=lambda k: (known[k], k), default=None)


def test_equal_loads_go_by_the_order_of_the_keys() -> None:
    loads = Loads("cab")
    assert loads.least() == "c"
    loads.add("c", 1)
    assert loads.least() == "a"
