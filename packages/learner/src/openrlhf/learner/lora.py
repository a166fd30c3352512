"""Low-rank adapters (Hu et al., 2021) through peft: put into a model, exported on their own, merged into their base."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
ALL = "all-linear"
OUTPUT = "lm_head"
HEAD = "score"
"""The name under which an adapter holds a scalar head: that of transformers' sequence classification."""


def add_adapters(model: Any, config: LoraConfig, *, within: nn.Module | None = None) -> None:
    """Put adapters into the model and freeze its own weights.

    within: the part of the model that gets some, beside the output layer; None: all of it.
    The model keeps its class and the names of its modules. Raises ValueError when peft is missing or knows no such
    module.
    """
    peft = import_peft()
    targets = list(config.target_modules)
    if model.get_output_embeddings() is None:  # a critic has a head of its own
        targets = [name for name in targets if name.rpartition(".")[2] != OUTPUT]
    _check_targets(model, targets)
    outside: list[str] = []
    if within is not None:
        inside = {id(part) for part in (*within.modules(), model.get_output_embeddings())}
        outside = [name for name, part in model.named_modules() if name and id(part) not in inside]
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=ALL if targets == [ALL] else targets,
        exclude_modules=outside or None,
        bias="none",
        use_rslora=config.rslora,
        use_dora=config.dora,
    )
    try:
        with warnings.catch_warnings():  # it sets the option by itself where a layer is one of GPT-2's
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    except ValueError as error:
        there = f"linear ones are {', '.join(_linear_names(model))}"
        raise ValueError(f"`ds.lora.target_modules` {' '.join(targets)}: {error}; {there}") from error


def check_targets(model_path: str, config: LoraConfig) -> None:
    """What `add_adapters` says of the names of modules, without the model's weights. Raises ValueError."""
    targets = list(config.target_modules)
    if targets == [ALL]:
        return
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        _check_targets(_language_model(settings).from_config(settings), targets)


def _language_model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def _check_targets(model: Any, targets: list[str]) -> None:
    """peft itself is content when one of several names leads to a module."""
    if targets == [ALL]:
        return
    names = [name for name, _ in model.named_modules()]
    unknown = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    if unknown:
        kind = "stands alone" if ALL in unknown else "the model has no such module"
        raise ValueError(
            f"`ds.lora.target_modules` {' '.join(unknown)}: {kind}. Linear modules are "
            f"{', '.join(_linear_names(model))}; {ALL} takes all of them but the head"
        )


def _linear_names(model: Any) -> list[str]:
    """The last parts of the names of all linear modules, in their order."""
    from transformers.pytorch_utils import Conv1D  # a linear layer as GPT-2 has them

    linear = (nn.Linear, Conv1D)
    return list(dict.fromkeys(name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, linear)))


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


def export_adapters(
    engine: TrainingEngine,
    path: str,
    tokenizer: Any,
    *,
    source: str,
    averages: dict[str, Tensor] | None = None,
    trial: bool = False,
) -> None:
    """Write the adapters (and a scalar head) as a peft folder; of what is there only an earlier export is replaced.

    Collective; rank 0 writes. source: the model that they belong to. averages: the moving average of what is trained,
    written beside it as an adapter of its own, in `<path>/ema`. trial: everything is written and removed again.
    """
    state = adapter_state(engine)
    if not state:
        return
    with publish(path, trial=trial) as folder:
        _write_adapter(engine.module, state, folder, tokenizer, source)
        if averages is not None:
            named = {_peft_name(engine.module, name): tensor for name, tensor in averages.items()}
            smooth = {name: named[name].to(tensor.dtype).contiguous() for name, tensor in state.items()}
            (folder / "ema").mkdir()
            _write_adapter(engine.module, smooth, folder / "ema", tokenizer, source)


def _write_adapter(module: LearnerModule, state: dict[str, Tensor], folder: Path, tokenizer: Any, source: str) -> None:
    from safetensors.torch import save_file

    settings = copy(module.model.peft_config[ADAPTER])
    settings.base_model_name_or_path = source
    settings.inference_mode = True
    sees = hasattr(module.model.config, "vision_config")  # peft has no word for it
    settings.task_type = "SEQ_CLS" if module.scalar else None if sees else "CAUSAL_LM"
    settings.modules_to_save = [HEAD] if module.scalar else None
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
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    settings = _adapter_settings(Path(adapter))
    holds_head = HEAD in (settings.get("modules_to_save") or [])
    if reward_model != holds_head:
        wrong = "holds no scalar head: leave --is_rm out" if reward_model else "is one of a reward model: add --is_rm"
        raise ValueError(f"--lora_path {adapter!r} {wrong}")
    if reward_model:
        kind = AutoModelForSequenceClassification
        model: Any = load_pretrained(kind, base, fresh=(HEAD,), num_labels=1, dtype=dtype)
    else:
        model = load_pretrained(_language_model(AutoConfig.from_pretrained(base)), base, dtype=dtype)
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
