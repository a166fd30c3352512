"""vLLM's own errors and finish reasons at the engine's border: whose fault they are, and what they are called."""

from __future__ import annotations

import multiprocessing

import pytest

from support.rollout_engine_faults import outcomes


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[str, str]]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(outcomes)


@pytest.mark.parametrize(
    ("case", "fault", "words"),
    [
        ("recoverable", "request", "engine 0 could not serve request r0: TypeError('Encoding objects of type numpy"),
        ("recoverable words of a dead core", "engine", "engine 0 died during request r0"),
        ("recoverable words of a core that gives no sign", "engine", "engine 0 died during request r0"),
        ("dead", "engine", "engine 0 died during request r0"),
        ("invalid", "request", "engine 0 rejected request r0: too hot"),
        ("arrays", "answer", "stop"),
        ("floats", "request", "engine 0 rejected request r0: token id 1 is no integer: 6.0"),
    ],
)
def test_n10_only_a_dead_engine_is_an_engines_fault(
    found: dict[str, tuple[str, str]], case: str, fault: str, words: str
) -> None:
    assert found[case][0] == fault
    assert words in found[case][1]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unforeseen", "engine 0 could not serve request r0: KeyError('x')"),
        ("cancelled", "request r0 was cancelled"),
        ("no answer", "engine 0 ended request r0 without an answer"),
    ],
)
def test_n11_a_stream_ends_whatever_a_request_raises(found: dict[str, tuple[str, str]], case: str, words: str) -> None:
    assert found[case] == ("request", words)


@pytest.mark.parametrize(
    ("reason", "kind", "words"),
    [
        ("finish stop", "answer", "stop"),
        ("finish length", "answer", "length"),
        ("finish abort", "answer", "abort"),
        ("none", "answer", "abort"),
        ("finish error", "request", "finish_reason 'error': it failed inside the engine"),
        ("finish repetition", "request", "finish_reason 'repetition': the engine found that its text repeats itself"),
        ("unknown", "request", "engine 0 ended request r0 with finish_reason 'a new reason': which is not known here"),
    ],
)
def test_n09_every_finish_reason_is_an_end_or_a_failure_by_name(
    found: dict[str, tuple[str, str]], reason: str, kind: str, words: str
) -> None:
    assert found[reason][0] == kind
    assert words in found[reason][1]


def test_n09_no_finish_reason_of_vllm_is_left_out(found: dict[str, tuple[str, str]]) -> None:
    assert {case for case in found if case.startswith("finish ")} == {
        f"finish {name}" for name in ("stop", "length", "abort", "error", "repetition")
    }
