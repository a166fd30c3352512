"""The tables of estimators and policy losses: complete, and the only place where their names mean something."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from openrlhf.core import tables
from openrlhf.core.advantages import RETURNS, compute_advantages
from openrlhf.core.config import AdvantageConfig, PolicyLossConfig
from openrlhf.core.losses.policy import policy_loss
from openrlhf.core.losses.surrogates import RATIOS, SURROGATES, SurrogateTerms
from openrlhf.core.rewards import BASELINES, group_baseline
from openrlhf.core.tables import ESTIMATORS, POLICY_LOSSES, Estimator, PolicyLoss
from support.core_helpers import check, mask, rows

PACKAGES = Path(__file__).parents[2] / "packages"
CITED = re.compile(r"et al\., .*\(20\d\d\)")


def vec(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_facts_of_the_estimators() -> None:
    facts = {n: (r.critic, r.discounts, r.whitens, r.groups, r.min_samples) for n, r in ESTIMATORS.items()}
    assert facts == {
        "gae": (True, True, True, False, 1),
        "reinforce": (False, True, True, False, 1),
        "rloo": (False, False, False, True, 2),
        "reinforce_baseline": (False, False, True, True, 2),
        "group_norm": (False, False, False, True, 2),
        "dr_grpo": (False, False, False, True, 2),
        "maxrl": (False, False, False, True, 2),
        "on_policy_distill": (False, False, False, False, 1),
    }


def test_facts_of_the_losses() -> None:
    facts = {n: (r.ratio, r.per_sequence, r.surrogate, r.agg_mode) for n, r in POLICY_LOSSES.items()}
    assert facts == {
        "ppo": ("token", False, "clip", None),
        "gspo": ("sequence", True, "clip", "seq-mean-token-mean"),
        "gspo_token": ("sequence_token", True, "clip", "seq-mean-token-mean"),
        "cispo": ("token", False, "weight", None),
        "sapo": ("token", False, "soft", "seq-mean-token-mean"),
        "dppo_tv": ("token", False, "mask_tv", None),
        "dppo_kl": ("token", False, "mask_kl", None),
        "drpo": ("token", False, "quadratic", None),
        "vespo": ("sequence_product", True, "gamma", None),
    }


def test_every_part_that_a_row_can_name_has_a_function() -> None:
    parts = ((BASELINES, tables.Baseline), (RETURNS, tables.Returns))
    parts += ((RATIOS, tables.Ratio), (SURROGATES, tables.Surrogate))
    for functions, names in parts:
        assert set(functions) == set(get_args(names))


@pytest.mark.parametrize("table", [ESTIMATORS, POLICY_LOSSES])
def test_every_row_says_what_it_is(table: dict[str, Estimator] | dict[str, PolicyLoss]) -> None:
    for name, row in table.items():
        assert row.title in row.help
        assert row.summary in row.help
        assert CITED.search(row.source), name
    aliases = [alias for row in table.values() for alias in row.aliases.split()]
    assert len(aliases) == len(set(aliases))


def test_the_tables_load_no_ml_library() -> None:
    code = "import sys, openrlhf.core.tables; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_no_code_compares_with_a_name() -> None:
    """In no package does a name of a row stand as a word of its own, except in the tables and as a default."""
    names = "|".join(ESTIMATORS.keys() | POLICY_LOSSES.keys() - {"ppo"})
    quoted = re.compile(rf"""(?<![\w`])(["'])({names})\1""")
    allowed = {
        ("tables.py", "gae"),
        ("config.py", "gae"),
        ("advantages.py", "gae"),  # the key of a function
        *(("known_names.py", n) for n in ("gspo", "cispo", "sapo", "rloo", "reinforce_baseline", "group_norm")),
    }
    found = {
        (path.name, match[2])
        for path in PACKAGES.glob("*/src/**/*.py")
        if path.name != "tables.py"
        for match in quoted.finditer(path.read_text(encoding="utf-8"))
    }
    assert found <= allowed, sorted(found - allowed)


def test_an_unknown_name_is_an_error_everywhere() -> None:
    estimator = r"`advantage\.estimator` 'flash' is unknown: choose one of gae, reinforce, rloo, "
    loss = r"`policy_loss_type` 'flash' is unknown: choose one of ppo, gspo, gspo_token, cispo, "
    x, m = rows([1.0]), mask([1])
    for call, message in (
        (lambda: group_baseline("flash", vec(1, 0), [0, 0]), estimator),
        (lambda: compute_advantages("flash", x, m), estimator),
        (lambda: AdvantageConfig(estimator="flash"), estimator),
        (lambda: replace(AdvantageConfig(), estimator="flash"), estimator),
        (lambda: PolicyLossConfig(policy_loss_type="flash"), loss),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_new_estimator_is_a_row_and_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token keeps its own reward, weighted: nothing is summed over later ones."""
    parts = {"returns": "weighted", "baseline": "maximum"}
    row = Estimator(title="New", summary="s", source="s", discounts=True, **parts)  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(ESTIMATORS, "new", row)
    monkeypatch.setitem(RETURNS, "weighted", lambda rewards, m, values, gamma, lambd: (rewards * m * gamma, rewards))  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(BASELINES, "maximum", lambda x: x.centred - x.std * x.n)  # pyright: ignore[reportArgumentType]
    advantages, _ = compute_advantages("new", rows([3.0, 5.0]), mask([1, 1]), gamma=0.5)
    check(advantages, [[1.5, 2.5]])
    check(group_baseline("new", vec(1, 3), [0, 0]).rewards, vec(-1 - 2 * 2**0.5, 1 - 2 * 2**0.5), 1e-12)
    assert group_baseline("new", vec(1.0), [0]).dropped_groups == 1


def test_a_new_loss_is_a_row_and_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounded ratio is a weight without gradient, and the gradient that of the log-prob."""

    def weighted(terms: SurrogateTerms, config: PolicyLossConfig) -> tuple[torch.Tensor, torch.Tensor]:
        bound = terms.ratio.detach().clamp(max=1 + config.eps_clip)
        return -bound * terms.advantages * terms.logprobs, terms.ratio.detach() > bound

    row = PolicyLoss(title="New", summary="s", source="s", surrogate="weighted", agg_mode="seq-mean-token-sum-norm")  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(POLICY_LOSSES, "new", row)
    monkeypatch.setitem(SURROGATES, "weighted", weighted)  # pyright: ignore[reportArgumentType]
    logprobs = rows([-1.0, -2.0]).requires_grad_()
    loss = policy_loss(
        logprobs=logprobs,
        old_logprobs=rows([-2.0, -2.0]),
        advantages=rows([1.0, 3.0]),
        action_mask=mask([1, 1]),
        config=PolicyLossConfig(policy_loss_type="new"),
        agg_constant=2.0,
    )
    loss.total.backward()
    check(loss.total, torch.tensor((1.2 * 1 + 1 * 3 * 2) / 2), 1e-6)
    assert logprobs.grad is not None
    check(logprobs.grad, [[-1.2 / 2, -3 / 2]], 1e-6)
    assert float(loss.metrics["ppo_clip_ratio"][0]) == 1.0
