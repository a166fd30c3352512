"""What is allowed and probably not meant: said at start, never changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.rules.placement import ranks
from openrlhf.launcher.rules.violation import setting, value_at

P = TrainPPOConfig
Warnings = Iterator[str]


def kl_pairing(c: P, m: Machine) -> Warnings:
    """The guide's pairings of KL estimator and place."""
    kl = c.algo.kl
    if not c.has_reference:
        return
    if kl.use_loss and kl.estimator == "k1":
        yield "--algo.kl.use_loss with --algo.kl.estimator k1: the gradient of k1 is no KL; use k2 or k3"
    if not kl.use_loss and kl.estimator != "k1":
        yield f"--algo.kl.estimator {kl.estimator} as a penalty on rewards: k1 is the unbiased one; add --algo.kl.use_loss?"


def truncated_sampling(c: P, m: Machine) -> Warnings:
    """The engine's log-probs are those of the truncated distribution."""
    r = c.rollout
    asked = {"rollout.top_p": r.top_p < 1, "rollout.top_k": r.top_k > 0, "rollout.min_p": r.min_p > 0}
    for name, truncated in asked.items():
        if truncated and c.algo.advantage.is_correction_enable:
            yield (
                f"{setting(name, value_at(c, name))} with --algo.advantage.is_correction_enable: the engines report"
                " log-probs of the truncated distribution, the trainer of the full one, so the weights are biased"
            )


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
    samples, batch = c.rollout.batch_size * c.rollout.n_samples_per_prompt, c.train.batch_size
    made = (
        f"--rollout.batch_size {c.rollout.batch_size} x --rollout.n_samples_per_prompt {c.rollout.n_samples_per_prompt}"
    )
    if samples < batch:
        yield f"{made} = {samples} samples are fewer than --train.batch_size {batch}: one optimiser step of {samples}"
    elif samples % batch:
        yield (
            f"{made} = {samples} samples and --train.batch_size {batch}: the last optimiser step of a rollout batch has"
            f" {samples % batch}; even steps: --train.batch_size {_nearest_divisor(samples, batch)}"
        )
    parallel = max(1, ranks(c, "actor") // c.ds.tensor_parallel_size)
    step = c.train.micro_batch_size * parallel
    if not c.train.dynamic_batch_enable and batch % step:
        yield (
            f"--train.batch_size {batch} is no multiple of --train.micro_batch_size {c.train.micro_batch_size} x"
            f" {parallel} ranks: some micro-batches are smaller; even ones: --train.batch_size"
            f" {max(step, batch // step * step)} or {(batch // step + 1) * step}"
        )


def never_evaluated(c: P, m: Machine) -> Warnings:
    """Evaluation data without a rhythm."""
    if c.eval.dataset is not None and c.eval.steps <= 0:
        yield "--eval.dataset without --eval.steps: it is never evaluated"


def idle_flags(c: P, m: Machine) -> Warnings:
    """Flags that another one would have to switch on."""
    defaults = TrainPPOConfig()
    conditions: dict[str, tuple[bool, str]] = {
        "algo.advantage.is_correction_type": (
            c.algo.advantage.is_correction_enable,
            "algo.advantage.is_correction_enable",
        ),
        "algo.advantage.is_correction_threshold": (
            c.algo.advantage.is_correction_enable,
            "algo.advantage.is_correction_enable",
        ),
        "algo.dynamic_filtering_range": (c.algo.dynamic_filtering_enable, "algo.dynamic_filtering_enable"),
        "algo.kl.horizon": (c.algo.kl.target is not None, "algo.kl.target"),
        "train.ema_beta": (c.train.enable_ema, "train.enable_ema"),
        "reward.overlong_penalty_factor": (bool(c.reward.overlong_buffer_len), "reward.overlong_buffer_len"),
        "ds.use_universal_ckpt": (c.ckpt.load_enable, "ckpt.load_enable"),
        "ckpt.save_hf": (c.ckpt.save_steps > 0, "ckpt.save_steps"),
        "ckpt.disable_ds": (c.ckpt.save_steps > 0, "ckpt.save_steps"),
        "actor.muon.lr": (c.actor.optim == "muon", "actor.optim muon"),
        "actor.muon.momentum": (c.actor.optim == "muon", "actor.optim muon"),
        "critic.muon.lr": (c.critic.optim == "muon", "critic.optim muon"),
        "critic.muon.momentum": (c.critic.optim == "muon", "critic.optim muon"),
        "logger.wandb.org": (c.logger.wandb.key is not None, "logger.wandb.key"),
        "logger.wandb.group": (c.logger.wandb.key is not None, "logger.wandb.key"),
        "logger.wandb.project": (c.logger.wandb.key is not None, "logger.wandb.key"),
    }
    for name, (active, needed) in conditions.items():
        if not active and value_at(c, name) != value_at(defaults, name):
            yield f"{setting(name, value_at(c, name))} has no effect without --{needed}"


def sleep_of_offloaded(c: P, m: Machine) -> Warnings:
    """States that are in host memory already."""
    if c.ds.enable_sleep and c.ds.adam_offload:
        yield "--ds.enable_sleep with --ds.adam_offload: the optimiser states are in host memory already"


def _nearest_divisor(total: int, asked: int) -> int:
    return min((n for n in range(1, total + 1) if total % n == 0), key=lambda n: abs(n - asked))


WARNINGS: tuple[Callable[[P, Machine], Warnings], ...] = (
    kl_pairing,
    truncated_sampling,
    literal_newline,
    async_colocation,
    batch_arithmetic,
    never_evaluated,
    idle_flags,
    sleep_of_offloaded,
)
