"""Rules of the algorithm: estimators, losses, rewards, optimisers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from openrlhf.core.tables import ESTIMATORS
from openrlhf.launcher.config import ActorConfig, CriticConfig, TrainPPOConfig
from openrlhf.launcher.data.curriculum_config import CurriculumConfig
from openrlhf.launcher.known_names import no_such
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.placement import SECTIONS, section
from openrlhf.launcher.rules.violation import Rule, Violation, broken, conflicting, value_at
from openrlhf.learner.config import SCHEDULES, ModelConfig, OptimConfig
from openrlhf.learner.constraints import balance_conflicts, ds_conflicts, optim_conflicts, sequence_conflicts
from openrlhf.learner.spec import Role

P = TrainPPOConfig
Found = Iterator[Violation]


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
    advantage = c.algo.advantage
    if advantage.gamma != 1 and not advantage.row.discounts and advantage.path is None:
        yield broken(
            c,
            "algo.advantage.gamma algo.advantage.estimator",
            f"only {' and '.join(name for name, row in ESTIMATORS.items() if row.discounts)} discount",
            "--algo.advantage.gamma 1",
        )


def turns_are_credited(c: P, m: Machine) -> Found:
    """Rewards of turns, and what the estimator can do with them."""
    name, row = "algo.turn_rewards", c.algo.advantage.row
    if c.algo.turn_gamma != 1 and (c.algo.turn_rewards == "off" or not row.groups):
        problem = "turns are discounted where each has its own advantage among the samples of a prompt"
        having = " or ".join(other for other, its in ESTIMATORS.items() if its.groups)
        fix = f"--{name} to_go with --algo.advantage.estimator {having}, or leave it out"
        yield broken(c, f"algo.turn_gamma {name} algo.advantage.estimator", problem, fix)
    if c.algo.turn_rewards == "off":
        return
    if c.train.agent_func_path is None:
        problem = "only agents have turns, and their rewards"
        yield broken(c, f"{name} train.agent_func_path", problem, "--train.agent_func_path agent.py")
    if row.teacher:
        problem = "its advantages are the teacher's, token by token"
        yield broken(c, f"{name} algo.advantage.estimator", problem, f"another estimator, or --{name} off")
    elif c.algo.turn_rewards == "each" and not row.groups:
        problem = "without a baseline over the samples of a prompt it is the same as to_go"
        yield broken(c, f"{name} algo.advantage.estimator", problem, f"--{name} to_go")


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


def own_loss_is_the_loss(c: P, m: Machine) -> Found:
    """A loss of the user's, and another one by name."""
    if c.actor.loss_path is not None and c.actor.policy_loss_type != type(c.actor)().policy_loss_type:
        yield broken(
            c,
            "actor.loss_path actor.policy_loss_type",
            "the file's function is the loss",
            "leave one of the two out",
        )


def ratio_bounds(c: P, m: Machine) -> Found:
    """Bounds of probability ratios, which are positive numbers."""
    if c.actor.eps_clip_low_high is not None and not c.actor.clip_fits:
        problem = "the ratio is clipped to [1 - low, 1 + high], and it is never negative"
        yield broken(c, "actor.eps_clip_low_high", problem, "a low value from 0 to 1 and a high one of at least 0")
    if not c.algo.advantage.correction_fits:
        problem = "a ratio is never negative, and the first value must be the smaller one"
        yield broken(c, "algo.advantage.is_correction_threshold", problem, "two values of at least 0, low and high")


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


def curriculum(c: P, m: Machine) -> Found:
    """A curriculum needs to know which samples pass, before their batch is full."""
    name, own = "data.curriculum", CurriculumConfig()
    if c.data.curriculum == "uniform":
        for field in fields(CurriculumConfig):
            if getattr(c.data, field.name) != getattr(own, field.name):
                fix = f"add --{name} prioritised, or leave --data.{field.name} out"
                yield broken(c, f"data.{field.name} {name}", "prompts are drawn once per episode each", fix)
        return
    if c.data.curriculum != "window" and c.data.curriculum_window != own.curriculum_window:
        problem = "it bounds the estimates of a window"
        yield broken(c, f"data.curriculum_window {name}", problem, f"--{name} window, or leave it out")
    if c.reward.remote_url is None and c.train.agent_func_path is None:
        problem = "scores come from a reward function, a reward server or an agent"
        names = f"{name} reward.remote_url train.agent_func_path"
        yield broken(c, names, problem, f"give one of the two, or --{name} uniform")


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
        if value and c.algo.kl.init_coef == 0:
            yield broken(
                c,
                f"{name} algo.kl.init_coef",
                "a coefficient of 0 removes the reference model, and with it the KL",
                f"--algo.kl.init_coef above 0, or leave --{name} out",
            )


