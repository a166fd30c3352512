"""Numbers that authors return, of any type."""

import math
from decimal import Decimal
from fractions import Fraction

import pytest

from openrlhf.agents.engine import SamplingParams
from openrlhf.agents.sampling import as_sampling, sample_seed
from openrlhf.agents.values import finite_logs, to_float, to_floats, unbiased_pass_at_k


@pytest.mark.parametrize("value", [1, 1.0, True, [1], (1.0,)])
def test_one_number_of_any_type(value):  # O05, O07
    assert to_float(value, "rewards") == 1.0


@pytest.mark.parametrize("value", ["1", None, [1, 2], {}])
def test_no_number(value):
    with pytest.raises(ValueError, match="rewards must be one number"):
        to_float(value, "rewards")


def test_vectors_of_other_shapes():  # B131
    assert to_floats([[1], [1], [1]], 3, "rewards") == [1.0, 1.0, 1.0]
    assert to_floats([[1]], 1, "rewards") == [1.0]
    assert to_floats(2, 1, "rewards") == [2.0]
    assert to_floats((1, None), 2, "rewards") == [1.0, None]


@pytest.mark.parametrize(("value", "got"), [([1.0], 1), ([1, 2], 2), ([1, 2, 3, 4], 4), (5.0, 1), ([], 0)])
def test_wrong_count_shows_both(value, got):  # B131
    with pytest.raises(ValueError, match=rf"got {got}, expected 3"):
        to_floats(value, 3, "rewards")


def test_finite_logs_keep_numbers_only():  # B145, B146
    logs = {"a": 1, "b": [0.5], "text": "x", "none": None, "nan": float("nan"), "l": [1, 2], "é/x": True}
    assert finite_logs(logs) == {"a": 1.0, "b": 0.5, "é/x": 1.0}
    with pytest.raises(ValueError, match="extra_logs must be a dict"):
        finite_logs([1])


def test_sampling_from_dict_and_object():
    class VllmLike:
        n, temperature, top_k, stop, stop_token_ids, max_tokens, seed = 1, 0.5, 0, None, [7], 9, None

    assert as_sampling({"temperature": 0.5, "stop": "x"}) == SamplingParams(temperature=0.5, stop=("x",))
    assert as_sampling(VllmLike()) == SamplingParams(temperature=0.5, stop_token_ids=(7,), max_tokens=9)
    assert as_sampling(SamplingParams(top_k=3)).top_k == 3


def test_sampling_refuses_what_it_cannot_honour():
    with pytest.raises(ValueError, match=r"unknown keys \['temprature'\]"):
        as_sampling({"temprature": 1.0})
    with pytest.raises(ValueError, match="n must be 1"):
        as_sampling({"n": 4})
    with pytest.raises(ValueError, match="got 'x'"):
        as_sampling("x")


def test_seeds_are_63_bits_and_all_different():
    seeds = {
        sample_seed(seed, evaluation, episode, position, sample, turn)
        for seed in (1, 2)
        for evaluation in (False, True)
        for episode in (0, 1)
        for position in range(5)
        for sample in range(8)
        for turn in range(4)
    }
    assert len(seeds) == 2 * 2 * 2 * 5 * 8 * 4
    assert all(0 <= s < 2**63 for s in seeds)
    assert sample_seed(1, False, 0, 0, 0, 0) == sample_seed(1, False, 0, 0, 0, 0)


def test_exact_numbers_and_those_beyond_the_floats():
    values = [Fraction(1, 2), Decimal("0.25"), 10**400, -(10**400)]
    assert to_floats(values, 4, "rewards") == [0.5, 0.25, math.inf, -math.inf]
    assert to_floats(Fraction(1, 2), 1, "rewards") == [0.5]


@pytest.mark.parametrize(
    ("correct", "total", "k", "value"),
    [(0, 4, 2, 0.0), (1, 4, 1, 0.25), (1, 4, 2, 0.5), (3, 4, 2, 1.0), (4, 4, 4, 1.0)],
)
def test_unbiased_pass_at_k(correct, total, k, value):
    assert unbiased_pass_at_k(correct, total, k) == pytest.approx(value)


def test_k_of_pass_at_k_must_fit():
    with pytest.raises(ValueError, match="k=5 of 4"):
        unbiased_pass_at_k(1, 4, 5)
