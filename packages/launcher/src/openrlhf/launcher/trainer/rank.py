"""What one learner rank does with a rollout batch: tensors from here on, nothing of Ray.

A rank holds the samples of its share of every mini-batch for the length of a step. Values that another role's ranks
computed arrive as {sample index: values of its trainable tokens} and are scattered into place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from openrlhf.agents.types import Trajectory
from openrlhf.core.advantages import compute_advantages, whiten
from openrlhf.core.batch import Batch
from openrlhf.core.kl import kl_estimate
from openrlhf.core.rewards import token_rewards
from openrlhf.launcher.trainer.experience import build_batch
from openrlhf.launcher.trainer.images import image_probe
from openrlhf.launcher.trainer.protocols import SampleRef
from openrlhf.launcher.trainer.rank_config import RankConfig
from openrlhf.launcher.vision import ImageProcessor, load_processor
from openrlhf.learner.heads import TokenDistribution
from openrlhf.learner.learner import Learner
from openrlhf.learner.modules import rounded
from openrlhf.learner.objective import Objective, PolicyObjective, ValueObjective

Resolve = Callable[[Sequence[Any]], list[Sequence[Trajectory]]]
"""Turns handles into lists of trajectories, in order."""

PerSample = Mapping[int, Tensor]
"""Sample index -> float32 values of its trainable tokens, in order."""

Sums = dict[str, tuple[float, float]]
"""Metric -> (sum, count) over this rank."""


class RankTrainer:
    """One rank of one role."""

    def __init__(self, learner: Learner, config: RankConfig, resolve: Resolve) -> None:
        self.learner = learner
        self.config = config
        self._resolve = resolve
        self._batch: Batch | None = None
        self._rows: list[list[int]] = []
        self._images: ImageProcessor | None = None
        if config.processor_path is not None and config.images:
            self._images = ImageProcessor(config.processor_path)
            learner.image_probe = image_probe(self._images)
        learner.sleep()

    def load(self, shares: Sequence[Sequence[SampleRef]]) -> Batch:
        """Fetch this rank's samples, one share per mini-batch, and keep them as one Batch."""
        samples = [sample for share in shares for sample in share]
        positions = iter(range(len(samples)))
        self._rows = [[next(positions) for _ in share] for share in shares]
        keys = list({id(s.handle): s.handle for s in samples}.values())
        groups = dict(zip(map(id, keys), self._resolve(keys), strict=True))
        self._batch = build_batch(
            [groups[id(s.handle)][s.position] for s in samples],
            indices=[s.index for s in samples],
            rewards=[s.reward for s in samples],
            max_len=self.config.max_len,
            pad_token_id=self.config.pad_token_id,
            image_processor=self._images,
        )
        return self._batch

    def logprobs(self, shares: Sequence[Sequence[SampleRef]]) -> dict[int, Tensor]:
        """Reference role: log-probs of the trainable tokens of every sample of the share."""
        batch = self.load(shares)
        return gather_trainable(batch, self.learner.score(batch).logprobs)

    def values(self, shares: Sequence[Sequence[SampleRef]]) -> dict[int, Tensor]:
        """Critic role: the values before the update; they stay here for the clipped value loss too."""
        batch = self.load(shares)
        values = self.learner.score(batch).values
        self._batch = batch.with_(values=values)
        return gather_trainable(batch, values)

    def reward_statistics(self) -> tuple[float, float] | None:
        """Reward role: (mean, std) of its rewards that the model's configuration carries, if it does."""
        return self.learner.reward_mean_std

    def rewards(self, shares: Sequence[Sequence[SampleRef]]) -> dict[int, float]:
        """Reward role: one raw reward per sample."""
        batch = self.load(shares)
        rewards = self.learner.score(batch).rewards
        assert rewards is not None, "a reward learner scores rewards"
        return dict(zip(batch.index.tolist(), rewards.tolist(), strict=True))

    def prepare(
        self,
        shares: Sequence[Sequence[SampleRef]],
        *,
        refs: Sequence[PerSample],
        values: Sequence[PerSample],
        kl_coef: float,
    ) -> tuple[Sums, dict[int, Tensor]]:
        """Policy role: old log-probs where they are needed, KL, advantages. Returns metrics and the critic's returns.

        Old log-probs are not needed when the batch is trained on in one optimiser step: then the ratio is 1.
        """
        steps = len(shares) * self.learner.spec.batch.max_epochs
        algo, batch = self.config.algo, self.load(shares)
        if refs:
            batch = batch.with_(ref_logprobs=scatter_trainable(batch, refs))
        if values:
            batch = batch.with_(values=scatter_trainable(batch, values))
        penalty = bool(refs) and not algo.kl.use_loss
        if penalty or steps > 1 or self.config.force_old_logprobs:
            batch = batch.with_(old_logprobs=self.learner.score(batch).logprobs)
        assert batch.rewards is not None
        kl = None
        if penalty:
            assert batch.old_logprobs is not None
            assert batch.ref_logprobs is not None
            kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, algo.kl.estimator) * batch.action_mask
        rewards = token_rewards(batch.rewards, kl, kl_coef, batch.action_mask)
        advantages, returns = compute_advantages(
            algo.advantage.estimator,
            rewards,
            batch.action_mask,
            values=batch.values,
            gamma=algo.advantage.gamma,
            lambd=algo.advantage.lambd,
        )
        if algo.advantage.row.whitens:
            advantages = whiten(
                advantages,
                batch.action_mask,
                no_std_norm=algo.advantage.no_std_norm,
                reduce=self.learner.reduce_sum,
            )
        self._batch = batch.with_(advantages=advantages, returns=returns)
        sums = prepared_metrics(self._batch, rewards, kl)
        return sums, gather_trainable(self._batch, returns) if values else {}

    def set_returns(self, returns: Sequence[PerSample]) -> None:
        """Critic role: what its values should have been."""
        assert self._batch is not None, "values() comes before set_returns()"
        self._batch = self._batch.with_(returns=scatter_trainable(self._batch, returns))

    def update(self, order: Sequence[int], *, kl_coef: float, freeze: Sequence[bool] = ()) -> Sums:
        """One optimiser step per mini-batch; a frozen one is skipped on every rank."""
        assert self._batch is not None, "prepare() comes before update()"
        objective = self._objective(kl_coef)
        sums: Sums = {}
        self.learner.wake()
        for k, frozen in zip(order, freeze or [False] * len(order), strict=True):
            if not frozen:
                add_sums(sums, self.learner.update(self._batch.select(self._rows[k]), objective))
        self.learner.sleep()
        return metric_names(sums, self.learner.spec.role)

    def check_logprobs(self, rows: Sequence[Sequence[int]], *, bits: int | None = None) -> list[list[float]]:
        """Log-probs of token rows at temperature 1, 0.0 for each row's first token, in one forward pass.

        Over the whole vocabulary, as an engine scores a prompt. bits: with the output of every layer rounded to so
        many significant bits.
        """
        width = max(map(len, rows))
        tokens = torch.tensor([[*row, *[self.config.pad_token_id] * (width - len(row))] for row in rows])
        mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
        action = mask.clone()
        action[:, 0] = False
        batch = Batch(tokens=tokens, attention_mask=mask, action_mask=action, index=torch.arange(len(rows)))
        with nullcontext() if bits is None else rounded(self.learner.module.model.base_model, bits):
            scored = self.learner.score(batch, distribution=TokenDistribution(), at_once=True).logprobs
        assert scored is not None, "only language models are checked"
        return [scored[i, : len(row)].tolist() for i, row in enumerate(rows)]

    def export(self, path: str, tokenizer_path: str, *, trial: bool = False) -> None:
        """Write the model with the tokenizer (or the processor, which holds it) of another folder or hub name.

        trial: everything is written and removed again.
        """
        from transformers import AutoTokenizer

        loads = AutoTokenizer.from_pretrained if self.config.processor_path is None else load_processor
        write = self.learner.try_export if trial else self.learner.export_hf
        write(path, loads(tokenizer_path))

    def save(self, folder: str) -> None:
        """Write this rank's part of a checkpoint; rank 0 makes the folder."""
        self.learner.save_checkpoint(folder)

    def load_checkpoint(self, folder: str) -> None:
        """Restore this rank's part of a checkpoint."""
        self.learner.wake()
        self.learner.load_checkpoint(folder)
        self.learner.sleep()

    def _objective(self, kl_coef: float) -> Objective:
        config, kl = self.config, self.config.algo.kl
        assert self._batch is not None
        if self.learner.spec.role == "critic":
            return ValueObjective(value_clip=config.value_clip, aux_coef=config.policy_loss.aux_loss_coef)
        return PolicyObjective(
            config=config.policy_loss,
            correction=config.algo.advantage if config.algo.advantage.is_correction_enable else None,
            kl_coef=kl_coef if kl.use_loss and self._batch.ref_logprobs is not None else None,
            kl_estimator=kl.estimator,
            agg_constant=config.agg_constant,
            detach_old=self._batch.old_logprobs is None,
        )


