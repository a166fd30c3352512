"""What is allowed and probably not meant: said at start, never changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from openrlhf.core.tables import POLICY_LOSSES
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.placement import data_parallel_ranks, engines_share
from openrlhf.launcher.rules.algorithm import with_critic
from openrlhf.launcher.rules.violation import setting, value_at

SEARCHED = 100_000
"""Distance up to which a divisor is looked for."""

P = TrainPPOConfig
Warnings = Iterator[str]

_CORRECTION = "algo.advantage.is_correction_type algo.advantage.is_correction_threshold"
_WANDB = "logger.wandb.org logger.wandb.group logger.wandb.project"
_CRITIC = """
    critic.value_clip critic.optim critic.adam.lr critic.adam.betas critic.adam.eps critic.adam.weight_decay
    critic.muon.lr critic.muon.momentum critic.lr_scheduler critic.lr_warmup_ratio critic.min_lr_ratio critic.max_norm
    critic.num_nodes critic.gradient_checkpointing_enable
"""


def kl_pairing(c: P, m: Machine) -> Warnings:
    """The guide's pairings of KL estimator and place."""
    kl = c.algo.kl
    if kl.init_coef == 0:
        return
    if kl.use_loss and kl.estimator == "k1":
        yield "--algo.kl.use_loss with --algo.kl.estimator k1: the gradient of k1 is no KL; use k2 or k3"
    if not kl.use_loss and kl.estimator != "k1":
        yield f"--algo.kl.estimator {kl.estimator} without --algo.kl.use_loss: k1 is right for a penalty on rewards"


def literal_newline(c: P, m: Machine) -> Warnings:
    """A backslash and an n where a line break was meant."""
    if c.data.input_template is not None and "\\n" in c.data.input_template:
        yield "--data.input_template holds a backslash followed by n; in bash write $'...\\n...' for a line break"


def async_colocation(c: P, m: Machine) -> Warnings:
    """Engines that run all the time have GPUs of their own."""
    if c.train.colocate_all and c.train.async_enable:
        yield "--train.colocate_all with --train.async_enable: the models share GPUs, the engines get their own"


def batch_arithmetic(c: P, m: Machine) -> Warnings:
    """Optimiser steps of uneven size."""
    prompts, n, batch = c.rollout.batch_size, c.rollout.n_samples_per_prompt, c.train.batch_size
    samples = prompts * n
    made = f"--rollout.batch_size {prompts} x --rollout.n_samples_per_prompt {n}"
    if samples < batch:
        yield f"{made} = {samples} samples are fewer than --train.batch_size {batch}: one optimiser step of {samples}"
    elif samples % batch:
        even = _nearest_divisor(samples, batch)
        yield (
            f"{made} = {samples} samples and --train.batch_size {batch}: the last optimiser step of a rollout batch has"
            f" {samples % batch}{f'; even steps: --train.batch_size {even}' if even else ''}"
        )
    parallel = data_parallel_ranks(c)
    step = c.train.micro_batch_size * parallel
    if not c.train.dynamic_batch_enable and batch % step:
        yield (
            f"--train.batch_size {batch} is no multiple of --train.micro_batch_size {c.train.micro_batch_size} x"
            f" {parallel} ranks: some micro-batches are smaller; even ones: --train.batch_size"
            f" {max(step, batch // step * step)} or {(batch // step + 1) * step}"
        )


def never_evaluated(c: P, m: Machine) -> Warnings:
    """Evaluation data without a rhythm."""
    if c.eval.dataset is not None and not c.evaluates:
        yield "--eval.dataset without --eval.steps or --eval.at_start: it is never evaluated"


