"""Adapters on one and two ranks: the base is the reference, gradients, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.learner_models import make_batch, plain_logprobs
from support.learner_ranks import RankResults, result

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]

RANK_CASES = {
    2: ["lora_reference", "lora_checkpointing", "lora_resume", "lora_exports", "lora_save"],
    1: ["lora_reference", "lora_other_references", "lora_load"],
}
EXPORTS = ["plain-2", "plain-3", "rslora-2", "dora-2"]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("sharing", ["off", "on"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_base_is_a_reference_that_never_moves(ranks: RankResults, world: int, stage: int, sharing: str) -> None:
    for of_rank in result(ranks, "lora_reference", world):
        outcome = of_rank[f"{stage}-{sharing}"]
        assert len(outcome["apart"]) == 4
        assert max(outcome["apart"]) <= 1e-6
        assert outcome["moved"] > 1e-2


@pytest.mark.parametrize("kind", ["rslora", "dora", "dropout", "truncated", "bf16"])
def test_every_kind_of_adapter_has_its_base_and_scores_are_not_random(ranks: RankResults, kind: str) -> None:
    outcome = result(ranks, "lora_other_references", 1)[0][kind]
    assert outcome["apart"] <= 1e-6
    assert outcome["moved"] > 1e-2
    assert outcome["repeated"] == 0.0


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_adapters_alone_are_trained_all_of_them_and_nothing_decays(ranks: RankResults, stage: int) -> None:
    for of_rank in result(ranks, "lora_reference", 2):
        outcome = of_rank[f"{stage}-off"]
        assert outcome["changed"] == outcome["adapters"]
        assert len(outcome["adapters"]) == 2 * 7 * 2


@pytest.mark.parametrize("kind", ["plain", "reentrant"])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_checkpointing_leaves_no_adapter_untrained(ranks: RankResults, stage: int, kind: str) -> None:
    for of_rank in result(ranks, "lora_checkpointing", 2):
        want, got = of_rank[f"{stage}-none"], of_rank[f"{stage}-{kind}"]
        assert got.keys() == want.keys()
        assert len(want) == 2 * 7 * 2
        for name, gradient in want.items():
            assert float(gradient.abs().max()) > 0, name
            assert float((got[name] - gradient).abs().max()) <= 1e-6, name


@pytest.mark.parametrize("case", ["0-critic", "2-policy", "3-policy", "3-critic"])
def test_a_resumed_run_with_adapters_goes_on_bit_for_bit(ranks: RankResults, case: str) -> None:
    for outcome in (of_rank[case] for of_rank in result(ranks, "lora_resume", 2)):
        assert outcome["metrics"]
        assert outcome["weights"]
        assert outcome["ema"]
        assert outcome["steps"] == 4


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_resume_on_another_number_of_ranks(ranks: RankResults, stage: int) -> None:
    want = result(ranks, "lora_save", 2)[0][f"stage{stage}"]["metrics"]
    got = result(ranks, "lora_load", 1)[0][f"stage{stage}"]
    assert got["steps"] == 2
    for ours, theirs in zip(got["metrics"], want, strict=True):
        for name in ("policy_loss", "grad_norm", "ppo_kl"):
            assert ours[name][0] == pytest.approx(theirs[name][0], abs=2e-5)


def test_a_checkpoint_leaves_the_base_out(ranks: RankResults, rank_folder: Path) -> None:
    model = (rank_folder / "qwen3" / "model.safetensors").stat().st_size
    for stage in (2, 3):
        adapters = 28_672 * 16  # parameters; two moments, fp32 master weights and the weights themselves
        assert result(ranks, "lora_save", 2)[0][f"stage{stage}"]["bytes"] < adapters + model / 4


def test_a_checkpoint_of_other_adapters_is_refused(ranks: RankResults) -> None:
    found = result(ranks, "lora_load", 1)[0]
    assert "with `ds.lora.rank` 4, this run has 8" in found["rank"]
    assert "with `ds.lora.alpha` 6, this run has 7" in found["alpha"]
    assert "with `ds.lora.target_modules` 'all-linear', this run has 'q_proj'" in found["targets"]


def logprobs_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return plain_logprobs(model.eval(), make_batch(3, seed=9))[0]


@pytest.mark.parametrize("case", EXPORTS)
def test_peft_loads_an_export_and_computes_what_the_trainer_does(
    ranks: RankResults, rank_folder: Path, case: str
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    outcome = result(ranks, "lora_exports", 2)[0][case]
    path = rank_folder / f"adapter-{case}"
    got = logprobs_of(AutoPeftModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    base = logprobs_of(AutoModelForCausalLM.from_pretrained(rank_folder / "qwen3", dtype=torch.float32))
    assert float((got - outcome["logprobs"]).abs().max()) <= 1e-5
    assert float((got - base).abs().max()) > 1e-2
    merged = logprobs_of(AutoModelForCausalLM.from_pretrained(f"{path}-merged", dtype=torch.float32))
    assert float((merged - outcome["logprobs"]).abs().max()) <= 1e-4


@pytest.mark.parametrize("case", EXPORTS)
def test_the_average_of_adapters_is_exported_beside_them(ranks: RankResults, rank_folder: Path, case: str) -> None:
    from peft import AutoPeftModelForCausalLM
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    outcome = result(ranks, "lora_exports", 2)[0][case]
    path = rank_folder / f"adapter-{case}"
    live, average = load_file(path / "adapter_model.safetensors"), load_file(path / "ema" / "adapter_model.safetensors")
    assert live.keys() == average.keys()
    assert len(average) == len(outcome["ema"]) == outcome["adapters"]
    for name, tensor in outcome["ema"].items():
        saved = "base_model.model." + name.replace(".default", "")
        assert torch.equal(average[saved], tensor)
        assert not torch.equal(average[saved], live[saved])
    apart = logprobs_of(AutoPeftModelForCausalLM.from_pretrained(path / "ema", dtype=torch.float32))
    merged = logprobs_of(AutoModelForCausalLM.from_pretrained(f"{path}-merged/ema", dtype=torch.float32))
    assert float((apart - merged).abs().max()) <= 1e-4


def test_a_critics_adapter_brings_its_whole_head(ranks: RankResults, rank_folder: Path) -> None:
    from peft import AutoPeftModelForSequenceClassification

    path = rank_folder / "adapter-critic"
    model = AutoPeftModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, num_labels=1)
    batch = make_batch(3, seed=9)
    backbone, head = model.base_model.model.model, model.base_model.model.score
    want = result(ranks, "lora_exports", 2)[0]["critic"]["values"]
    with torch.no_grad():
        states = backbone(input_ids=batch.tokens, use_cache=False).last_hidden_state
    values = torch.cat([torch.zeros(3, 1), head(states).squeeze(-1)[:, :-1]], 1) * batch.action_mask
    assert float((values - want).abs().max()) <= 1e-5