def gather_trainable(batch: Batch, per_token: Tensor | None) -> dict[int, Tensor]:
    """[B, T] -> {sample index: [its trainable tokens]}."""
    assert per_token is not None
    return {
        int(index): per_token[row][batch.action_mask[row]].clone() for row, index in enumerate(batch.index.tolist())
    }


def scatter_trainable(batch: Batch, parts: Sequence[PerSample]) -> Tensor:
    """{sample index: [its trainable tokens]} from any number of ranks -> [B, T], 0 elsewhere."""
    merged: dict[int, Tensor] = {}
    for part in parts:
        merged.update(part)
    out = torch.zeros(batch.tokens.shape, dtype=torch.float32)
    for row, index in enumerate(batch.index.tolist()):
        out[row][batch.action_mask[row]] = merged[int(index)].to(torch.float32)
    return out


def prepared_metrics(batch: Batch, rewards: Tensor, kl: Tensor | None) -> Sums:
    """Sums over this rank: KL per token, return per sample, moments and extremes of the advantages.

    The KL is 0 without a reference model; with the KL as a loss `update` measures it.
    """
    mask = batch.action_mask
    assert batch.advantages is not None
    tokens = float(mask.sum())
    chosen = batch.advantages[mask].double()
    sums: Sums = {
        "train/return": (float(rewards.sum()), float(batch.size)),
        "train/advantage_mean": (float(chosen.sum()), tokens),
        "advantage_square": (float((chosen * chosen).sum()), tokens),
        "train/advantage_min": (float(chosen.min()) if len(chosen) else float("inf"), 1.0),
        "train/advantage_max": (float(chosen.max()) if len(chosen) else float("-inf"), 1.0),
    }
    if kl is not None:
        sums["train/kl"] = (float(kl.sum()), tokens)
    elif batch.ref_logprobs is None:
        sums["train/kl"] = (0.0, tokens)
    return sums


