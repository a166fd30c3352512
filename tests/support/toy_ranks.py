"""Every role as one rank with a table for a model: the trainer's own way of the data, without engines or DeepSpeed.

The next token depends on the one before it only. Rewards, KL, advantages, losses and steps are the production code.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from openrlhf.agents.types import PromptItem, StopReason, Trajectory, Turn
from openrlhf.core.batch import Batch
from openrlhf.core.config import AlgoConfig, PolicyLossConfig
from openrlhf.core.losses.distill import OutputLayer, token_divergence, top_tokens
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.logging.sinks import GeneratedSample
from openrlhf.launcher.ranks.config import RankConfig, rank_config
from openrlhf.launcher.ranks.roles import CriticRank, PolicyRank, Rank, ReferenceRank, RewardRank
from openrlhf.launcher.samples import EvalRequest, Group, SampleRef, sample_info
from openrlhf.launcher.trainer.protocols import Prepared
from openrlhf.learner.collective import Collective, MetricSums
from openrlhf.learner.config import DsConfig, TrainBatchConfig
from openrlhf.learner.learner import Metrics, Scores
from openrlhf.learner.objective import ModelOutputs, Objective, sum_terms
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.teaching import Lesson, Told
from support.local_ranks import prepare_here, update_here

CPU = torch.device("cpu")
LOGITS = OutputLayer(weight=None)


def toy_spec(role: Role, *, max_epochs: int = 1) -> LearnerSpec:
    ds = DsConfig(param_dtype="fp32", attn_implementation="sdpa")
    return LearnerSpec(role=role, model_path="toy", ds=ds, batch=TrainBatchConfig(max_epochs=max_epochs))


class ToyLearner:
    """What a role needs of a `Learner`. table: logits [V, V] of a language model, else values [V]."""

    def __init__(self, role: Role, table: Tensor, *, lr: float = 0.1, max_epochs: int = 1) -> None:
        self.spec = toy_spec(role, max_epochs=max_epochs)
        self.table = table.clone().requires_grad_()
        self.lr = lr
        self.scored = 0
        self.gradients: list[Tensor] = []
        self.reward_mean_std: tuple[float, float] | None = None
        self.lesson: Lesson | None = None

    def _outputs(self, batch: Batch) -> ModelOutputs:
        before = torch.cat([torch.zeros_like(batch.tokens[:, :1]), batch.tokens[:, :-1]], 1)
        if not self.spec.role.is_language_model:
            return ModelOutputs(values=self.table[before])
        divergence = None
        if self.lesson is not None and batch.teacher is not None:
            states, mask = self.table[before], batch.action_mask
            teacher = self.lesson.teacher(batch, int(mask.sum()), CPU)
            found = token_divergence(states[mask], LOGITS, teacher, self.lesson.kind, self.lesson.beta)
            divergence = torch.zeros(mask.shape).masked_scatter(mask, found)
        logp = self.table.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        return ModelOutputs(logprobs=logp[before, batch.tokens], entropy=entropy[before], divergence=divergence)

    def base(self) -> AbstractContextManager[None]:
        return nullcontext()

    def tell(self, batch: Batch, lesson: Lesson) -> list[Told]:
        """Its most probable tokens: states of a table say nothing."""
        before = torch.cat([torch.zeros_like(batch.tokens[:, :1]), batch.tokens[:, :-1]], 1)
        tops = [
            top_tokens(self.table[b][m], LOGITS, lesson.top_k) for b, m in zip(before, batch.action_mask, strict=True)
        ]
        return [{"ids": t.ids, "logprobs": t.logprobs, "rest": t.rest} for t in tops]

    def score(self, batch: Batch) -> Scores:
        self.scored += 1
        outputs = self._outputs(batch)
        if self.spec.role is Role.REWARD:
            assert outputs.values is not None
            return Scores(rewards=self.table.detach()[batch.tokens[torch.arange(batch.size), batch.lengths - 1]])
        found = outputs.logprobs if outputs.logprobs is not None else outputs.values
        assert found is not None
        values = found.detach() * batch.action_mask
        return Scores(values=values) if self.spec.role is Role.CRITIC else Scores(logprobs=values)

    def update(self, batch: Batch, objective: Objective) -> Metrics:
        outputs = self._outputs(batch)
        if not objective.with_entropy:
            outputs = replace(outputs, entropy=None)
        terms, sums = objective(outputs, batch), MetricSums()
        sums.add(terms)
        loss = sum_terms(terms, objective.coefficients, objective.counts(batch), 1)
        assert loss is not None
        (gradient,) = torch.autograd.grad(loss, self.table)
        self.gradients.append(gradient)
        self.table = (self.table - self.lr * gradient).detach().requires_grad_()
        metrics = sums.reduce(Collective(CPU), [False])
        return metrics | {"grad_norm": (float(gradient.norm()), 1.0), "lr": (self.lr, 1.0), "skipped_steps": (0.0, 1.0)}

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


R = TypeVar("R", bound=Rank)
ROLES: dict[type[Rank], Role] = {
    PolicyRank: Role.POLICY,
    CriticRank: Role.CRITIC,
    ReferenceRank: Role.REFERENCE,
    RewardRank: Role.REWARD,
}


def toy_rank(kind: type[R], table: Tensor, config: RankConfig, **options: Any) -> R:
    """A rank whose handles are the things themselves."""
    learner: Any = ToyLearner(ROLES[kind], table, **options)
    return kind(learner, config, resolve=lambda what, handles: list(handles))


def toy_config(algo: AlgoConfig, policy_loss: PolicyLossConfig | None = None, **changes: Any) -> RankConfig:
    options: dict[str, Any] = {"value_clip": 0.5, "max_len": 64, "agg_constant": 8.0, "pad_token_id": 0, **changes}
    return RankConfig(algo=algo, policy_loss=policy_loss or PolicyLossConfig(), **options)


def sampled(tokens: Sequence[int], *, start: int = 1, logprob: float = -1.0, **changes: Any) -> Trajectory:
    """A trajectory whose tokens from `start` on were sampled in one turn."""
    n = len(tokens) - start
    options: dict[str, Any] = {
        "reward": 0.0,
        "stop_reason": StopReason.STOP,
        "group_id": "g",
        "sample_index": 0,
        **changes,
    }
    return Trajectory(
        token_ids=list(tokens),
        trainable=[0] * start + [1] * n,
        logprobs=[0.0] * start + [logprob] * n,
        versions=[-1] * start + [0] * n,
        prompt_length=start,
        turns=[Turn(start=start, end=len(tokens), finish_reason="stop")],
        **options,
    )


def references(rows: Sequence[Trajectory], rewards: Sequence[float]) -> list[SampleRef]:
    """The samples of one mini-batch."""
    return [
        SampleRef(handle=rows, position=i, index=i, reward=reward, length=len(row.token_ids))
        for i, (row, reward) in enumerate(zip(rows, rewards, strict=True))
    ]


@dataclass
class ToyRanks:
    """The trainer's `Learner`: one rank per role."""

    policy: PolicyRank
    critic: CriticRank | None = None
    reference: ReferenceRank | None = None
    reward: RewardRank | None = None

    async def score_rewards(self, samples: Sequence[SampleRef]) -> list[float]:
        assert self.reward is not None
        found = self.reward.rewards([samples])
        return [found[s.index] for s in samples]

    async def reward_statistics(self) -> tuple[float, float] | None:
        assert self.reward is not None
        return self.reward.statistics()

    async def prepare(self, mini_batches: Sequence[Sequence[SampleRef]], *, kl_coef: float, step: int = 0) -> Prepared:
        roles: dict[str, Any] = {"policy": self.policy, "critic": self.critic, "reference": self.reference}
        return prepare_here(mini_batches, **roles, kl_coef=kl_coef)

    async def update(
        self,
        prepared: Prepared,
        order: Sequence[int],
        *,
        kl_coef: float,
        freeze_actor: Sequence[bool],
        members: str | None = None,
    ) -> dict[str, float]:
        roles: dict[str, Any] = {"policy": self.policy, "critic": self.critic}
        return update_here(prepared, order, **roles, kl_coef=kl_coef, freeze=freeze_actor, members=members)

    async def push_weights(self, version: int) -> dict[str, float]:
        return {"rollout/sync_error": 0.0}

    async def sync_reference(self) -> None: ...

    async def blind_to(self, path: str) -> list[str]:
        return []

    async def save(self, folder: str) -> dict[str, int]:
        return {}

    async def load(self, folder: str) -> None: ...

    async def export(self, path: str, *, trial: bool = False) -> None: ...

    async def shutdown(self) -> None: ...


