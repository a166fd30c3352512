"""Export and weight stream: complete, whole, under the right names; frozen models score."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.learner_models import make_batch, plain_logprobs
from support.learner_ranks import RankResults, result

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]

RANK_CASES = {2: ["exports", "everywhere", "frozen", "sleeping"]}
MODELS = ["qwen3", "untied", "gpt2"]
BUCKET = 20_000


def exported(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_export_is_whole_and_scores_as_the_learner_does(ranks: RankResults, model: str, stage: int) -> None:
    # B121, B129: nothing is a placeholder, nothing shrank, and the file holds the trained weights
    outcome = result(ranks, "exports", 2)[0][f"{model}-{stage}"]
    tensors = load_file(f"{outcome['path']}/model.safetensors")
    assert all(tensor.numel() > 0 for tensor in tensors.values())
    hf, batch = exported(outcome["path"]), make_batch(3, seed=9)
    assert hf.config.vocab_size == hf.get_input_embeddings().weight.shape[0] == 128
    assert hf.config.use_cache is True
    with torch.no_grad():
        logprobs, entropy = plain_logprobs(hf, batch)
    assert float((outcome["logprobs"].logprobs - logprobs).abs().max()) < 1e-5
    assert float((outcome["logprobs"].entropy - entropy).abs().max()) < 1e-5
    assert ("lm_head.weight" in tensors) is (model == "untied")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_stream_sends_every_parameter_once_under_its_name(ranks: RankResults, model: str, stage: int) -> None:
    # B128: a copy that takes the stream has the exported weights; a tied head is sent once
    outcome = result(ranks, "exports", 2)[0][f"{model}-{stage}"]
    want = dict(exported(outcome["path"]).named_parameters())
    assert outcome["stream"].keys() == want.keys()
    assert all(torch.equal(outcome["stream"][name], want[name]) for name in want)
    assert outcome["metadata"] == [(name, tuple(p.shape), p.dtype) for name, p in want.items()]


@pytest.mark.parametrize("stage", [2, 3])
def test_buckets_keep_to_their_size(ranks: RankResults, stage: int) -> None:
    outcome = result(ranks, "exports", 2)[0][f"qwen3-{stage}"]
    largest = max(torch.Size(shape).numel() * 4 for _, shape, _ in outcome["metadata"])
    assert len(outcome["bucket_bytes"]) > 5
    assert max(outcome["bucket_bytes"]) <= max(BUCKET, largest)


def test_reference_scores_are_those_of_the_model(ranks: RankResults, rank_folder: Any) -> None:
    with torch.no_grad():
        want, _ = plain_logprobs(exported(rank_folder / "qwen3"), make_batch())
    for rank, outcome in enumerate(result(ranks, "frozen", 2)):
        rows = [0, 1, 2, 3, 4] if rank == 0 else [5]
        for name in ("whole", "offloaded", "partitioned"):
            got = outcome[name]
            assert float((got - want[rows, : got.shape[1]]).abs().max()) < 1e-5, name
        assert outcome["partitioned-idle"].shape[0] == (0 if rank else 1)
        assert "frozen" in outcome["error"]


def test_sleep_changes_nothing(ranks: RankResults) -> None:
    assert all(outcome["metrics"] for outcome in result(ranks, "sleeping", 2))


@pytest.mark.parametrize("stage", [2, 3])
def test_the_stream_can_serve_every_rank(ranks: RankResults, stage: int) -> None:
    # engines on the trainer's devices get the weights from the rank on theirs
    first, second = (outcome[f"stage-{stage}"] for outcome in result(ranks, "everywhere", 2))
    assert first["alone"].keys() == first["everywhere"].keys() == second["everywhere"].keys()
    assert second["alone"] == {}
    assert all(torch.equal(first["everywhere"][name], second["everywhere"][name]) for name in first["alone"])
    assert all(torch.equal(first["everywhere"][name], first["alone"][name]) for name in first["alone"])