OPTIMISER_METRICS = {"policy": "actor_", "critic": "critic_"}
"""lr and grad_norm of both models are told apart by their entity."""


def metric_names(sums: Sums, role: str) -> Sums:
    """The learner's metric names -> those of the dashboards; skipped steps become their number, not their share."""
    prefix = OPTIMISER_METRICS[role]
    sums = {name: (value, 1.0 if name == "skipped_steps" else count) for name, (value, count) in sums.items()}
    own = {"lr", "grad_norm"} if role == "policy" else {"lr", "grad_norm", "skipped_steps"}
    return {f"train/{prefix if name in own else ''}{name}": value for name, value in sums.items()}


def add_sums(total: Sums, more: Mapping[str, tuple[float, float]]) -> None:
    """Add (sum, count) metrics into `total`."""
    for name, (value, count) in more.items():
        old = total.get(name, (0.0, 0.0))
        total[name] = (old[0] + float(value), old[1] + float(count))


def combine_sums(ranks: Sequence[Sums]) -> dict[str, float]:
    """Means over ranks of (sum, count) metrics; advantage extremes and std by their own rules."""
    total: Sums = {}
    for sums in ranks:
        add_sums(total, sums)
    out = {name: value / count for name, (value, count) in total.items() if count > 0}
    square = out.pop("advantage_square", None)
    if square is not None:
        out["train/advantage_std"] = max(square - out["train/advantage_mean"] ** 2, 0.0) ** 0.5
        out["train/advantage_min"] = min(s["train/advantage_min"][0] for s in ranks)
        out["train/advantage_max"] = max(s["train/advantage_max"][0] for s in ranks)
    return out
