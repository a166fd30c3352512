"""Low-rank adapters (Hu et al., 2021) through peft: put into a model, exported on their own, merged into their base."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from openrlhf.learner.collective import rank_and_world
from openrlhf.learner.config import LoraConfig
from openrlhf.learner.engine import TrainingEngine
from openrlhf.learner.folders.publish import publish
from openrlhf.learner.loading import load_pretrained
from openrlhf.learner.lora_stream import ADAPTER, PEFT_PREFIX, peft_name
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.settings_files import save_model, write_tokenizer
from openrlhf.learner.weights import GATHER_BYTES, buckets

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
REWARD = "reward_model.json"
"""Beside the adapter of a reward model: the mean and std of its rewards, which its base does not know."""
HEAD = "score"
"""The name under which an adapter holds a scalar head: that of transformers' sequence classification."""


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Put adapters into the model and freeze its own weights.

    The model keeps its class and the names of its modules. Raises ValueError when peft is missing or knows no such
    module.
    """
    peft = import_peft()
    targets: Any = list(config.target_modules)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        bias="none",
    )
    try:
        peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ValueError(f"`ds.lora.target_modules` {' '.join(targets)}: {error}") from error


def has_adapters(module: LearnerModule) -> bool:
    """Whether `add_adapters` was called on it."""
    return hasattr(module.model, "peft_config")


@contextmanager
def adapters_off(module: LearnerModule) -> Iterator[None]:
    """Inside, the model computes what its base does; without adapters nothing changes.

    peft's own switch, `enable_adapters`, also changes which parameters are trained, under the hands of the optimiser.
    """
    layers = _adapter_layers(module)
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _adapter_layers(module: LearnerModule) -> list[Any]:
    if not has_adapters(module):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]


def export_adapters(engine: TrainingEngine, path: str, tokenizer: Any, *, base: str, trial: bool = False) -> None:
    """Write the adapters (and a scalar head) as a peft folder; of what is there only an earlier export is replaced.

    Collective; rank 0 writes. base: the model that they belong to. trial: everything is written and removed again.
    """
    module, state = engine.module, adapter_state(engine)
    if not state:
        return
    from safetensors.torch import save_file

    settings = module.model.peft_config[ADAPTER]
    settings.base_model_name_or_path = base
    settings.inference_mode = True
    settings.task_type = "SEQ_CLS" if module.scalar else "CAUSAL_LM"
    settings.modules_to_save = [HEAD] if module.scalar else None
    with publish(path, trial=trial) as folder:
        settings.save_pretrained(str(folder))
        save_file(state, str(folder / WEIGHTS), {"format": "pt"})
        if module.scalar:
            config = module.model.config
            values = {"mean": getattr(config, "mean", None), "std": getattr(config, "std", None)}
            (folder / REWARD).write_text(json.dumps(values) + "\n")
        if tokenizer is not None:
            write_tokenizer(tokenizer, folder)


def adapter_state(engine: TrainingEngine) -> dict[str, Tensor]:
    """Adapters and head, whole and by peft's names, on rank 0; empty elsewhere. Collective."""
    state: dict[str, Tensor] = {}
    for bucket in buckets(engine, GATHER_BYTES, skip_frozen=True, wanted=rank_and_world()[0] == 0):
        for name, tensor in bucket:
            state[_peft_name(engine.module, name)] = tensor.detach().to("cpu", copy=True).contiguous()
    return state


def merge(base: str, adapter: str, output: str, *, reward_model: bool, dtype: Any) -> None:
    """Write the base model with the adapter's weights added to its own, and the tokenizer of the adapter or the base.

    Raises ValueError: no adapter there, or one of another kind of model.
    """
    peft = import_peft()
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    settings = _adapter_settings(Path(adapter))
    holds_head = HEAD in (settings.get("modules_to_save") or [])
    if reward_model != holds_head:
        wrong = "holds no scalar head: leave --is_rm out" if reward_model else "is one of a reward model: add --is_rm"
        raise ValueError(f"--lora_path {adapter!r} {wrong}")
    if reward_model:
        kind = AutoModelForSequenceClassification
        model: Any = load_pretrained(kind, base, fresh=(HEAD,), num_labels=1, dtype=dtype)
    else:
        model = load_pretrained(AutoModelForCausalLM, base, dtype=dtype)
    merged = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    if reward_model:
        merged.config.value_head_prefix = HEAD
        note = Path(adapter) / REWARD
        for name, value in (json.loads(note.read_text()) if note.is_file() else {}).items():
            if value is not None:
                setattr(merged.config, name, value)
    own = (Path(adapter) / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(adapter if own else base)
    with publish(output, name="--output_path") as folder:
        save_model(merged, folder, source=base)
        write_tokenizer(tokenizer, folder)


def import_peft() -> Any:
    """The package, or ValueError with the command that installs it."""
    try:
        import peft
    except ImportError as error:
        raise ValueError("LoRA needs a package: pip install 'openrlhf-learner[lora]'") from error
    return peft


def _peft_name(module: LearnerModule, name: str) -> str:
    head = f"{module.head_name}."
    if module.scalar and name.startswith(head):
        name = f"{HEAD}.{name.removeprefix(head)}"
    return PEFT_PREFIX + peft_name(name)


def _adapter_settings(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise ValueError(f"--lora_path {str(folder)!r} is no adapter: it has no {CONFIG}")
    return json.loads((folder / CONFIG).read_text())
