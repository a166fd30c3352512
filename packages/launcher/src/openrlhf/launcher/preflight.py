"""Everything that can be checked before an engine starts: model files, data, reward and agent files.

A mistake costs seconds here and minutes later. Raises ValueError (FileNotFoundError for paths) with the flag to mend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from openrlhf.agents.agent_file import check_agent_file
from openrlhf.agents.environments import EnvironmentTable, read_environments
from openrlhf.agents.files import CodeFile
from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import ALL, TrainPPOConfig
from openrlhf.launcher.data.chat import turn_stops
from openrlhf.launcher.data.early import EXTRA, check_at_sight
from openrlhf.launcher.data.prompt_reader import SOURCE
from openrlhf.launcher.data.prompts import PromptDataset, UnreadPrompts, load_prompts, prompt_fields
from openrlhf.launcher.placement import SECTIONS, roles
from openrlhf.launcher.plugins import NO_PLUGINS, Plugins, check_plugins, read_plugins
from openrlhf.launcher.rewards.checks import ask_servers, check_choices, check_columns, check_sources
from openrlhf.launcher.rewards.sources import SourceSpec
from openrlhf.launcher.rules.violation import value_at
from openrlhf.launcher.same_tokens import check_same_tokens
from openrlhf.launcher.teacher_check import TeacherServers, check_teacher_servers
from openrlhf.launcher.tokenizers import load_tokenizer, load_vision_tokenizer
from openrlhf.launcher.vision import VisionModel, find_vision, image_token
from openrlhf.learner.spec import Role


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the checks brought along. model_path: the actor."""

    model_path: str
    tokenizer: Any
    vocab_size: int
    hidden_size: int
    prompts: PromptDataset
    eval_prompts: list[PromptItem]
    reward_sources: tuple[SourceSpec, ...] = ()
    agent_file: CodeFile | None = None
    environments: EnvironmentTable | None = None
    plugins: Plugins = NO_PLUGINS
    vision: VisionModel | None = None
    teacher_servers: TeacherServers | None = None
    shared_vocab: int | None = None
    """Token ids that the actor and a reference model of its own both have embeddings for."""
    stop_token_ids: tuple[int, ...] = ()
    """Where sampling stops beside the end-of-sequence token: at what ends a turn in the chat template."""

    @property
    def pad_token_id(self) -> int:
        """Any id does where the mask is false; the tokenizer's own if it has one."""
        token = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id or 0) if token is None else int(token)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What can be known without torch. others: the flags of further models -> model."""

    model: str
    others: dict[str, str]
    reward_sources: tuple[SourceSpec, ...]
    agent_file: CodeFile | None
    environments: EnvironmentTable | None
    plugins: Plugins


def check(config: TrainPPOConfig) -> Checked:
    """The checks that take milliseconds: everything before torch is loaded."""
    model = check_model(config.actor.model_name_or_path, "--actor.model_name_or_path")
    others = other_models(config)
    if config.judge.engines:
        check_model(config.judge.model_name_or_path, "--judge.model_name_or_path")
    check_prompts_at_sight(config)
    sources = check_sources(config)
    agent_path = config.train.agent_func_path
    environments = None if agent_path is None else read_environments(agent_path)
    agent_file = None if agent_path is None or environments is not None else check_agent_file(agent_path)
    check_scored(config, environments)
    plugins = read_plugins(config)
    return Checked(
        model=model,
        others=others,
        reward_sources=sources,
        agent_file=agent_file,
        environments=environments,
        plugins=plugins,
    )


@dataclass(frozen=True, kw_only=True)
class Readers:
    """What the actor's folder says beside its weights. image_token: what stands for an image in a prompt."""

    tokenizer: Any
    vision: VisionModel | None
    image_token: str | None
    vocab_sizes: tuple[int, int]
    hidden_size: int


def read_models(config: TrainPPOConfig, model: str, others: Mapping[str, str]) -> Readers:
    """Check the models of a run and load the tokenizer. others: flags of further models -> model."""
    if config.ds.packing_samples:
        check_packed_models([model, *others.values()])
    check_adapters(config, model)
    vision = check_vision(config, model)
    token = None
    if vision is None:
        tokenizer = load_tokenizer(model)
    else:
        tokenizer, processor = load_vision_tokenizer(model)
        token = image_token(processor)
    check_readers(tokenizer, "--actor.model_name_or_path", model, others)
    sizes = [text_dimension(path, "vocab_size") for path in (model, others.get("--ref.model_name_or_path", model))]
    return Readers(
        tokenizer=tokenizer,
        vision=vision,
        image_token=token,
        vocab_sizes=(sizes[0], min(sizes)),
        hidden_size=text_dimension(model, "hidden_size"),
    )


