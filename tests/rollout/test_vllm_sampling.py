"""Every sampling parameter of an agent reaches vLLM's, under vLLM's name."""

import sys
from dataclasses import fields
from types import ModuleType, SimpleNamespace

import pytest

from openrlhf.agents.engine import RequestRefusedError, SamplingParams
from openrlhf.rollout.requests import RequestRejectedError
from openrlhf.rollout.vllm.arguments import SUPPRESSED, sampled_logprobs, to_vllm_sampling

GIVEN = SamplingParams(
    temperature=0.5, top_p=0.75, top_k=7, min_p=0.25, max_tokens=9, min_tokens=3, presence_penalty=-1.0,
    frequency_penalty=1.5, repetition_penalty=1.25, stop=("#", "!"), stop_token_ids=(4, 5), ignore_eos=True, seed=11,
    top_logprobs=3, structure="{}",
)  # fmt: skip


@pytest.fixture
def _vllm(monkeypatch):
    """vLLM's names, without the seconds that its import takes."""
    package, module = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    package.SamplingParams = lambda **given: given  # type: ignore[attr-defined]
    module.StructuredOutputsParams = lambda **given: given  # type: ignore[attr-defined]
    module.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)


@pytest.mark.usefixtures("_vllm")
def test_s01_every_parameter_reaches_vllm():
    sent = to_vllm_sampling(GIVEN)
    renamed = {"top_logprobs": "logprobs", "structure": "structured_outputs"}
    assert sent["structured_outputs"] == {"structural_tag": "{}"}
    for field in fields(SamplingParams):
        value = getattr(GIVEN, field.name)
        assert value != field.default, f"{field.name} is not tried"
        if field.name != "structure":
            assert sent[renamed.get(field.name, field.name)] == (list(value) if isinstance(value, tuple) else value)
    assert (sent["n"], sent["detokenize"], sent["logit_bias"]) == (1, True, None)


@pytest.mark.usefixtures("_vllm")
def test_what_is_unset_and_what_is_suppressed():
    sent = to_vllm_sampling(SamplingParams(), suppressed=[3])
    assert (sent["stop"], sent["stop_token_ids"], sent["detokenize"]) == (None, None, False)
    assert (sent["logit_bias"], sent["logprobs"], sent["structured_outputs"]) == ({3: SUPPRESSED}, 0, None)


def test_the_likeliest_tokens_of_a_place_beside_the_sampled_one():
    flat = SimpleNamespace(
        token_ids=[5, 1, 5, 6, 6, 2],
        logprobs=[-2.0, -1.0, -2.0, -0.5, -0.5, -3.0],
        start_indices=[0, 3],
        end_indices=[3, 6],
    )
    assert sampled_logprobs(flat, 2) == ([-2.0, -0.5], [[(1, -1.0), (5, -2.0)], [(6, -0.5), (2, -3.0)]])
    flat = SimpleNamespace(logprobs=[-2.0, -0.5])
    assert sampled_logprobs(flat, 0) == ([-2.0, -0.5], ())


def test_a_rejected_request_is_the_clients_fault():
    assert issubclass(RequestRejectedError, RequestRefusedError)
