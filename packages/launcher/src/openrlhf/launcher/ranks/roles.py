"""One class per role: what a rank of the policy, the critic, the reference or the reward model does in a step.

Nothing but the model is remembered between two calls: a method that prepares gives a `RankBatch`, and what is done with
a batch takes it. Methods are collective over the role's ranks. Nothing of Ray: `resolve` fetches what handles mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf.core.advantages import Advantages, compute_advantages, whiten
from openrlhf.core.batch import Batch
from openrlhf.core.entropy_control import clip_cov, token_noise
from openrlhf.core.kl import kl_estimate
from openrlhf.core.losses.distill import teacher_rewards
from openrlhf.core.losses.policy import PolicyLossFunction, policy_loss
from openrlhf.core.masks import select
from openrlhf.core.rewards import token_rewards
from openrlhf.core.truncation import KeptTokens
from openrlhf.launcher.ranks.batches import (
    PerSample,
    RankBatch,
    Sums,
    ToldPerSample,
    add_sums,
    gather_trainable,
    load_batch,
    metric_names,
    prepared_sums,
    scatter_trainable,
    told_rows,
)
from openrlhf.launcher.ranks.config import RankConfig
from openrlhf.launcher.ranks.images import image_probe
from openrlhf.launcher.ranks.recording import Recorder
from openrlhf.launcher.samples import SampleRef
from openrlhf.launcher.vision import ImageProcessor, load_processor
from openrlhf.learner.following import Following
from openrlhf.learner.heads import TokenDistribution
from openrlhf.learner.learner import Learner
from openrlhf.learner.modules import rounded
from openrlhf.learner.objective import Objective, PolicyObjective, ValueObjective
from openrlhf.learner.teaching import with_layer

Resolve = Callable[[str, Sequence[Any]], list[Any]]
"""What lies behind handles, in order; the text says what that is, for messages."""

Shares = Sequence[Sequence[SampleRef]]
"""A rank's samples, one share per mini-batch."""


class Rank:
    """What all roles have in common: a model, and the way from sample references to a batch."""

    def __init__(self, learner: Learner, config: RankConfig, resolve: Resolve) -> None:
        self.learner = learner
        self.config = config
        self._resolve = resolve
        self._images: ImageProcessor | None = None
        if config.processor_path is not None and config.images:
            self._images = ImageProcessor(config.processor_path)
            learner.image_probe = image_probe(self._images)
        learner.sleep()

    def load(self, shares: Shares) -> RankBatch:
        """Fetch this rank's samples and make tensors of them."""
        samples = [sample for share in shares for sample in share]
        keys = list({id(s.handle): s.handle for s in samples}.values())
        groups = dict(zip(map(id, keys), self._resolve("samples", keys), strict=True))
        return load_batch(
            shares,
            [groups[id(s.handle)][s.position] for s in samples],
            max_len=self.config.max_len,
            pad_token_id=self.config.pad_token_id,
            image_processor=self._images,
        )

    def fetch(self, batch: Batch, what: str, parts: Sequence[Any]) -> Tensor:
        """What other ranks computed for the trainable tokens, [B, T]. parts: handles of their `PerSample`s."""
        return scatter_trainable(batch, self._resolve(what, parts))