def prepare(config: TrainPPOConfig, checked: Checked | None = None) -> Prepared:
    """Check and load what the controller itself needs: tokenizer and data. Loads no model, but torch."""
    checked = checked or check(config)
    check_plugins(config, checked.plugins)
    readers = read_models(config, checked.model, checked.others)
    tokenizer, token = readers.tokenizer, readers.image_token
    budget = config.rollout.max_new_tokens
    load = partial(
        load_prompts,
        config.data,
        tokenizer,
        max_new_tokens=budget,
        seed=config.train.seed,
        image_token=token,
        environments=checked.environments,
    )
    prompts = load() if config.trains else None
    evaluation = load(dataset=config.eval.dataset, split=config.eval.split) if config.evaluates else None
    there = prompts or evaluation
    assert there is not None, "the rules ask for --eval.dataset where nothing is trained"
    if ALL in config.data.extra_keys:
        check_columns(checked.reward_sources, there.columns)
    for loaded in (prompts, evaluation):
        if loaded is not None:
            check_choices(config.reward.choose_by, checked.reward_sources, loaded)
    return Prepared(
        model_path=checked.model,
        tokenizer=tokenizer,
        vocab_size=readers.vocab_sizes[0],
        shared_vocab=readers.vocab_sizes[1],
        teacher_servers=check_teacher_servers(config, tokenizer) if config.ref.remote_url is not None else None,
        hidden_size=readers.hidden_size,
        prompts=there,
        eval_prompts=[] if evaluation is None else evaluation.items(),
        reward_sources=ask_servers(checked.reward_sources),
        agent_file=checked.agent_file,
        environments=checked.environments,
        plugins=checked.plugins,
        vision=readers.vision,
        stop_token_ids=turn_stops(tokenizer)
        if config.data.apply_chat_template or config.train.agent_func_path is not None
        else (),
    )


def prepare_models(config: TrainPPOConfig, *, prompts: int) -> Prepared:
    """What a run without sampling needs. prompts: how many an episode had, by which the learning rate falls."""
    model = check_model(config.actor.model_name_or_path, "--actor.model_name_or_path")
    plugins = read_plugins(config)
    check_plugins(config, plugins)
    readers = read_models(config, model, other_models(config))
    teacher = check_teacher_servers(config, readers.tokenizer) if config.ref.remote_url is not None else None
    return Prepared(
        model_path=model,
        tokenizer=readers.tokenizer,
        vocab_size=readers.vocab_sizes[0],
        shared_vocab=readers.vocab_sizes[1],
        teacher_servers=teacher,
        hidden_size=readers.hidden_size,
        prompts=UnreadPrompts(prompts),
        eval_prompts=[],
        plugins=plugins,
        vision=readers.vision,
    )


def check_scored(config: TrainPPOConfig, table: EnvironmentTable | None) -> None:
    """ValueError where environments of a table ask for a reward source and there is none, or the other way round, and
    where their ratios and a curriculum both choose prompts."""
    if table is not None and config.data.curriculum != "uniform":
        raise ValueError(
            f"--data.curriculum {config.data.curriculum!r}: the prompts of --train.agent_func_path {table.file!r} come "
            "in the ratios of its environments; leave the curriculum out, or give one agent"
        )
    given = config.reward.remote_url or config.reward.model_name_or_path
    if table is None or table.scored == (given is not None) or config.rewards_optional:
        return
    names = ", ".join(repr(e.name) for e in table.environments if e.scored)
    if given is None:
        raise ValueError(
            f"--train.agent_func_path {table.file!r}: {names} is scored by the run's reward source, and there is none: "
            "add --reward.remote_url or --reward.model_name_or_path"
        )
    raise ValueError(
        f"--train.agent_func_path {table.file!r}: every environment has an agent that gives its reward; nothing asks "
        f'{given!r}: leave it out, or write reward = "run" where it is meant to score'
    )


def other_models(config: TrainPPOConfig) -> dict[str, str]:
    """Flag -> model of every role that has a model of its own beside the actor."""
    flags = [f"{SECTIONS[role]}.model_name_or_path" for role in roles(config) if role != Role.POLICY]
    return {f"--{flag}": check_model(path, f"--{flag}") for flag in flags if (path := value_at(config, flag))}