def idle_flags(c: P, m: Machine) -> Warnings:
    """Flags that another one would have to switch on."""
    defaults = TrainPPOConfig()
    for needed, active, names in (
        ("algo.advantage.is_correction_enable", c.algo.advantage.is_correction_enable, _CORRECTION),
        ("algo.dynamic_filtering_enable", c.algo.dynamic_filtering_enable, "algo.dynamic_filtering_range"),
        ("algo.kl.target", c.algo.kl.target is not None, "algo.kl.horizon"),
        ("actor.clip_cov_share", c.actor.clip_cov_share is not None, "actor.clip_cov_range"),
        ("train.enable_ema", c.train.enable_ema, "train.ema_beta"),
        ("reward.overlong_buffer_len", bool(c.reward.overlong_buffer_len), "reward.overlong_penalty_factor"),
        ("ckpt.load_enable", c.ckpt.load_enable, "ds.use_universal_ckpt"),
        ("ckpt.save_steps", c.ckpt.save_steps > 0, "ckpt.save_hf ckpt.disable_ds"),
        ("actor.optim muon", c.actor.optim == "muon", "actor.muon.lr actor.muon.momentum"),
        ("critic.optim muon", c.critic.optim == "muon", "critic.muon.lr critic.muon.momentum"),
        ("logger.wandb.key", c.logger.wandb.key is not None, _WANDB),
        ("eval.steps", c.evaluates, "eval.split eval.temperature eval.n_samples_per_prompt"),
        (f"algo.advantage.estimator {' or '.join(with_critic())}", c.has_critic, _CRITIC),
        ("reward.model_name_or_path", c.has_reward_model, "reward.num_nodes reward.offload"),
        ("algo.kl.init_coef above 0", c.has_reference, "ref.offload ref.model_name_or_path"),
        ("algo.distill.divergence", c.algo.distill.divergence is not None, "algo.distill.top_k algo.distill.jsd_beta"),
        ("algo.distill.divergence", c.has_teacher, "algo.distill.coef"),
        ("ref.sync_steps", c.ref.sync_steps > 0, "ref.sync_alpha"),
        *_loss_settings(c),
    ):
        for name in () if active else names.split():
            if value_at(c, name) != value_at(defaults, name):
                yield f"{setting(name, value_at(c, name))} has no effect without --{needed}"


def _loss_settings(c: P) -> Iterator[tuple[str, bool, str]]:
    """Settings of losses: the losses that read one, whether this run's does, its flag."""
    for name in dict.fromkeys(word for row in POLICY_LOSSES.values() for word in row.settings.split()):
        readers = [loss for loss, row in POLICY_LOSSES.items() if name in row.settings.split()]
        reads = c.actor.loss_path is not None or c.actor.policy_loss_type in readers
        yield f"actor.policy_loss_type {' or '.join(readers)}", reads, f"actor.{name}"


def rate_of_full_training(c: P, m: Machine) -> Warnings:
    """Adapters at a learning rate that is meant for all weights (Schulman et al., "LoRA Without Regret", 2025)."""
    if c.ds.lora.rank == 0:
        return
    for role in ("actor", "critic") if c.has_critic else ("actor",):
        rate, full = value_at(c, f"{role}.adam.lr"), value_at(TrainPPOConfig(), f"{role}.adam.lr")
        if rate <= full:
            yield (
                f"--{role}.adam.lr {rate:g} is a rate for full training: adapters learn at about ten times that, "
                f"--{role}.adam.lr {10 * full:g}"
            )


def sleep_of_offloaded(c: P, m: Machine) -> Warnings:
    """States that are in host memory already."""
    if c.ds.enable_sleep and c.ds.adam_offload:
        yield "--ds.enable_sleep with --ds.adam_offload: the optimiser states are in host memory already"


def engines_stay(c: P, m: Machine) -> Warnings:
    """Engines that never sleep leave the models what is beside their share of the memory."""
    if m.gpus and engines_share(c) and not c.vllm.enable_sleep:
        yield (
            "--train.colocate_all without --vllm.enable_sleep: the engines keep"
            f" {c.vllm.gpu_memory_utilization:.0%} of every GPU (--vllm.gpu_memory_utilization) while the models work"
        )


def _nearest_divisor(total: int, asked: int) -> int | None:
    """The divisor of `total` nearest to `asked`; None where there is none for a long way."""
    for distance in range(min(asked, SEARCHED)):
        for near in (asked - distance, asked + distance):
            if total % near == 0:
                return near
    return None


WARNINGS: tuple[Callable[[P, Machine], Warnings], ...] = (
    kl_pairing,
    literal_newline,
    async_colocation,
    batch_arithmetic,
    never_evaluated,
    idle_flags,
    rate_of_full_training,
    sleep_of_offloaded,
    engines_stay,
)
