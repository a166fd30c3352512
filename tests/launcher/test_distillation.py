"""A teacher beside the policy: which model it is, what reaches the ranks, what they make of it."""

from __future__ import annotations

import asyncio
import shlex
from typing import Any

import pytest
import torch

from openrlhf.agents.types import PromptItem
from openrlhf.core.config import AdvantageConfig, AlgoConfig, KLConfig, PolicyDistillConfig
from openrlhf.core.losses.distill import token_divergence, top_tokens
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.placement import roles
from openrlhf.launcher.plan.command import model_shapes
from openrlhf.launcher.plan.memory import Budget, memory
from openrlhf.launcher.ranks.batches import combine_sums
from openrlhf.launcher.ranks.roles import PolicyRank, ReferenceRank
from openrlhf.launcher.ray.start import learner_spec
from openrlhf.launcher.resolve import resolve
from openrlhf.launcher.rules.check import check_rules
from openrlhf.learner.spec import Role
from support.launcher_flags import parse_train_ppo
from support.toy_ranks import LOGITS, ToyRollout, references, sampled, toy_config, toy_rank, toy_ranks

RUN = "--actor.model_name_or_path A --data.prompt_dataset d --vllm.num_engines 1"
DISTILL = f"{RUN} --algo.advantage.estimator on_policy_distill --ref.model_name_or_path T"
CPU = Machine(gpus=0)
STUDENT = torch.tensor([[0.0, 0.4, 1.0], [0.3, 0.0, 0.1], [0.2, 0.2, 0.0]])
TEACHER = torch.tensor([[1.0, 0.0, 0.5], [0.0, 2.0, 0.1], [0.0, 0.2, 1.0]])


def resolved(line: str) -> TrainPPOConfig:
    config, _ = resolve(parse_train_ppo(shlex.split(line)), CPU)
    return config


def test_the_reference_is_a_model_of_its_own() -> None:
    config = resolved(DISTILL)
    assert Role.REFERENCE in roles(config)
    assert {role: learner_spec(config, role, 1).model_path for role in (Role.POLICY, Role.REFERENCE)} == {
        Role.POLICY: "A",
        Role.REFERENCE: "T",
    }
    own = resolved(f"{RUN} --reward.remote_url r.py --ref.model_name_or_path ''")
    assert learner_spec(own, Role.REFERENCE, 1).model_path == "A"


def test_the_plan_counts_the_teachers_own_shape(tmp_path: Any) -> None:
    for name, hidden in (("student", 8), ("teacher", 32)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            f'{{"model_type": "qwen3", "hidden_size": {hidden}, "num_hidden_layers": 2, "num_attention_heads": 2, '
            '"vocab_size": 64, "intermediate_size": 16}'
        )
    line = DISTILL.replace("path A", f"path {tmp_path}/student").replace("path T", f"path {tmp_path}/teacher")
    shapes = model_shapes(resolved(line))
    assert (shapes[Role.POLICY].hidden, shapes[Role.REFERENCE].hidden) == (8, 32)
    for flags, held in (("", []), ("--algo.distill.divergence jsd", [4 * 64 * 32]), ("--algo.distill.top_k 4", [])):
        found = memory(resolved(f"{line} {flags}"), shapes, Budget(device_bytes=None))
        assert [part.bytes for part in found if part.name == "teacher's output layer"] == held


def test_no_reward_is_needed_unless_it_counts() -> None:
    assert [str(v) for v in check_rules(resolved(DISTILL), CPU)] == []
    (violation,) = check_rules(resolved(f"{DISTILL} --algo.distill.reward_coef 0.5"), CPU)
    assert "nothing gives rewards" in str(violation)
    assert check_rules(resolved(f"{DISTILL} --algo.distill.reward_coef 0.5 --reward.remote_url r.py"), CPU) == []


def algo(estimator: str = "on_policy_distill", **options: Any) -> AlgoConfig:
    distill = PolicyDistillConfig(**options)
    return AlgoConfig(advantage=AdvantageConfig(estimator=estimator), kl=KLConfig(init_coef=0.0), distill=distill)


def prepared(config: AlgoConfig, rewards: tuple[float, ...] = (1.0, -1.0)) -> tuple[PolicyRank, Any]:
    """A batch of two samples: 0 then 2 1, and 0 then 1."""
    own = toy_config(config)
    rank, teacher = toy_rank(PolicyRank, STUDENT, own), toy_rank(ReferenceRank, TEACHER, own)
    shares = [references([sampled([0, 2, 1]), sampled([0, 1])], rewards)]
    return rank, rank.prepare(shares, scores={"ref_logprobs": [teacher.logprobs(shares)]}, kl_coef=0.0)


