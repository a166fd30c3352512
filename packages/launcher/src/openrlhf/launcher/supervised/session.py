"""One rank of a supervised run: data first, then models, then the loop. The only place where its parts meet."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from openrlhf.launcher.data.supervised import SupervisedDataset, load_supervised
from openrlhf.launcher.data.token_cache import TokenCache, default_folder
from openrlhf.launcher.logging.logger import RunLogger
from openrlhf.launcher.outputs import hold_outputs, try_export_settings
from openrlhf.launcher.preflight import check_model, check_readers
from openrlhf.launcher.saved import config_toml
from openrlhf.launcher.signals import Warned
from openrlhf.launcher.supervised.batches import Batches
from openrlhf.launcher.supervised.checkpoints import Progress, SupervisedCheckpoints
from openrlhf.launcher.supervised.loop import Parts, SupervisedTrainer
from openrlhf.launcher.supervised.process import is_first
from openrlhf.launcher.supervised.task import Task, command_of, make_task
from openrlhf.launcher.supervised_config import SupervisedRun, TrainDPOConfig, TrainRMConfig, TrainSFTConfig
from openrlhf.launcher.tokenizers import chat_template, load_tokenizer
from openrlhf.learner.config import LoraConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.setup import init_distributed, leave_distributed
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.teaching import with_layer

EVALUATED_SHARE, EVALUATED_LEAST = 100, 32
"""A reward model without evaluation data is evaluated on one in so many of its training pairs, but on some."""


def run_session(config: SupervisedRun, warned: Warned) -> Progress:
    """Train; returns where the run ended. What can be wrong with the data is found before a model is loaded."""
    with ExitStack() as held:
        if is_first():
            held.enter_context(hold_outputs(command_of(config), config))
        return _train(config, warned)


def _train(config: SupervisedRun, warned: Warned) -> Progress:
    model = check_model(config.model.model_name_or_path, "--model.model_name_or_path")
    tokenizer = load_tokenizer(model, flag="--model.model_name_or_path")
    if not isinstance(config, TrainRMConfig) and config.ref.model_name_or_path:
        reference = check_model(config.ref.model_name_or_path, "--ref.model_name_or_path")
        check_readers(tokenizer, "--model.model_name_or_path", model, {"--ref.model_name_or_path": reference})
    if config.data.tokenizer_chat_template is not None:
        tokenizer.chat_template = chat_template(config.data.tokenizer_chat_template)
    task = make_task(config, tokenizer)
    train, evaluation = load_data(config, task)
    if is_first():
        try_export_settings(config.ckpt.output_dir, model, tokenizer)
    init_distributed()
    try:
        parts = make_parts(config, task, tokenizer, train, evaluation)
        try:
            return SupervisedTrainer(config, parts, warned).run()
        finally:
            parts.logger.close()
    finally:
        leave_distributed()


def load_data(config: SupervisedRun, task: Task) -> tuple[SupervisedDataset, SupervisedDataset | None]:
    """Training data and evaluation data. A reward model always has some: its statistics come from an evaluation."""
    options: dict[str, Any] = {
        "max_samples": config.data.max_samples,
        "seed": config.train.seed,
        "dropped_text": config.data.dropped_text,
    }
    folder = default_folder() if config.data.cache_dir is None else Path(config.data.cache_dir).expanduser()
    cache = TokenCache(folder, most_bytes=int(config.data.cache_gib * 2**30))
    train = load_supervised(
        config.data.dataset,
        task.reader,
        cache,
        split=config.data.dataset_split,
        probs=config.data.dataset_probs,
        **options,
    )
    if config.eval.dataset is not None:
        split = config.eval.split
        return train, load_supervised(
            config.eval.dataset, task.reader, cache, flag="--eval.dataset", split=split, **options
        )
    return train, train.first(max(len(train) // EVALUATED_SHARE, EVALUATED_LEAST)) if task.role is Role.REWARD else None


def learner_spec(config: SupervisedRun, task: Task, *, max_optimizer_steps: int) -> LearnerSpec:
    """The trained model."""
    model, train = config.model, config.train
    return LearnerSpec(
        role=task.role,
        model_path=model.model_name_or_path or "",
        ds=config.ds,
        model=model,
        optim=config,
        batch=train,
        max_optimizer_steps=max_optimizer_steps,
        score_micro_batch_size=train.micro_batch_size * task.reader.rows_per_unit,
        aux_loss_coef=model.aux_loss_coef,
    )


def reference_spec(config: TrainSFTConfig | TrainDPOConfig, task: Task) -> LearnerSpec:
    """The frozen reference model or teacher: no adapters, no balance loss."""
    assert task.reference is not None, "a task names its reference model"
    trained = learner_spec(config, task, max_optimizer_steps=1)
    return replace(
        trained,
        role=Role.REFERENCE,
        model_path=task.reference,
        optim=None,
        ds=replace(config.ds, lora=LoraConfig()),
        aux_loss_coef=0.0,
        offload=config.ref.offload,
    )


def make_parts(
    config: SupervisedRun, task: Task, tokenizer: Any, train: SupervisedDataset, evaluation: SupervisedDataset | None
) -> Parts:
    """Load the models and put the run together."""
    steps = -(-len(train) // config.train.batch_size) * config.train.max_epochs
    learner = Learner(learner_spec(config, task, max_optimizer_steps=steps))
    reference = None
    if task.reference is not None and not isinstance(config, TrainRMConfig):
        reference = Learner(reference_spec(config, task))
    if task.lesson is not None and reference is not None:
        lesson, seen = task.lesson, learner.module.distribution
        whole = lesson.top_k == 0
        learner.lesson = with_layer(lesson, reference.output_layer(), seen, learner.device) if whole else lesson
    logger = RunLogger(config, steps=steps) if is_first() else RunLogger(config, sinks=[])
    return Parts(
        task=task,
        tokenizer=tokenizer,
        learner=learner,
        reference=reference,
        train=_batches(config, task, learner, train),
        evaluation=None if evaluation is None else _batches(config, task, learner, evaluation),
        checkpoints=SupervisedCheckpoints(
            config.ckpt,
            learner,
            tokenizer,
            config_toml=config_toml(task.command, config),
            run_id=logger.run_id,
            fingerprint={"units": len(train), "seed": config.train.seed, "batch_size": config.train.batch_size},
        ),
        logger=logger,
    )


def _batches(config: SupervisedRun, task: Task, learner: Learner, dataset: SupervisedDataset) -> Batches:
    return Batches(
        dataset,
        batch_size=config.train.batch_size,
        hidden_size=learner.hidden_size,
        rank=learner.collective.rank,
        world_size=learner.collective.world_size,
        workers=config.data.dataloader_num_workers,
        margins=task.margins,
    )
