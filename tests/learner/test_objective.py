"""Which terms an objective has, with which coefficients and denominators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openrlhf.core.config import PolicyLossConfig
from openrlhf.core.losses.output import LossOutput
from openrlhf.learner.objective import ModelOutputs, Objective, PolicyObjective, ValueObjective, sum_terms
from support.learner_models import make_batch

BATCH = make_batch()
TOKENS, REAL = float(BATCH.action_mask.sum()), float(BATCH.attention_mask.sum())
SEQUENCES = float(BATCH.action_mask.any(-1).sum())


def outputs(**changes: Any) -> ModelOutputs:
    zeros = torch.zeros(BATCH.tokens.shape, requires_grad=True)
    return ModelOutputs(**{"logprobs": zeros, "values": zeros, "tokens": REAL, **changes})


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (PolicyObjective(config=PolicyLossConfig()), {"policy_loss": TOKENS}),
        (PolicyObjective(config=PolicyLossConfig(policy_loss_type="gspo")), {"policy_loss": SEQUENCES}),
        (
            PolicyObjective(config=PolicyLossConfig(loss_agg_mode="seq-mean-token-sum-norm"), kl_coef=0.1),
            {"policy_loss": SEQUENCES, "kl_loss": TOKENS},
        ),
        (
            PolicyObjective(config=PolicyLossConfig(entropy_coef=0.0, aux_loss_coef=0.1)),
            {"policy_loss": TOKENS, "entropy_loss": TOKENS, "aux_loss": REAL},
        ),
        (ValueObjective(), {"critic_loss": TOKENS}),
        (ValueObjective(aux_coef=0.1), {"critic_loss": TOKENS, "aux_loss": REAL}),
    ],
)
def test_denominators(objective: Objective, expected: dict[str, float]) -> None:
    assert objective.counts(BATCH) == expected
    nothing = BATCH.select([])
    assert objective.counts(nothing) == dict.fromkeys(expected, 0.0)


def test_the_engines_log_probs_are_measured_beside_any_loss() -> None:
    def own(*, logprobs: torch.Tensor, **others: Any) -> LossOutput:
        return LossOutput(total=logprobs.sum(), count=TOKENS, metrics={"own": (1.0, 2.0)})

    batch = BATCH.with_(rollout_logprobs=BATCH.old_logprobs - 0.25 * BATCH.action_mask)  # type: ignore[operator]
    objectives = PolicyObjective(config=PolicyLossConfig(), loss=own), PolicyObjective(config=PolicyLossConfig())
    theirs, ours = (objective(outputs(), batch)["policy_loss"].metrics for objective in objectives)
    assert set(theirs) == {"own", "logprobs_diff", "vllm_kl"}
    for name, sign in (("logprobs_diff", 1), ("vllm_kl", -1)):
        assert theirs[name] == ours[name]
        assert float(theirs[name][0]) == pytest.approx(sign * 0.25 * TOKENS, rel=1e-5)


# None: not computed; 0: computed and logged, without weight.
@pytest.mark.parametrize(("coef", "computed", "weight"), [(None, False, 0.0), (0.0, True, 0.0), (0.02, True, -0.02)])
def test_entropy(coef: float | None, computed: bool, weight: float) -> None:
    objective = PolicyObjective(config=PolicyLossConfig(entropy_coef=coef))
    assert objective.with_entropy is computed
    assert objective.coefficients["entropy_loss"] == weight
    assert ("entropy_loss" in objective.counts(BATCH)) is computed


@pytest.mark.parametrize(
    ("objective", "main"),
    [
        (PolicyObjective(config=PolicyLossConfig(aux_loss_coef=0.25)), "policy_loss"),
        (ValueObjective(aux_coef=0.25), "critic_loss"),
    ],
)
def test_balance_loss_is_trained_with_its_coefficient(objective: Objective, main: str) -> None:
    aux = torch.tensor(3.0, requires_grad=True)
    terms = objective(outputs(aux_loss=aux), BATCH)
    assert set(terms) == {main, "aux_loss"}
    loss = sum_terms(terms, objective.coefficients, objective.counts(BATCH), world_size=1)
    assert loss is not None
    (gradient,) = torch.autograd.grad(loss, aux)
    assert float(gradient) == pytest.approx(0.25)
    assert float(terms["aux_loss"].total.detach()) / terms["aux_loss"].count == pytest.approx(3.0)


def test_kl_loss_needs_a_coefficient() -> None:
    assert "kl_loss" not in PolicyObjective(config=PolicyLossConfig())(outputs(), BATCH)
    terms = PolicyObjective(config=PolicyLossConfig(), kl_coef=0.1)(outputs(), BATCH)
    assert {"policy_loss", "kl_loss"} == set(terms)