class ReferenceRank(Rank):
    """A language model that scores what another one sampled; with adapters the base under the policy's own."""

    def logprobs(self, shares: Shares, kept: Sequence[Any] | None = None) -> PerSample:
        """Log-probs of the trainable tokens of every sample of the share.

        kept: handles of what `PolicyRank.kept` gave. Where sampling is truncated, both models are compared over the
        tokens that the policy kept: among its own the reference may not have the sampled one at all.
        """
        batch = self.load(shares).batch
        if kept is not None:
            sets: dict[int, KeptTokens] = {}
            for part in self._resolve("kept tokens", kept):
                sets |= part
            batch = batch.with_(kept=[sets[index] for index in batch.index.tolist()])
        with self.learner.base():
            return gather_trainable(batch, self.learner.score(batch).logprobs)

    def tell(self, shares: Shares) -> ToldPerSample:
        """As a teacher: what the policy has to know of the distributions at the trainable tokens."""
        batch, lesson = self.load(shares).batch, self.config.lesson
        assert lesson is not None, "a teacher tells distributions where a divergence is trained"
        with self.learner.base():
            return dict(zip(batch.index.tolist(), self.learner.tell(batch, lesson), strict=True))

    def output_layer(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the output layer, with which states say distributions."""
        return self.learner.output_layer()

    def follow(self, weights: Sequence[Any]) -> None:
        """Move towards the policy. weights: a handle of one bucket of its whole tensors."""
        for bucket in self._resolve("policy weights", weights):
            self._following().take(bucket)

    def save_followed(self, folder: str) -> dict[str, int]:
        """Write the whole weights; rank 0 makes the folder, and returns its files with their bytes."""
        return self._following().save(Path(folder))

    def load_followed(self, folder: str) -> None:
        """Restore them, with any number of ranks."""
        self._following().load(Path(folder))

    def _following(self) -> Following:
        assert self.learner.following is not None, "a reference that follows the policy has its `follow_alpha`"
        return self.learner.following


class RewardRank(Rank):
    """A frozen model that gives every sample a number."""

    def rewards(self, shares: Shares) -> dict[int, float]:
        """One raw reward per sample."""
        batch = self.load(shares).batch
        rewards = self.learner.score(batch).rewards
        assert rewards is not None, "a reward learner scores rewards"
        return dict(zip(batch.index.tolist(), rewards.tolist(), strict=True))

    def statistics(self) -> tuple[float, float] | None:
        """(mean, std) of its rewards that the model's configuration carries, if it does."""
        return self.learner.reward_mean_std


class TrainedRank(Rank):
    """A model with an optimiser."""

    def export(self, path: str, tokenizer_path: str, *, trial: bool = False) -> None:
        """Write the model with the tokenizer (or the processor, which holds it) of another folder or hub name.

        trial: everything is written and removed again.
        """
        from transformers import AutoTokenizer

        loads = AutoTokenizer.from_pretrained if self.config.processor_path is None else load_processor
        write = self.learner.try_export if trial else self.learner.export_hf
        write(path, loads(tokenizer_path))

    def save(self, folder: str) -> dict[str, int]:
        """Write this rank's part of a checkpoint. Returns the files that it then sees there, with their bytes."""
        return self.learner.save_checkpoint(folder)

    def load_checkpoint(self, folder: str) -> None:
        """Restore this rank's part of a checkpoint."""
        self.learner.wake()
        self.learner.load_checkpoint(folder)
        self.learner.sleep()

    def _steps(
        self, prepared: RankBatch, objective: Objective, order: Sequence[int], freeze: Sequence[bool] = ()
    ) -> Sums:
        """One optimiser step per mini-batch, in this order; a frozen one is skipped on every rank."""
        sums: Sums = {}
        self.learner.wake()
        for number, frozen in zip(order, freeze or [False] * len(order), strict=True):
            if not frozen:
                add_sums(sums, self.learner.update(prepared.mini_batch(number), objective))
        self.learner.sleep()
        return metric_names(sums, self.learner.spec.role)


class CriticRank(TrainedRank):
    """A model of the return that is to be expected: `values`, `prepare` with the policy's returns, `update`."""

    def values(self, shares: Shares) -> RankBatch:
        """The values before the update; the clipped value loss needs them too."""
        loaded = self.load(shares)
        return loaded.with_(values=self.learner.score(loaded.batch).values)

    def read(self, valued: RankBatch) -> PerSample:
        """The values for the policy's ranks."""
        return gather_trainable(valued.batch, valued.batch.values)

    def prepare(self, valued: RankBatch, *, returns: Sequence[Any]) -> RankBatch:
        """Add what the values should have been. returns: handles of what policy ranks computed."""
        return valued.with_(returns=self.fetch(valued.batch, "policy returns", returns))

    def update(self, prepared: RankBatch, order: Sequence[int], *, members: str | None = None) -> Sums:
        """One optimiser step per mini-batch. Returns sums of metrics over all ranks."""
        config = self.config
        objective = ValueObjective(value_clip=config.value_clip, aux_coef=config.policy_loss.aux_loss_coef)
        return self._steps(prepared.dealt(members), objective, order)


SCORES = {"ref_logprobs": "reference log-probs", "values": "critic values"}
"""Fields of `Batch` that other roles' ranks compute for the policy -> what messages call them."""


class PolicyRank(TrainedRank, ReferenceRank):
    """The model that samples: `prepare` computes advantages, `update` trains on them."""

    def __init__(self, learner: Learner, config: RankConfig, resolve: Resolve) -> None:
        super().__init__(learner, config, resolve)
        loss, advantages = config.plugins.loss, config.plugins.advantages
        self._loss: PolicyLossFunction = policy_loss if loss is None else loss.load()
        self._advantages: Advantages | None = None if advantages is None else advantages.load()
        self._recorder = Recorder.of(config.record, learner.spec.ds.ranks_per_sample)

    def sampled(self, shares: Shares) -> RankBatch:
        """The share with old log-probs and, where sampling is truncated, the tokens that it kept: for `prepare`."""
        return self._scored(self.load(shares))

    def kept(self, sampled: RankBatch) -> dict[int, KeptTokens]:
        """Per sample the kept tokens at its trainable ones, for the reference."""
        sets = sampled.batch.kept
        assert sets is not None, "only a truncated distribution keeps tokens"
        return dict(zip(sampled.batch.index.tolist(), sets, strict=True))

    def _scored(self, loaded: RankBatch) -> RankBatch:
        scores, metrics = self.learner.score(loaded.batch), dict(loaded.metrics)
        if scores.outside is not None:
            tokens = float(loaded.batch.action_mask.sum())
            metrics["train/outside_kept"] = (float(scores.outside.sum()), tokens)
        return replace(loaded.with_(old_logprobs=scores.logprobs, kept=scores.kept), metrics=metrics)

    def prepare(
        self,
        share: Shares | RankBatch,
        *,
        scores: Mapping[str, Sequence[Any]],
        kl_coef: float,
        told: Sequence[Any] = (),
        layer: Sequence[Any] = (),
        step: int = 0,
    ) -> RankBatch:
        """Old log-probs where they are needed, KL, advantages and returns.

        share: this rank's samples, or what `sampled` made of them.
        scores: fields in `SCORES` -> handles of what the ranks of another role computed for them. told: handles of what
        a teacher's ranks told of distributions. layer: of its output layer, the first time. step: the batch's number.
        Old log-probs are not needed when the batch is trained on in one optimiser step: then the ratio is 1.
        """
        loaded = share if isinstance(share, RankBatch) else self.load(share)
        steps = len(loaded.rows) * self.learner.spec.batch.max_epochs
        algo = self.config.algo
        penalty = algo.kl.init_coef > 0 and "ref_logprobs" in scores and not algo.kl.use_loss
        ratios = penalty or algo.samples_teacher
        clips = self.config.policy_loss.clip_cov_share is not None
        if loaded.batch.old_logprobs is None and (ratios or clips or steps > 1 or self.config.force_old_logprobs):
            loaded = self._scored(loaded)
        batch = loaded.batch.with_(
            **{name: self.fetch(loaded.batch, SCORES[name], parts) for name, parts in scores.items()}
        )
        if told:
            batch = batch.with_(teacher=told_rows(batch, self._resolve("what the teacher says", told)))
            self._take_lesson(layer)
        kl = None
        if ratios:
            assert batch.old_logprobs is not None
            assert batch.ref_logprobs is not None
            kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, algo.kl.estimator) * batch.action_mask
        rewards = self._token_rewards(batch, kl, kl_coef)
        advantages, returns = compute_advantages(
            algo.advantage.estimator,
            rewards,
            batch.action_mask,
            values=batch.values,
            gamma=algo.advantage.gamma,
            lambd=algo.advantage.lambd,
            own=self._advantages,
        )
        if algo.advantage.row.whitens:
            advantages = whiten(
                advantages,
                batch.action_mask,
                no_std_norm=algo.advantage.no_std_norm,
                reduce=self.learner.reduce_sum,
            )
        batch = batch.with_(advantages=advantages, returns=returns)
        metrics = loaded.metrics | prepared_sums(batch, rewards, kl)
        if self.config.policy_loss.clip_cov_share is not None:
            batch, metrics["train/clip_cov"] = self._clip_cov(batch, self.config.policy_loss.clip_cov_share)
        return replace(loaded, batch=batch, metrics=metrics, step=step)

    def _clip_cov(self, batch: Batch, share: float) -> tuple[Batch, tuple[float, float]]:
        """The batch with advantage 0 at the tokens that `clip_cov` leaves out, and their share as (sum, count)."""
        assert batch.advantages is not None
        assert batch.old_logprobs is not None
        left_out = clip_cov(
            batch.advantages,
            batch.old_logprobs,
            batch.action_mask,
            share=share,
            bounds=self.config.policy_loss.clip_cov_range,
            noise=token_noise(batch.tokens, batch.index),
            reduce=self.learner.reduce_sum,
        )
        kept = batch.with_(advantages=select(batch.advantages, ~left_out))
        return kept, (float(left_out.sum()), float(batch.action_mask.sum()))

    def _take_lesson(self, layer: Sequence[Any]) -> None:
        """Let the learner compare itself with the teacher from now on."""
        lesson, learner = self.config.lesson, self.learner
        if lesson is None or (learner.lesson is not None and not layer):
            return
        for found in self._resolve("the teacher's output layer", layer):
            lesson = with_layer(lesson, found, learner.module.distribution, learner.device)
        learner.lesson = lesson

    def _token_rewards(self, batch: Batch, kl: Tensor | None, kl_coef: float) -> Tensor:
        """Of the sample and the KL, or of the teacher (which a divergence in the loss leaves out), [B, T]."""
        assert batch.rewards is not None
        algo = self.config.algo
        if not algo.advantage.row.teacher:
            return token_rewards(batch.rewards, kl, kl_coef, batch.action_mask, turns=batch.turn_rewards)
        own = torch.zeros(batch.tokens.shape) if batch.old_logprobs is None else batch.old_logprobs
        told = batch.ref_logprobs if algo.samples_teacher else own
        assert told is not None, "a teacher's log-probs are reference log-probs"
        return teacher_rewards(
            told,
            own,
            batch.action_mask,
            coef=algo.distill.coef,
            reward=batch.rewards,
            reward_coef=algo.distill.reward_coef,
        )

    def metrics(self, prepared: RankBatch) -> Sums:
        """What `prepare` measured, summed over this rank."""
        return prepared.metrics

    def returns(self, prepared: RankBatch) -> PerSample:
        """What the critic's values should have been."""
        return gather_trainable(prepared.batch, prepared.batch.returns)

    def update(
        self,
        prepared: RankBatch,
        order: Sequence[int],
        *,
        kl_coef: float,
        freeze: Sequence[bool] = (),
        members: str | None = None,
    ) -> Sums:
        """One optimiser step per mini-batch, unless it is frozen. Returns sums of metrics over all ranks.

        members: see `RankBatch.dealt`.
        """
        with self._recorder.watching(prepared, self.objective(prepared.batch, kl_coef)) as objective:
            return self._steps(prepared.dealt(members), objective, order, freeze)

    def objective(self, batch: Batch, kl_coef: float) -> PolicyObjective:
        """The loss of a prepared batch."""
        config, kl = self.config, self.config.algo.kl
        return PolicyObjective(
            config=config.policy_loss,
            correction=config.algo.advantage if config.algo.advantage.is_correction_enable else None,
            kl_coef=kl_coef if kl.use_loss and batch.ref_logprobs is not None else None,
            kl_estimator=kl.estimator,
            agg_constant=config.agg_constant,
            loss=self._loss,
            detach_old=batch.old_logprobs is None,
            distill_coef=config.algo.distill.coef if batch.teacher is not None else None,
        )

    def check_logprobs(
        self, rows: Sequence[Sequence[int]], *, bits: int | None = None, sampled: bool = False
    ) -> list[list[float]]:
        """Log-probs of token rows at temperature 1, 0.0 for each row's first token, in one forward pass.

        sampled: over what an engine samples from, else over the whole vocabulary, as it scores. bits: of every layer.
        """
        width = max(map(len, rows))
        tokens = torch.tensor([[*row, *[self.config.pad_token_id] * (width - len(row))] for row in rows])
        mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
        action = mask.clone()
        action[:, 0] = False
        batch = Batch(tokens=tokens, attention_mask=mask, action_mask=action, index=torch.arange(len(rows)))
        distribution = TokenDistribution(suppressed=self.learner.spec.suppressed_token_ids if sampled else ())
        with nullcontext() if bits is None else rounded(self.learner.module.model.base_model, bits):
            scored = self.learner.score(batch, distribution=distribution, at_once=True).logprobs
        assert scored is not None, "only language models are checked"
        return [scored[i, : len(row)].tolist() for i, row in enumerate(rows)]
