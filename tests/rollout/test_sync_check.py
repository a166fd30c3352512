from __future__ import annotations

import math

import pytest

from openrlhf.rollout.sync_check import (
    LEAST_TOLERANCE,
    SyncError,
    Tolerance,
    answer_tokens,
    check_prompts,
    check_sequences,
    compare,
    measured_tolerance,
    noise_bits,
)


@pytest.mark.parametrize("vocab_size", [16, 261, 151936])
def test_sequences_are_fixed_and_inside_the_vocabulary(vocab_size: int) -> None:
    rows = check_sequences(vocab_size)
    assert [len(r) for r in rows] == [16] * 4
    assert rows == check_sequences(vocab_size)
    assert all(vocab_size // 8 <= t < vocab_size * 5 // 8 + 1 for r in rows for t in r)
    assert len({tuple(r) for r in rows}) == 4


FIXED = Tolerance(value=1e-3, source="--vllm.sync_tolerance 0.001")


def test_text_begins_with_prompts_of_the_run() -> None:
    prompts = [[1, 2, 3], [9, 9], list(range(100, 200)), [], [4, 9, 5]]
    found = check_prompts(prompts, max_len=1000, without={9})
    assert found == [[1, 2, 3], [100, *range(169, 200)], [4, 5]]
    assert answer_tokens(found, max_len=1000) == 32


@pytest.mark.parametrize(("max_len", "longest", "answer"), [(1000, 32, 32), (40, 19, 20), (12, 5, 6), (3, 1, 1)])
def test_text_fits_an_engine_that_samples_one_token_more(max_len: int, longest: int, answer: int) -> None:
    prompts = check_prompts([list(range(50)), [7]], max_len=max_len)
    assert [len(p) for p in prompts] == [longest, 1]
    assert answer_tokens(prompts, max_len=max_len) == answer
    assert longest + answer + 1 <= max_len


def test_prompts_of_nothing_but_images_are_no_text() -> None:
    assert check_prompts([[9, 9], []], max_len=100, without={9}) == []


def test_mean_of_absolute_differences_without_the_first_tokens() -> None:
    trainer = [[9.0, -1.0, -2.0], [9.0, -3.0, -4.0]]
    engine = [[0.0, -1.1, -2.0], [0.0, -2.7, -4.0]]
    allowed = Tolerance(value=0.2, source="a test")
    assert compare(trainer, engine, tolerance=allowed, engine="engine-0") == pytest.approx(0.1)


def test_too_large_a_difference_names_engine_place_numbers_and_what_to_do() -> None:
    with pytest.raises(SyncError) as caught:
        compare([[0.0, -1.0], [0.0, -3.0]], [[0.0, -1.0], [0.0, -4.5]], tolerance=FIXED, engine="engine-1")
    message = str(caught.value)
    for part in ("engine-1", "0.75 over 2 tokens", "allowed 0.001 (--vllm.sync_tolerance 0.001)"):
        assert part in message
    for part in ("sequence 1, token 1", "-3", "-4.5", "openrlhf-launch selfcheck", "allowed by `sync_tolerance`"):
        assert part in message


def test_one_token_far_off_is_too_much_where_the_mean_is_not() -> None:
    trainer, engine = [[0.0, *[-1.0] * 100]], [[0.0, *[-1.0] * 99, -1.5]]
    assert compare(trainer, engine, tolerance=Tolerance(value=0.006, rms=0.051, source="a test"), engine="e") == 0.005
    message = r"allowed 0\.006 \(a test\); root mean square 0\.05, allowed 0\.049; largest"
    with pytest.raises(SyncError, match=message):
        compare(trainer, engine, tolerance=Tolerance(value=0.006, rms=0.049, source="a test"), engine="e")


def test_nan_never_passes() -> None:
    with pytest.raises(SyncError, match="engine nan"):
        compare(
            [[0.0, -1.0, -1.0]],
            [[0.0, math.nan, -1.0]],
            tolerance=Tolerance(value=100.0, source="a test"),
            engine="engine-0",
        )


def test_other_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="engine-0"):
        compare([[0.0, -1.0]], [[0.0]], tolerance=FIXED, engine="engine-0")


def test_noise_is_measured_one_bit_below_the_coarser_format_and_not_in_float32() -> None:
    assert noise_bits("float32", "float32") is None
    assert [noise_bits("bfloat16", d) for d in ("bfloat16", "float32", "float16")] == [7, 7, 7]
    assert [noise_bits("float16", d) for d in ("float16", "float32")] == [10, 10]


def test_the_tolerance_is_a_multiple_of_what_rounding_does_to_the_trainer() -> None:
    own, rounded = [[0.0, -1.0, -2.0], [0.0, -3.0]], [[0.0, -1.01, -2.0], [0.0, -2.98]]
    found = measured_tolerance(own, rounded, bits=7)
    assert found.value == pytest.approx(2 * 0.01)
    assert found.rms == pytest.approx(2.5 * math.sqrt((0.01**2 + 0.02**2) / 3))
    assert found.source == "2 x 0.01, which is what rounding its layers to 7 bits does to the trainer"


def test_a_model_that_is_sure_of_the_text_has_the_least_tolerance() -> None:
    found = measured_tolerance([[0.0, -1e-5]], [[0.0, -2e-5]], bits=7)
    assert (found.value, found.rms) == (LEAST_TOLERANCE, LEAST_TOLERANCE)
    assert found.source.startswith("the least in half precision; 2 x 1e-05")


def test_without_any_noise_nothing_was_measured() -> None:
    found = measured_tolerance([[0.0, -1.0]], [[0.0, -1.0]], bits=10)
    assert found.value == 0.05
    assert found.source == "rounding the trainer's layers to 10 bits moved nothing"


def test_a_trainer_without_numbers_is_no_measure() -> None:
    with pytest.raises(SyncError, match="the trainer's own log-probs are not finite"):
        measured_tolerance([[0.0, math.nan]], [[0.0, math.nan]], bits=7)
