"""What distinguishes the three trainers: the data they read, the model's role, the objective, the reference model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openrlhf.launcher.commands import TRAIN_DPO, TRAIN_RM, TRAIN_SFT, Command
from openrlhf.launcher.data.chat import ChatRenderer
from openrlhf.launcher.data.readers import PairReader, SftReader, UnitReader
from openrlhf.launcher.preflight import text_dimension
from openrlhf.launcher.supervised_config import SupervisedRun, TrainDPOConfig, TrainRMConfig, TrainSFTConfig
from openrlhf.learner.objective import Objective
from openrlhf.learner.spec import Role
from openrlhf.learner.supervised_objectives import PreferenceObjective, RewardObjective, SftObjective
from openrlhf.learner.teaching import Lesson


@dataclass(frozen=True, kw_only=True)
class Task:
    """One of the three.

    margins: the batches carry margins. reference: path of the frozen reference model or teacher, None where there is
    none. lesson: what is learned of a teacher.
    """

    command: Command[Any]
    role: Role
    reader: UnitReader
    objective: Objective
    margins: bool = False
    reference: str | None = None
    lesson: Lesson | None = None


def command_of(config: SupervisedRun) -> Command[Any]:
    """The command whose configuration it is."""
    if isinstance(config, TrainSFTConfig):
        return TRAIN_SFT
    return TRAIN_RM if isinstance(config, TrainRMConfig) else TRAIN_DPO


def make_task(config: SupervisedRun, tokenizer: Any) -> Task:
    """The task of a resolved configuration."""
    if isinstance(config, TrainSFTConfig):
        return _sft(config, tokenizer)
    if isinstance(config, TrainRMConfig):
        return _reward_model(config, tokenizer)
    return _preference(config, tokenizer)


def _sft(config: TrainSFTConfig, tokenizer: Any) -> Task:
    data, pretrain, distill = config.data, config.model.pretrain_mode_enable, config.distill
    taught = distill.divergence is not None
    return Task(
        command=TRAIN_SFT,
        role=Role.POLICY,
        reader=SftReader(
            renderer=_renderer(config, tokenizer, template=None if pretrain else data.input_template),
            input_key=data.input_key,
            output_key=data.output_key,
            max_len=data.max_len,
            multiturn=data.multiturn,
            pretrain=pretrain,
        ),
        objective=SftObjective(
            nll_coef=distill.nll_coef if taught else 1.0,
            distill_coef=distill.coef if taught else None,
            aux_loss_coef=config.model.aux_loss_coef,
        ),
        reference=config.ref.model_name_or_path if taught else None,
        lesson=_lesson(config),
    )


def _lesson(config: TrainSFTConfig) -> Lesson | None:
    distill, models = config.distill, (config.model.model_name_or_path, config.ref.model_name_or_path)
    if distill.divergence is None:
        return None
    vocab = min(text_dimension(path or "", "vocab_size") for path in models)
    return Lesson(kind=distill.divergence, beta=distill.jsd_beta, top_k=distill.top_k, vocab=vocab)


def _reward_model(config: TrainRMConfig, tokenizer: Any) -> Task:
    model = config.model
    return Task(
        command=TRAIN_RM,
        role=Role.REWARD,
        reader=_pairs(config, tokenizer, margins=model.margin_loss_enable),
        objective=RewardObjective(loss_type=model.loss_type, aux_loss_coef=model.aux_loss_coef),
        margins=model.margin_loss_enable,
    )


def _preference(config: TrainDPOConfig, tokenizer: Any) -> Task:
    model = config.model
    return Task(
        command=TRAIN_DPO,
        role=Role.POLICY,
        reader=_pairs(config, tokenizer, margins=False),
        objective=PreferenceObjective(
            beta=model.beta,
            ipo=model.ipo_enable,
            label_smoothing=model.label_smoothing,
            nll_loss_coef=model.nll_loss_coef,
            aux_loss_coef=model.aux_loss_coef,
        ),
        reference=config.ref.model_name_or_path or model.model_name_or_path,
    )


def _pairs(config: TrainRMConfig | TrainDPOConfig, tokenizer: Any, *, margins: bool) -> PairReader:
    data = config.data
    return PairReader(
        renderer=_renderer(config, tokenizer, template=data.input_template),
        prompt_key=data.prompt_key,
        chosen_key=data.chosen_key,
        rejected_key=data.rejected_key,
        max_len=data.max_len,
        margins=margins,
    )


def _renderer(config: Any, tokenizer: Any, *, template: str | None) -> ChatRenderer:
    chat = config.data.apply_chat_template
    return ChatRenderer(tokenizer, apply_chat_template=chat, input_template=None if chat else template)