def teacher(c: P, m: Machine) -> Found:
    """A teacher, and what is learned from it."""
    row, distill, name = c.algo.advantage.row, c.algo.distill, "algo.advantage.estimator"
    if row.teacher and not (c.ref.model_name_or_path or c.ref.remote_url):
        problem = "it learns from a teacher, and there is none"
        names = f"{name} ref.model_name_or_path ref.remote_url"
        yield broken(c, names, problem, "--ref.model_name_or_path TEACHER, or --ref.remote_url of a server that has it")
    if row.teacher and c.algo.kl.init_coef > 0:
        problem = "the reference is the teacher, and the divergence from it is what is trained"
        yield broken(c, f"{name} algo.kl.init_coef", problem, "--algo.kl.init_coef 0; --algo.distill.coef weighs it")
    if distill.reward_coef != 0 and not row.teacher:
        names = " and ".join(other for other, its in ESTIMATORS.items() if its.teacher)
        problem = f"only {names} has a weight of the reward beside the teacher"
        yield broken(c, f"algo.distill.reward_coef {name}", problem, "--algo.distill.coef weighs the teacher")


def teacher_server(c: P, m: Machine) -> Found:
    """What a teacher behind a server cannot say."""
    name, r = "ref.remote_url", c.rollout
    if c.ref.remote_url is None:
        if c.ref.api_key is not None:
            fix = "--ref.remote_url http://host:8000/v1, or leave the key out"
            yield broken(c, f"ref.api_key {name}", "the key is sent to a teacher's server, and none is given", fix)
        return
    if not c.has_reference:
        fix = "--algo.advantage.estimator on_policy_distill, or leave it out"
        yield broken(c, f"{name} algo.advantage.estimator", "nothing asks a teacher or a reference model", fix)
    if c.algo.distill.divergence is not None and not c.algo.distill.top_k:
        problem = "a server does not tell the whole distribution"
        yield broken(c, f"algo.distill.divergence {name} algo.distill.top_k", problem, "--algo.distill.top_k 20")
    if r.temperature != 1 or r.top_p < 1 or r.top_k > 0 or r.min_p > 0:
        problem = "a server gives log-probs of its model as it is: at temperature 1, over the whole vocabulary"
        names = f"{name} rollout.temperature rollout.top_p rollout.top_k rollout.min_p"
        yield broken(c, names, problem, "sample so too, or --ref.model_name_or_path for a teacher in the cluster")
    if c.data.max_images_per_prompt > 0:
        problem = "a server is asked for token ids, which hold no images"
        yield broken(c, f"{name} data.max_images_per_prompt", problem, "--ref.model_name_or_path for a teacher here")


def reference_moves(c: P, m: Machine) -> Found:
    """A reference that moves is the policy of some steps ago."""
    if c.ref.sync_steps == 0:
        return
    if c.base_is_reference:
        problem = "the reference is the base model under the adapters, which stays as it is"
        yield broken(c, "ref.sync_steps ds.lora.rank", problem, "leave --ref.sync_steps out")
    elif c.has_teacher or c.ref.model_name_or_path is not None or c.ref.remote_url is not None:
        problem = "a teacher, or a reference with a model of its own, does not become the policy"
        yield broken(c, "ref.sync_steps ref.model_name_or_path ref.remote_url", problem, "leave one of them out")
    elif not c.has_reference:
        problem = "a coefficient of 0 removes the reference model"
        yield broken(c, "ref.sync_steps algo.kl.init_coef", problem, "--algo.kl.init_coef above 0, or leave it out")


def schedules(c: P, m: Machine) -> Found:
    """The schedules' names."""
    for role in ("actor", "critic") if c.has_critic else ("actor",):
        yield from schedule_name(c, f"{role}.lr_scheduler")


def schedule_name(c: object, flag: str) -> Found:
    """A learning-rate schedule that exists."""
    name = value_at(c, flag)
    if name.strip() and name not in SCHEDULES:
        yield broken(c, flag, no_such("schedule", flag, name), f"--{flag} with one of {', '.join(SCHEDULES)}")


def trained_models(c: P, m: Machine) -> Found:
    """What the learner cannot do with the optimisers and models of this run."""
    for role in (Role.POLICY, Role.CRITIC) if c.has_critic else (Role.POLICY,):
        flags = section(c, role)
        assert isinstance(flags, ActorConfig | CriticConfig)
        own = f"{SECTIONS[role]}."
        places = {"optim.": own, "model.": own, "aux_loss_coef": "actor.aux_loss_coef"}
        yield from learner_conflicts(c, flags, flags, c.actor.aux_loss_coef, places)


def learner_conflicts(
    c: Any, model: ModelConfig, optim: OptimConfig, aux_loss_coef: float, places: Mapping[str, str]
) -> Found:
    """What the learner cannot do with a trained model. places: how its parameters begin -> how their flags do."""
    for conflict in (*optim_conflicts(optim, c.ds), *balance_conflicts(model, aux_loss_coef)):
        yield conflicting(c, conflict, places)


def deepspeed(c: Any, m: Machine) -> Found:
    """What DeepSpeed cannot do."""
    found = (*ds_conflicts(c.ds, trained=True), *sequence_conflicts(c.ds))
    yield from (conflicting(c, conflict, {}) for conflict in found)


RULES: tuple[Rule, ...] = (
    groups_need_samples,
    critic_exists,
    gamma_is_used,
    turns_are_credited,
    loss_has_its_mean,
    own_loss_is_the_loss,
    ratio_bounds,
    filtering,
    curriculum,
    overlong,
    kl_loss_needs_reference,
    teacher,
    teacher_server,
    reference_moves,
    schedules,
    trained_models,
    deepspeed,
)