@dataclass
class ToyRollout:
    """Samples `length` tokens from the policy's own table after prompt token 0; reward: a rule over the tokens."""

    policy: PolicyRank
    n: int
    length: int
    reward: Any
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    async def run_group(self, item: PromptItem, *, evaluation: EvalRequest | None = None) -> Group:
        n = evaluation.n_samples_per_prompt if evaluation else self.n
        table: Any = self.policy.learner
        logp = table.table.detach().log_softmax(-1)
        tokens = torch.zeros(n, 1, dtype=torch.long)
        for _ in range(self.length):
            following = torch.multinomial(logp[tokens[:, -1]].exp(), 1, generator=self.generator)
            tokens = torch.cat([tokens, following], 1)
        logprobs = logp[tokens[:, :-1], tokens[:, 1:]].tolist()
        rows = [self._row(i, *row) for i, row in enumerate(zip(tokens.tolist(), logprobs, strict=True))]
        return Group(prompt=item, samples=[sample_info(row, max_len=64) for row in rows], handle=rows)

    def _row(self, number: int, tokens: list[int], logprobs: list[float]) -> Trajectory:
        reward = self.reward(tokens[1:])
        own = {"sample_index": number, "extra_logs": {"total": float(sum(tokens))}}
        row = sampled(tokens, reward=reward, score=reward, **own)
        return replace(row, logprobs=[0.0, *logprobs])

    async def read_samples(self, group: Group, count: int) -> list[GeneratedSample]:
        return [GeneratedSample(text=str(row.token_ids), reward=row.reward) for row in group.handle[:count]]

    async def fetch(self, group: Group) -> Any:
        return group.handle

    async def store(self, trajectories: Any) -> Any:
        return trajectories

    async def sleep(self) -> None: ...

    async def worker_metrics(self) -> dict[str, float]:
        return {}

    async def wake(self) -> None: ...

    async def shutdown(self) -> None: ...


def toy_ranks(config: TrainPPOConfig, reference: Tensor, *, policy: Tensor | None = None, lr: float) -> ToyRanks:
    """All roles that `config` asks for. The critic starts at 0; the reward model gives each last token its number."""
    own, size = rank_config(config, pad_token_id=0), len(reference)
    options: dict[str, Any] = {"lr": lr, "max_epochs": config.train.max_epochs}
    numbers = torch.arange(size, dtype=reference.dtype)
    return ToyRanks(
        policy=toy_rank(PolicyRank, reference if policy is None else policy, own, **options),
        critic=toy_rank(CriticRank, torch.zeros(size), own, **options) if config.has_critic else None,
        reference=toy_rank(ReferenceRank, reference, own) if config.has_reference else None,
        reward=toy_rank(RewardRank, numbers, own) if config.has_reward_model else None,
    )
