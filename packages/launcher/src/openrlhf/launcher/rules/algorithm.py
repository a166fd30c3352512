"""Rules of the algorithm: estimators, losses, rewards, optimisers."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf.core.tables import ESTIMATORS
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.known_names import no_such
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.rules.violation import Rule, Violation, broken, value_at
from openrlhf.learner.config import SCHEDULES

P = TrainPPOConfig
Found = Iterator[Violation]

NS_STEPS = 5
"""Newton-Schulz iterations of DeepSpeed's Muon."""


def groups_need_samples(c: P, m: Machine) -> Found:
    """Estimators that compare samples of one prompt need several."""
    if c.algo.advantage.row.groups and c.rollout.n_samples_per_prompt < c.algo.advantage.row.min_samples:
        yield broken(
            c,
            "algo.advantage.estimator rollout.n_samples_per_prompt",
            "this estimator compares the samples of one prompt",
            "--rollout.n_samples_per_prompt 2 or more",
        )


def critic_exists(c: P, m: Machine) -> Found:
    """Flags of a critic that does not exist."""
    if c.has_critic:
        return
    having = " or ".join(with_critic())
    for name, default in (("model_name_or_path", None), ("freezing_steps", -1), ("save_value_network", False)):
        if getattr(c.critic, name) != default:
            yield broken(
                c,
                f"critic.{name} algo.advantage.estimator",
                f"only the estimator {having} has a critic",
                f"leave --critic.{name} out or use --algo.advantage.estimator {having}",
            )


def with_critic(having: bool = True) -> list[str]:
    """The names of the estimators that have (or do not have) a critic."""
    return [name for name, row in ESTIMATORS.items() if row.critic is having]


def gamma_is_used(c: P, m: Machine) -> Found:
    """A discount that the estimator does not use."""
    if c.algo.advantage.gamma != 1 and not c.algo.advantage.row.discounts:
        yield broken(
            c,
            "algo.advantage.gamma algo.advantage.estimator",
            f"only {' and '.join(name for name, row in ESTIMATORS.items() if row.discounts)} discount",
            "--algo.advantage.gamma 1",
        )


def loss_has_its_mean(c: P, m: Machine) -> Found:
    """Another aggregation than the one that belongs to the loss."""
    if c.actor.agg_mode_conflicts:
        unit = "token" if c.actor.loss.agg_mode == "token-mean" else "sequence"
        yield broken(
            c,
            "actor.policy_loss_type actor.loss_agg_mode",
            f"{c.actor.policy_loss_type} has one ratio per {c.actor.loss.ratio} and takes the mean per {unit}",
            f"--actor.loss_agg_mode {c.actor.loss.agg_mode}",
        )


def ratio_bounds(c: P, m: Machine) -> Found:
    """Bounds of probability ratios, which are positive numbers."""
    clip, threshold = c.actor.eps_clip_low_high, c.algo.advantage.is_correction_threshold
    if clip is not None and not (0 <= clip[0] <= 1 and clip[1] >= 0):
        problem = "the ratio is clipped to [1 - low, 1 + high], and it is never negative"
        yield broken(c, "actor.eps_clip_low_high", problem, "a low value from 0 to 1 and a high one of at least 0")
    if threshold[0] < 0:
        yield broken(c, "algo.advantage.is_correction_threshold", "a ratio is never negative", "0 or more as low value")


def filtering(c: P, m: Machine) -> Found:
    """Dynamic filtering needs scores and groups."""
    if not c.algo.dynamic_filtering_enable:
        return
    name = "algo.dynamic_filtering_enable"
    if c.rollout.n_samples_per_prompt < 2:
        yield broken(
            c,
            f"{name} rollout.n_samples_per_prompt",
            "the filter judges the mean score over a prompt's samples",
            "--rollout.n_samples_per_prompt 2 or more",
        )
    if c.reward.remote_url is None and c.train.agent_func_path is None:
        yield broken(
            c,
            f"{name} reward.remote_url train.agent_func_path",
            "scores come from a reward function, a reward server or an agent",
            "give one of the two, or leave the filter out",
        )


