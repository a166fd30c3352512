"""A row of the tables in `core` is all that flags, rules and the trainer need to know of an estimator or a loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from openrlhf.core.config import AdvantageConfig, AlgoConfig, KLConfig
from openrlhf.core.tables import ESTIMATORS, POLICY_LOSSES, Estimator, PolicyLoss
from openrlhf.launcher.command_line import prepare
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.help_text import help_text
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import UsageError
from openrlhf.launcher.ranks.roles import PolicyRank
from openrlhf.launcher.trainer.pipeline import group_rules
from support.toy_ranks import references, sampled, toy_config, toy_rank
from support.trainer_fakes import fake_run

RUN = "--actor.model_name_or_path A --data.prompt_dataset d --vllm.num_engines 1 --reward.remote_url r.py"
GROUPED = Estimator(title="New One", summary="compares", source="s", baseline="mean", whitens=True)
CRITIC = Estimator(title="New Two", summary="values", source="s", returns="gae", critic=True, discounts=True)
LOSS = PolicyLoss(title="New Loss", summary="own mean", source="s", agg_mode="seq-mean-token-sum-norm")


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three rows more, and a command that reads its flags anew."""
    monkeypatch.setitem(ESTIMATORS, "grouped", GROUPED)
    monkeypatch.setitem(ESTIMATORS, "valued", CRITIC)
    monkeypatch.setitem(POLICY_LOSSES, "own", LOSS)
    TRAIN_PPO_RAY.__dict__.pop("flags", None)
    yield
    TRAIN_PPO_RAY.__dict__.pop("flags", None)


def prepared(words: str) -> tuple[Any, list[str]]:
    return prepare(TRAIN_PPO_RAY, [*RUN.split(), *words.split()], Machine(gpus=0))


def refused(words: str) -> str:
    with pytest.raises(UsageError) as caught:
        prepared(words)
    return str(caught.value)


def test_the_flags_offer_and_explain_them() -> None:
    flags = TRAIN_PPO_RAY.flags
    assert flags["algo.advantage.estimator"].shape.choices == tuple(ESTIMATORS)
    assert flags["actor.policy_loss_type"].shape.choices == tuple(POLICY_LOSSES)
    text = " ".join(help_text(TRAIN_PPO_RAY).split())
    assert "grouped: New One, compares (groups, whitened). valued: New Two, values (critic, gamma)." in text
    assert "own: New Loss, own mean; implies loss_agg_mode seq-mean-token-sum-norm." in text


def test_the_rules_read_them() -> None:
    assert "compares the samples of one prompt" in refused("--algo.advantage.estimator grouped")
    two = "--rollout.n_samples_per_prompt 2 --algo.advantage.estimator grouped"
    assert "only gae and reinforce and valued discount" in refused(f"{two} --algo.advantage.gamma 0.9")
    assert "only the estimator gae or valued has a critic" in refused(f"{two} --critic.model_name_or_path C")
    config, notes = prepared(f"{two} --critic.adam.lr 1e-5")
    assert not config.has_critic
    assert any("no effect without --algo.advantage.estimator gae or valued" in note for note in notes)
    images = refused("--algo.advantage.estimator valued --data.max_images_per_prompt 1")
    assert (
        "with one of reinforce, rloo, reinforce_baseline, group_norm, dr_grpo, maxrl, on_policy_distill, "
        "grouped" in images
    )


def test_resolving_reads_them() -> None:
    config, _ = prepared("--algo.advantage.estimator valued --algo.advantage.gamma 0.9")
    assert config.has_critic
    assert config.critic.model_name_or_path == "A"
    config, notes = prepared("--actor.policy_loss_type own")
    assert config.actor.loss_agg_mode == "seq-mean-token-sum-norm"
    assert "--actor.policy_loss_type own sets --actor.loss_agg_mode seq-mean-token-sum-norm" in notes
    problem = refused("--actor.policy_loss_type own --actor.loss_agg_mode seq-mean-token-mean")
    assert "own has one ratio per token and takes the mean per sequence" in problem


def test_the_trainer_reads_them() -> None:
    run = fake_run(4, algo__advantage__estimator="grouped")
    assert group_rules(run.config).min_survivors == 2
    assert run.run().optimizer_steps == 2
    assert "rollout/dropped_groups" in run.sink.steps[0]
    alone = fake_run(4, algo__advantage__estimator="valued")
    assert group_rules(alone.config).min_survivors == 1


@pytest.mark.parametrize(("estimator", "expected"), [("grouped", [1.0, -1.0]), ("dr_grpo", [2.0, 0.5])])
def test_a_rank_whitens_where_the_row_says_so(estimator: str, expected: list[float]) -> None:
    algo = AlgoConfig(advantage=AdvantageConfig(estimator=estimator), kl=KLConfig(init_coef=0.0))
    rank = toy_rank(PolicyRank, torch.zeros(2, 2), toy_config(algo))
    prepared = rank.prepare([references([sampled([0, 1])] * 2, (2.0, 0.5))], scores={}, kl_coef=0.0)
    assert prepared.batch.advantages is not None
    assert prepared.batch.advantages[:, 1].tolist() == pytest.approx(expected)