def check_prompts_at_sight(config: TrainPPOConfig) -> None:
    """Paths and field names of the prompts."""
    data, fields = config.data, prompt_fields(config.data)
    fields += [(EXTRA, key) for key in data.extra_keys if key not in (ALL, SOURCE)]
    if config.trains:
        check_at_sight(data.prompt_dataset, fields, split=data.prompt_split, flag="--data.prompt_dataset")
    if config.evaluates:
        check_at_sight(config.eval.dataset, fields, split=config.eval.split, flag="--eval.dataset")


def check_adapters(config: TrainPPOConfig, model: str) -> None:
    """ValueError when `--ds.lora.target_modules` names a module that the actor does not have."""
    if config.ds.lora.rank > 0:
        from openrlhf.learner.lora import check_targets

        check_targets(model, config.ds.lora)


def check_vision(config: TrainPPOConfig, model: str) -> VisionModel | None:
    """The actor's vision part, or ValueError for options that do not fit the model."""
    vision = find_vision(model)
    if vision is None:
        for flag, given in (
            (f"--data.max_images_per_prompt {config.data.max_images_per_prompt}", config.data.max_images_per_prompt),
            ("--actor.freeze_visual_encoder", config.actor.freeze_visual_encoder),
        ):
            if given:
                raise ValueError(
                    f"{flag}: {model!r} is no vision-language model (its configuration has no vision_config); "
                    "leave the flag out or give another --actor.model_name_or_path"
                )
        return None
    if vision.linear_attention and (config.ds.attn_implementation or "").startswith("flash_attention"):
        raise ValueError(
            f"--ds.attn_implementation {config.ds.attn_implementation!r}: {model!r} has linear attention layers, which "
            "its kernels do not know; use --ds.attn_implementation eager (or sdpa)"
        )
    if vision.bidirectional and config.data.max_images_per_prompt > 0:
        raise ValueError(
            f"--data.max_images_per_prompt {config.data.max_images_per_prompt}: in {model!r} the tokens of an image "
            "see each other in both directions, which is not supported; train on text alone (0), or another family"
        )
    return vision


def check_model(path: str | None, flag: str) -> str:
    """A model that can be loaded: a local folder with config.json, or something that looks like a hub name."""
    if not path:
        raise ValueError(f"{flag} is missing: give a local folder or a Hugging Face model name")
    folder = Path(path).expanduser()
    if folder.is_dir():
        if (folder / "actor").is_dir() and (folder / "state").is_dir():
            raise FileNotFoundError(
                f"{flag} {path!r}: this is a checkpoint that training goes on from, no model; give its export, the "
                f"folder {folder.name + '_hf'!r} that --ckpt.save_hf writes beside it"
            )
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            fix = "merge it into its base first: python3 -m openrlhf.cli.lora_combiner"
            raise FileNotFoundError(f"{flag} {path!r} is an adapter, not a model; {fix}")
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{flag} {path!r}: the folder has no config.json, so it is no Hugging Face model")
        return str(folder)
    if path.startswith((".", "/", "~")) or path.count("/") != 1 or folder.exists():
        raise FileNotFoundError(f"{flag} {path!r}: not found; give a folder with a Hugging Face model or a hub name")
    return path


WAYS_OUT = {
    "--critic.model_name_or_path": "Give a model with the actor's tokenizer, such as the actor itself",
    "--reward.model_name_or_path": "Give a model with the actor's tokenizer, or serve this one, which then reads "
    "texts: python3 -m openrlhf.cli.serve_rm, and --reward.remote_url",
    "--ref.model_name_or_path": "Give a model with the same tokenizer",
}


def check_readers(tokenizer: Any, flag: str, model: str, others: Mapping[str, str]) -> None:
    """ValueError when one of the other models (flag -> model) reads token ids of `model` as something else."""
    for other_flag, other in others.items():
        if other != model:
            check_same_tokens(
                tokenizer,
                of=f"{flag} {model!r}",
                flag=other_flag,
                model=other,
                sizes=(text_dimension(model, "vocab_size"), text_dimension(other, "vocab_size")),
                way_out=WAYS_OUT[other_flag],
            )


def check_packed_models(models: list[str]) -> None:
    """ValueError when one of them has layers that cannot tell packed samples apart."""
    from transformers import AutoConfig

    from openrlhf.learner.layers import check_packing

    for model in models:
        check_packing(AutoConfig.from_pretrained(model), model)


def text_dimension(model: str, name: str) -> int:
    """`vocab_size` or `hidden_size` of the language model, from its configuration."""
    config = Path(model) / "config.json"
    if config.is_file():
        data = json.loads(config.read_text())
        size = data.get(name) or data.get("text_config", {}).get(name)
        if size:
            return int(size)
    from transformers import AutoConfig

    return int(getattr(AutoConfig.from_pretrained(model).get_text_config(), name))
