"""Rules of the supervised trainers."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf.launcher.machine import Machine
from openrlhf.launcher.rules.algorithm import deepspeed, learner_conflicts, schedule_name
from openrlhf.launcher.rules.inputs import interval
from openrlhf.launcher.rules.violation import Rule, Violation, broken, value_at
from openrlhf.launcher.supervised_config import (
    SftDataConfig,
    SupervisedConfig,
    TrainDPOConfig,
    TrainRMConfig,
    TrainSFTConfig,
)

Found = Iterator[Violation]


def required(c: SupervisedConfig, m: Machine) -> Found:
    """Flags without which no run starts."""
    for name in ("model.model_name_or_path", "data.dataset"):
        if value_at(c, name) is None:
            yield broken(c, name, "nothing to train" if "model" in name else "nothing to train on", f"add --{name}")


def multiturn(c: SupervisedConfig, m: Machine) -> Found:
    """Turns are found by the chat template."""
    if isinstance(c, TrainSFTConfig) and c.data.multiturn and not c.data.apply_chat_template:
        problem = "the turns are found by the chat template"
        yield broken(c, "data.multiturn data.apply_chat_template", problem, "add --data.apply_chat_template")


def teacher(c: SupervisedConfig, m: Machine) -> Found:
    """A teacher, and what is learned from it."""
    if not isinstance(c, TrainSFTConfig):
        return
    if c.distill.divergence is not None and not c.ref.model_name_or_path:
        problem = "it compares with a teacher, and there is none"
        yield broken(c, "distill.divergence ref.model_name_or_path", problem, "--ref.model_name_or_path TEACHER")
    default = TrainSFTConfig()
    for name in ("ref.model_name_or_path", "distill.coef", "distill.top_k", "distill.jsd_beta", "distill.nll_coef"):
        if c.distill.divergence is None and value_at(c, name) != value_at(default, name):
            problem = "nothing is learned from a teacher"
            fix = f"--distill.divergence reverse, or leave --{name} out"
            yield broken(c, f"{name} distill.divergence", problem, fix)


def chat_template(c: SupervisedConfig, m: Machine) -> Found:
    """A chat template that is not applied."""
    text, applied = value_at(c, "data.tokenizer_chat_template"), value_at(c, "data.apply_chat_template")
    if text is not None and not applied:
        problem = "the template is not applied"
        names = "data.tokenizer_chat_template data.apply_chat_template"
        yield broken(c, names, problem, "add --data.apply_chat_template")


def ipo_smoothing(c: SupervisedConfig, m: Machine) -> Found:
    """IPO has no smoothing."""
    if isinstance(c, TrainDPOConfig) and c.model.ipo_enable and c.model.label_smoothing:
        problem = "the IPO loss has no label smoothing"
        yield broken(c, "model.ipo_enable model.label_smoothing", problem, "leave one of them out")


def answers(c: SupervisedConfig, m: Machine) -> Found:
    """Supervised fine-tuning has to know what the answer is."""
    if not isinstance(c, TrainSFTConfig):
        return
    data, pretrain = c.data, c.model.pretrain_mode_enable
    if data.output_key is None and not data.apply_chat_template and not pretrain:
        problem = "no field holds the response, and without a chat template the prompt field holds no conversation"
        yield broken(c, "data.output_key data.apply_chat_template", problem, "add --data.output_key")
    if pretrain and data.apply_chat_template:
        problem = "plain text is trained on as it stands"
        yield broken(c, "model.pretrain_mode_enable data.apply_chat_template", problem, "leave one of them out")
    if pretrain and data.input_template not in (None, SftDataConfig().input_template):
        problem = "plain text is trained on as it stands"
        yield broken(c, "model.pretrain_mode_enable data.input_template", problem, "leave one of them out")


def prompt_template(c: SupervisedConfig, m: Machine) -> Found:
    """A template around a prompt that has no field of its own."""
    if isinstance(c, TrainRMConfig | TrainDPOConfig) and c.data.input_template is not None:
        if c.data.prompt_key is None:
            problem = "the template takes the prompt, and no field holds it"
            yield broken(c, "data.input_template data.prompt_key", problem, "add --data.prompt_key")
        if c.data.apply_chat_template:
            problem = "a prompt is rendered by one of them"
            yield broken(c, "data.input_template data.apply_chat_template", problem, "leave one of them out")


def margin(c: SupervisedConfig, m: Machine) -> Found:
    """Only one of the two losses has a margin."""
    if isinstance(c, TrainRMConfig) and c.model.margin_loss_enable and c.model.loss_type != "sigmoid":
        problem = "this loss has no margin"
        yield broken(c, "model.margin_loss_enable model.loss_type", problem, "--model.loss_type sigmoid")


def intervals(c: SupervisedConfig, m: Machine) -> Found:
    """Every N steps, or -1."""
    yield from interval(c, "eval.steps", "after every epoch")
    yield from interval(c, "ckpt.save_steps", "never")
    if c.eval.dataset is None and c.eval.steps != -1 and not isinstance(c, TrainRMConfig):
        yield broken(c, "eval.steps eval.dataset", "there is nothing to evaluate on", "add --eval.dataset")


def schedule(c: SupervisedConfig, m: Machine) -> Found:
    """The schedule's name."""
    yield from schedule_name(c, "lr_scheduler")


def trained_model(c: SupervisedConfig, m: Machine) -> Found:
    """What the learner cannot do with this optimiser and model."""
    model = value_at(c, "model")
    places = {"optim.": "", "model.": "model.", "aux_loss_coef": "model.aux_loss_coef"}
    yield from learner_conflicts(c, model, c, model.aux_loss_coef, places)


RULES: tuple[Rule, ...] = (
    required,
    multiturn,
    teacher,
    chat_template,
    answers,
    prompt_template,
    margin,
    intervals,
    ipo_smoothing,
    schedule,
    trained_model,
    deepspeed,
)