def overlong(c: P, m: Machine) -> Found:
    """The soft length limit lies below the hard one."""
    name = "rollout.max_new_tokens" if c.rollout.max_new_tokens is not None else "data.max_len"
    longest = c.rollout.max_new_tokens or c.data.max_len
    if c.reward.overlong_buffer_len is not None and c.reward.overlong_buffer_len > longest:
        yield broken(
            c,
            f"reward.overlong_buffer_len {name}",
            "the buffer is longer than the longest response",
            f"--reward.overlong_buffer_len {longest} or less",
        )


def kl_loss_needs_reference(c: P, m: Machine) -> Found:
    """A KL term without a coefficient."""
    for name, value in (("algo.kl.use_loss", c.algo.kl.use_loss), ("algo.kl.target", c.algo.kl.target)):
        if value and not c.has_reference:
            yield broken(
                c,
                f"{name} algo.kl.init_coef",
                "a coefficient of 0 removes the reference model, and with it the KL",
                f"--algo.kl.init_coef above 0, or leave --{name} out",
            )


def schedules(c: P, m: Machine) -> Found:
    """The schedules' names."""
    for role in ("actor", "critic") if c.has_critic else ("actor",):
        yield from schedule_name(c, f"{role}.lr_scheduler")


def schedule_name(c: object, flag: str) -> Found:
    """A learning-rate schedule that exists."""
    name = value_at(c, flag)
    if name.strip() and name not in SCHEDULES:
        yield broken(c, flag, no_such("schedule", flag, name), f"--{flag} with one of {', '.join(SCHEDULES)}")


def balance_loss(c: P, m: Machine) -> Found:
    """A balance loss that would not be trained."""
    for role in ("actor", "critic") if c.has_critic else ("actor",):
        yield from reentrant_balance_loss(c, role, "actor")


def reentrant_balance_loss(c: object, model: str, loss: str) -> Found:
    """Reentrant checkpointing of `model` keeps no gradient of what the balance loss is computed from."""
    enabled, reentrant = (value_at(c, f"{model}.gradient_checkpointing_{n}") for n in ("enable", "reentrant"))
    if enabled and reentrant and value_at(c, f"{loss}.aux_loss_coef") > 0:
        yield broken(
            c,
            f"{model}.gradient_checkpointing_reentrant {loss}.aux_loss_coef",
            "reentrant checkpointing keeps no gradient of the routers, so the balance loss would not be trained",
            f"leave --{model}.gradient_checkpointing_reentrant out",
        )


def muon(c: P, m: Machine) -> Found:
    """What DeepSpeed's Muon does not do."""
    for role in ("actor", "critic") if c.has_critic else ("actor",):
        yield from muon_limits(c, f"{role}.")


def muon_limits(c: object, prefix: str) -> Found:
    """What DeepSpeed's Muon does not do, for the optimiser whose flags start with `prefix`."""
    optim = broken(c, f"{prefix}optim {prefix}muon.ns_steps {prefix}muon.nesterov ds.adam_offload", "", "")
    kind, ns_steps, nesterov, offload = (value for _, value in optim.flags)
    if kind != "muon":
        return
    if offload:
        yield broken(c, f"{prefix}optim ds.adam_offload", "Muon runs on the GPU only", "leave one of them out")
    if value_at(c, "ds.tensor_parallel_size") > 1:
        fix = f"--{prefix}optim adam, or --ds.tensor_parallel_size 1"
        yield broken(c, f"{prefix}optim ds.tensor_parallel_size", "Muon needs whole matrices", fix)
    if ns_steps != NS_STEPS:
        problem = f"the backend always does {NS_STEPS} Newton-Schulz iterations"
        yield broken(c, f"{prefix}optim {prefix}muon.ns_steps", problem, f"--{prefix}muon.ns_steps {NS_STEPS}")
    if not nesterov:
        problem = "the backend always uses Nesterov momentum"
        yield broken(c, f"{prefix}optim {prefix}muon.nesterov", problem, f"leave --{prefix}muon.no_nesterov out")


RULES: tuple[Rule, ...] = (
    groups_need_samples,
    critic_exists,
    gamma_is_used,
    loss_has_its_mean,
    ratio_bounds,
    filtering,
    overlong,
    kl_loss_needs_reference,
    schedules,
    balance_loss,
    muon,
)