@pytest.mark.parametrize(("coef", "reward_coef"), [(1.0, 0.0), (0.5, 0.0), (1.0, 2.0)])
def test_advantages_are_the_teachers_log_ratios(coef: float, reward_coef: float) -> None:
    """No discount, no baseline, no whitening; the reward, where it counts, reaches every token of its sample."""
    rank, batch = prepared(algo(coef=coef, reward_coef=reward_coef))
    d = TEACHER.log_softmax(-1) - STUDENT.log_softmax(-1)
    expected = [[0, coef * d[0, 2] + reward_coef, coef * d[2, 1] + reward_coef], [0, coef * d[0, 1] - reward_coef, 0]]
    assert torch.allclose(batch.batch.advantages, torch.tensor(expected), atol=1e-6)
    metrics = combine_sums([rank.metrics(batch)])
    assert metrics["train/kl"] == pytest.approx(-float(d[0, 2] + d[2, 1] + d[0, 1]) / 3, abs=1e-6)


def test_a_divergence_takes_the_place_of_sampled_log_ratios() -> None:
    rank, batch = prepared(algo(divergence="forward", reward_coef=1.0))
    assert batch.batch.advantages.tolist() == [[0, 1, 1], [0, -1, 0]]
    assert rank.learner.scored == 0  # pyright: ignore[reportAttributeAccessIssue]
    assert build(TrainPPOConfig(), {"algo.distill.divergence": "jsd"}).has_reference


@pytest.mark.parametrize(("kind", "top_k", "jsd_beta"), [("reverse", 3, 0.5), ("forward", 2, 0.5), ("jsd", 3, 0.2)])
def test_a_rank_learns_the_whole_distribution(kind: Any, top_k: int, jsd_beta: float) -> None:
    """The step is that of the divergence at the three sampled tokens' places, whichever tokens those were."""
    config = algo(divergence=kind, top_k=top_k, jsd_beta=jsd_beta, coef=2.0)
    own = toy_config(config)
    rank, teacher = toy_rank(PolicyRank, STUDENT, own), toy_rank(ReferenceRank, TEACHER, own)
    shares = [references([sampled([0, 2, 1]), sampled([0, 1])], (1.0, -1.0))]
    batch = rank.prepare(shares, scores={}, kl_coef=0.0, told=[teacher.tell(shares)])
    assert "train/kl" not in combine_sums([rank.metrics(batch)])
    metrics = combine_sums([rank.update(batch, [0], kl_coef=0.0)])
    table = STUDENT.clone().requires_grad_()
    top = top_tokens(TEACHER, LOGITS, top_k)
    places = token_divergence(table, LOGITS, top, kind, jsd_beta)[[0, 2, 0]]
    (expected,) = torch.autograd.grad(2.0 * places.mean(), table)
    assert torch.allclose(rank.learner.gradients[0], expected, atol=1e-6)  # pyright: ignore[reportAttributeAccessIssue]
    assert metrics["train/distill_loss"] == pytest.approx(float(places.mean().detach()), abs=1e-6)


def kl_from(teacher: torch.Tensor, ranks: Any) -> float:
    log_q, log_p = ranks.policy.learner.table.detach().log_softmax(-1), teacher.log_softmax(-1)
    return float((log_q.exp() * (log_q - log_p)).sum(-1).max())


ENDS = [(None, 2.0, 1e-3), ("reverse", 4.0, 1e-3), ("forward", 4.0, 1e-3), ("jsd", 12.0, 1e-3)]


@pytest.mark.parametrize(("divergence", "lr", "most"), ENDS)
def test_a_run_without_rewards_ends_at_its_teacher(divergence: str | None, lr: float, most: float) -> None:
    """Sampling, scoring and steps of the production code, with tables for models."""
    flags = {
        "algo.advantage.estimator": "on_policy_distill",
        "algo.distill.divergence": divergence,
        "algo.distill.top_k": 3 if divergence else 0,
        "algo.kl.init_coef": 0.0,
        "ref.model_name_or_path": "T",
    }
    config = build(TrainPPOConfig(), flags)
    ranks = toy_ranks(config, TEACHER, policy=torch.zeros(3, 3), lr=lr)
    rollout = ToyRollout(policy=ranks.policy, n=16, length=8, reward=lambda tokens: 0.0)

    async def step() -> None:
        group = await rollout.run_group(PromptItem(prompt="", label="", group_id="g", position=0, episode=0))
        samples = references(group.handle, [0.0] * 16)
        prepared = await ranks.prepare([samples], kl_coef=0.0)
        await ranks.update(prepared, [0], kl_coef=0.0, freeze_actor=[False])

    async def run() -> None:
        for _ in range(50):
            await step()

    before = kl_from(TEACHER, ranks)
    asyncio.run(run())
    assert kl_from(TEACHER, ranks) <= most < before
