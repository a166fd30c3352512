"""`Learner`: one rank of one model. It scores batches and, given an optimiser, takes exact optimiser steps.

Methods are collective over the ranks of the role: all of them call, in the same order. A rank without samples passes a
batch of size 0; the ranks of a tensor-parallel or sequence group pass the same one. The learner knows nothing of Ray,
of rollouts, or of the other roles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf.core.batch import Batch
from openrlhf.core.truncation import KeptTokens
from openrlhf.learner import checkpoint, setup, weights
from openrlhf.learner.collective import Collective, MetricSums, check_same
from openrlhf.learner.ema import MovingAverage
from openrlhf.learner.engine import load_backend
from openrlhf.learner.export import export_hf
from openrlhf.learner.following import Following
from openrlhf.learner.heads import TokenDistribution
from openrlhf.learner.lora import adapters_off, export_adapters, has_adapters
from openrlhf.learner.lora_stream import Form
from openrlhf.learner.micro_batches import score_plan, update_plan
from openrlhf.learner.models import reward_statistics
from openrlhf.learner.modules import Readings, evaluating
from openrlhf.learner.objective import ModelOutputs, Objective, sum_terms
from openrlhf.learner.packing import (
    ModelInputs,
    build_inputs,
    build_last_token_inputs,
    has_images,
    placeholder,
    with_probe,
)
from openrlhf.learner.sequence_parallel.check import cut_rows
from openrlhf.learner.sequence_parallel.group import SequenceGroup
from openrlhf.learner.shared_check import can_share
from openrlhf.learner.sharing import worthwhile_families
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.teaching import Lesson, Told, tell

Metrics = dict[str, tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a model says about a batch, on the CPU in float32; [B, T] tensors are 0 where not action_mask.

    logprobs, entropy [B, T]: policy and reference. values [B, T]: critic, for the state that precedes token t.
    rewards [B]: reward model, read at the last real token.
    kept: what a truncated distribution keeps at every row's action tokens. outside [B, T]: 1 where such a token was
    outside of its set and was added; 0 where the batch came with its sets.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    kept: list[KeptTokens] | None = None
    outside: Tensor | None = None
    values: Tensor | None = None
    rewards: Tensor | None = None


class NonFiniteStepError(RuntimeError):
    """Too many optimiser steps in a row had a non-finite loss or gradient."""


class Learner:
    """One rank. `init_distributed` must have run; every rank builds the same spec.

    following: of a model that follows another one, else None.
    optimizer_steps: steps taken so far; skipped ones are not counted.
    shares_prompt: whether what samples have in common at their beginning is computed once (`batch.share_prompt`).
    image_probe: one row with an image, of which one token counts as sampled; needed where some micro-batches have
    images and others none (see `packing.with_probe`).
    sequence: the ranks that work on the same samples with this one (`ds.ring_attn_size`); None: none does.
    lesson: how updates compare this model with a teacher, of which batches tell (`Batch.teacher`); None: not at all.
    """

    def __init__(self, spec: LearnerSpec) -> None:
        self.spec = spec
        self.device = setup.training_device()
        setup.seed_everything(spec.batch.seed, full_determinism=spec.batch.full_determinism_enable)
        self.sequence = SequenceGroup.of(spec.ds.ring_attn_size)
        self._engine = load_backend(spec.ds.backend)(spec, self.device)
        self.module = self._engine.module
        with self._engine.on_device():
            self.module.check_head(self.device)
            if spec.packed:
                self.module.check_packing(self.device)
            self.shares_prompt = can_share(spec, self.module, self.device)
            if self.sequence is not None:
                cut_rows(spec, self.module, self.sequence, self.device)
        data_group = self._engine.data_group if self.sequence is None else self.sequence.data_group
        self.collective = Collective(self.device, data_group)
        self.hidden_size = int(self.module.model.config.get_text_config().hidden_size)
        self.ema = MovingAverage(self._engine, spec.batch.ema_beta) if spec.trained and spec.batch.enable_ema else None
        self.following = None if spec.follow_alpha is None else Following(self._engine, spec.follow_alpha)
        self.image_probe: Batch | None = None
        self.lesson: Lesson | None = None
        self.optimizer_steps = 0
        self.skipped_in_a_row = 0
        self.reward_mean_std = reward_statistics(self.module)

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over the ranks, on its own device; the argument is not changed."""
        return self.collective.sum(tensor)

    def _check_batch(self, batch: Batch) -> None:
        self._engine.check_batch(batch)
        if self.sequence is not None:
            check_same(batch, self.sequence.process_group, self.device, "sequence")

    # -- scoring

    def base(self) -> AbstractContextManager[None]:
        """Inside, scores are those of the model before training: a frozen one as it is, else with adapters off."""
        assert has_adapters(self.module) or not self.spec.trained, "full training leaves no base"
        return adapters_off(self.module)

    @torch.no_grad()
    def score(
        self,
        batch: Batch,
        *,
        with_entropy: bool = False,
        distribution: TokenDistribution | None = None,
        at_once: bool = False,
    ) -> Scores:
        """Log-probs, values or rewards of `batch`. Collective.

        distribution: what log-probs are of; None: what is trained, as the spec says. at_once: in one forward pass; for
        batches that are known to be small.
        """
        self._check_batch(batch)
        plan = [list(range(batch.size))] if at_once else self._score_plan(batch)
        count = len(plan)
        if self._engine.waits_in_forward:
            count = int(self.collective.max(float(count)))
        primary = torch.zeros(batch.size if self.spec.role is Role.REWARD else batch.tokens.shape)
        out = Scores(logprobs=primary, entropy=torch.zeros(batch.tokens.shape) if with_entropy else None)
        if self.spec.role.is_language_model and (distribution or self.module.distribution).truncation.active:
            kept = [KeptTokens.whole(0)] * batch.size
            out = replace(out, kept=kept, outside=torch.zeros(batch.tokens.shape))
        with self._engine.on_device(), evaluating(self.module):
            for number in range(count):
                rows = torch.tensor(plan[number] if number < len(plan) else [], dtype=torch.long)
                self._score_rows(batch, rows, out, distribution)
        if self.spec.role is Role.REWARD:
            return Scores(rewards=primary)
        if self.spec.role is Role.CRITIC:
            return Scores(values=primary)
        return out

    def _score_rows(self, batch: Batch, rows: Tensor, out: Scores, distribution: TokenDistribution | None) -> None:
        """Write the rows' scores into `out`, of any role into its `logprobs`. No rows: only communicate."""
        primary, entropy = out.logprobs, out.entropy
        assert primary is not None
        part = (batch.select(rows) if len(rows) else placeholder()).to(self.device)
        inputs = self._inputs(part)
        readings = self._engine.forward(inputs, with_entropy=entropy is not None, distribution=distribution)
        if not len(rows):
            return
        if self.spec.role is Role.REWARD:
            primary[rows] = readings.primary.cpu()
            return
        shape, mask = part.tokens.shape, part.action_mask
        read = ((primary, readings.primary), (entropy, readings.entropy), (out.outside, readings.outside))
        for place, values in read:
            if place is not None and values is not None:
                place[rows, : shape[1]] = (inputs.scatter(values.float(), shape) * mask).cpu()
        if out.kept is not None and readings.kept is not None:
            for row, kept in zip(rows.tolist(), readings.kept.to("cpu").split(mask.sum(-1).tolist()), strict=True):
                out.kept[row] = kept

    @torch.no_grad()
    def evaluate(self, batch: Batch, objective: Objective) -> Metrics:
        """What `objective` measures of `batch`, reduced over all ranks. Collective; changes nothing."""
        scores, sums = self.score(batch), MetricSums()
        sums.add(objective(ModelOutputs(logprobs=scores.logprobs, rewards=scores.rewards), batch))
        return sums.reduce(self.collective, [False] * self.collective.world_size)

    def tell(self, batch: Batch, lesson: Lesson) -> list[Told]:
        """What this model, as a teacher, tells of the trainable tokens of every row, on the CPU. Collective."""
        self._check_batch(batch)
        plan = self._score_plan(batch)
        count = int(self.collective.max(float(len(plan)))) if self._engine.waits_in_forward else len(plan)
        parts = [batch.select(rows) if rows else placeholder() for rows in [*plan, *[[]] * (count - len(plan))]]
        inputs = ((part.action_mask.sum(-1).tolist(), self._inputs(part.to(self.device))) for part in parts)
        with self._engine.on_device(), evaluating(self.module):
            told = tell(self._engine.forward, inputs, lesson)
        found = dict(zip((row for rows in plan for row in rows), told, strict=False))  # what is told of no row is last
        return [found[row] for row in range(batch.size)]

    def output_layer(self) -> tuple[Tensor, Tensor | None]:
        """The output layer's whole weight [V, H] and bias, on the CPU, for whom states are told to. Collective."""
        with self._engine.on_device(), torch.no_grad():
            (found,) = self._engine.whole([self.module.output_parameters], wanted=True)
            weight, *bias = [tensor.to("cpu", copy=True) for tensor in found]
        return weight, bias[0] if bias else None

    def _inputs(self, part: Batch) -> ModelInputs:
        """What this role reads: the state at every row's end (reward model), or before every trainable token."""
        families = worthwhile_families(part) if self.shares_prompt else None
        if self.spec.role is Role.REWARD:
            return build_last_token_inputs(part, packed=self.spec.packed, families=families)
        if self.image_probe is not None and not has_images(part):
            return with_probe(part, self.image_probe)
        return build_inputs(part, part.action_mask, packed=self.spec.packed, families=families)

    # -- training

    def update(self, batch: Batch, objective: Objective) -> Metrics:
        """Exactly one optimiser step over this rank's share of its samples.

        Each term is averaged over all its units on all ranks, whatever the split into micro-batches. Returns reduced
        metrics as (sum, count), the same on every rank: those of the losses, `grad_norm` (before clipping), `lr` (of
        this step) and `skipped_steps` (1 when the loss or the gradient was not finite, and no step was taken).
        A batch without any trainable unit on any rank takes no step.

        Raises:
            NonFiniteStepError: with this one `--train.max_skipped_steps` were skipped in a row.
        """
        if not self.spec.trained:
            raise ValueError(f"the {self.spec.role.value} model is frozen: its spec has no optim")
        self._check_batch(batch)
        shared, width = self.shares_prompt, self.hidden_size
        plan = update_plan(self.spec, batch, objective.rows_per_unit, shared=shared, hidden_size=width)
        counts, steps, empty_ranks = self.collective.agree(objective.counts(batch), len(plan), batch.size == 0)
        if not any(counts[term] > 0 for term, weight in objective.coefficients.items() if weight and term in counts):
            return {}
        sums, bad = MetricSums(), list[int]()

        def micro_loss(number: int) -> Tensor:
            rows = plan[number] if number < len(plan) else []
            loss, finite = self._micro_loss(batch, rows, objective, counts, sums)
            if not finite and not bad:
                bad.append(batch.first_non_finite(rows))
            return loss

        lr = self._engine.learning_rate()
        applied, grad_norm = self._engine.update(steps, micro_loss)
        self.optimizer_steps += int(applied)
        if applied and self.ema is not None:
            self.ema.update()
        metrics = sums.reduce(self.collective, empty_ranks)
        self._count_skip(applied, bad[0] if bad else -1)
        return metrics | {"grad_norm": (grad_norm, 1.0), "lr": (lr, 1.0), "skipped_steps": (float(not applied), 1.0)}

    def _micro_loss(
        self, batch: Batch, rows: list[int], objective: Objective, counts: Mapping[str, float], sums: MetricSums
    ) -> tuple[Tensor, bool]:
        """Loss of one micro-batch, scaled for the whole step, and whether it is finite."""
        part = (batch.select(rows) if rows else placeholder()).to(self.device)
        inputs = self._inputs(part)
        readings = self._engine.forward(
            inputs,
            with_entropy=objective.with_entropy,
            entropy_gradient=objective.coefficients.get("entropy_loss", 0.0) != 0.0,
            lesson=self.lesson,
            teacher=self.lesson and self.lesson.teacher(part, len(inputs.select), self.device),
        )
        if not rows:
            return readings.anchor(), True
        terms = objective(self._outputs(readings, inputs, part), part)
        sums.add(terms)
        # the ranks of a sequence group have the same loss, and each the gradient of its own tokens
        ranks = self.collective.world_size * self.spec.ds.ring_attn_size
        loss = sum_terms(terms, objective.coefficients, counts, ranks)
        if loss is None:
            return readings.anchor(), True
        if self.lesson is not None:  # a term without weight leaves out a head, which ranks without samples visit
            loss = loss + readings.anchor()
        if bool(torch.isfinite(loss)):
            return loss, True
        # NaN in every gradient makes all ranks skip the step, whichever part of the loss was at fault.
        return loss + readings.anchor() * float("nan"), False

    def _outputs(self, readings: Readings, inputs: ModelInputs, part: Batch) -> ModelOutputs:
        shape = part.tokens.shape
        dense = None if self.spec.role is Role.REWARD else inputs.scatter(readings.primary, shape)
        outside = None if part.kept is not None else readings.outside
        return ModelOutputs(
            logprobs=dense if self.spec.role.is_language_model else None,
            values=dense if self.spec.role is Role.CRITIC else None,
            rewards=readings.primary if self.spec.role is Role.REWARD else None,
            entropy=None if readings.entropy is None else inputs.scatter(readings.entropy, shape),
            outside=None if outside is None else inputs.scatter(outside.float(), shape),
            divergence=None if readings.divergence is None else inputs.scatter(readings.divergence, shape),
            aux_loss=readings.aux_loss,
            tokens=float(inputs.token_weights.sum()),
        )

    def _count_skip(self, applied: bool, bad: int) -> None:
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        if applied or self.skipped_in_a_row < self.spec.batch.max_skipped_steps:
            return
        first = self.collective.first_non_negative(bad)
        where = f"the first sample with a non-finite loss is number {first}" if first >= 0 else "every loss was finite"
        raise NonFiniteStepError(
            f"{self.skipped_in_a_row} optimiser steps in a row had a non-finite loss or gradient norm "
            f"(`batch.max_skipped_steps` {self.spec.batch.max_skipped_steps!r}); {where}"
        )

    def _score_plan(self, batch: Batch) -> list[list[int]]:
        return score_plan(self.spec, batch, shared=self.shares_prompt, hidden_size=self.hidden_size)

    # -- weights

    def set_reward_statistics(self, mean: float, std: float) -> None:
        """Record the mean and std of the model's rewards: exported with it, and read by `reward_statistics`."""
        self.module.model.config.mean, self.module.model.config.std = mean, std
        self.reward_mean_std = (mean, std)

    def weight_metadata(self, *, skip_frozen: bool = False, form: Form = "merged") -> list[weights.WeightInfo]:
        """Name, dtype and full shape of every tensor of the stream, in its order. Not collective."""
        return weights.metadata(self._engine, skip_frozen=skip_frozen, form=form)

    def named_parameter_buckets(
        self, bucket_bytes: int, *, skip_frozen: bool = False, wanted: bool = True, form: Form = "merged"
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """All parameters, whole, in buckets of about `bucket_bytes`, the same on every rank. All ranks must exhaust it.

        A tensor is valid until the next bucket is asked for. skip_frozen: only what training changes. wanted: False
        where this rank has no use for them: its buckets are empty, and nothing is copied for it. form: what becomes of
        adapters (`lora_stream`).
        """
        return weights.checkpoint_buckets(self._engine, bucket_bytes, skip_frozen=skip_frozen, wanted=wanted, form=form)

    def model_buckets(self, bucket_bytes: int, *, wanted: bool) -> tuple[int, Iterator[list[tuple[str, Tensor]]]]:
        """How many buckets, and the same with the parameters' own names and forms, for a model of the same class."""
        stream = weights.buckets(self._engine, bucket_bytes, skip_frozen=False, wanted=wanted)
        return weights.count_buckets(self._engine, bucket_bytes), stream

    def export_hf(self, path: str, tokenizer: Any = None) -> None:
        """Write a Hugging Face folder: safetensors, configuration, and the model's own small files as they came.

        With a moving average it is written too, as a model of its own in `<path>/ema`. Of a model with adapters only
        those are written, unless `ds.lora.save_merged`. Files in `path` that no run wrote stay.
        """
        self._export(path, tokenizer, trial=False)

    def try_export(self, path: str, tokenizer: Any = None) -> None:
        """Write all that `export_hf` would and remove it again: what fails at the end of a run fails at its start.

        Raises ValueError with what failed.
        """
        try:
            self._export(path, tokenizer, trial=True)
        except Exception as error:  # whatever transformers, safetensors or the disk have against it
            raise ValueError(f"the export to {path!r}, tried before training, fails: {error}") from error

    def _export(self, path: str, tokenizer: Any, *, trial: bool) -> None:
        averages = None if self.ema is None else self.ema.full_state()
        alone = has_adapters(self.module) and not self.spec.ds.lora.save_merged
        write = export_adapters if alone else export_hf
        write(self._engine, path, tokenizer, source=self.spec.model_path, averages=averages, trial=trial)
        self.collective.barrier()

    # -- between phases and runs

    def sleep(self) -> None:
        """Move training states to host memory, if `--ds.enable_sleep`; weights stay where they are."""
        if self.spec.trained and self.spec.ds.enable_sleep:
            self._engine.sleep()

    def wake(self) -> None:
        """Bring the training states back; must run between `sleep` and the next `update`."""
        if self.spec.trained and self.spec.ds.enable_sleep:
            self._engine.wake()

    def give_back(self) -> None:
        """Where other processes share the device, let them have what this one does not use: after every phase.

        Also for frozen models and without `--ds.enable_sleep`, whose activations fill torch's cache as well.
        """
        if self.spec.shares_device:
            setup.give_back(self.device)

    def save_checkpoint(self, folder: str) -> dict[str, int]:
        """Write everything needed to go on exactly as if never stopped; the caller makes the folder appear at once.

        Returns the files that this rank sees in the folder, with their bytes: the caller has to see those of all ranks.
        """
        state = {"optimizer_steps": self.optimizer_steps, "skipped_in_a_row": self.skipped_in_a_row}
        return checkpoint.save(self._engine, self.spec.role, self.ema, Path(folder), state)

    def load_checkpoint(self, folder: str) -> None:
        """Restore what `save_checkpoint` wrote; see `checkpoint.load` for the errors."""
        state = checkpoint.load(self._engine, self.spec.role, self.ema, Path(folder))
        self.optimizer_steps = state["optimizer_steps"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
