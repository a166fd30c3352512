"""Hugging Face export: safetensors, configuration and tokenizer, complete or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from openrlhf.learner.collective import rank_and_world
from openrlhf.learner.engine import TrainingEngine
from openrlhf.learner.folders.publish import publish
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.settings_files import save_model, write_generation_config, write_tokenizer
from openrlhf.learner.weights import GATHER_BYTES, buckets


def full_state_dict(engine: TrainingEngine) -> dict[str, Tensor] | None:
    """All parameters and persistent buffers, whole, on the CPU, on rank 0; None elsewhere. Collective."""
    module, first = engine.module, rank_and_world()[0] == 0
    state: dict[str, Tensor] = {}
    for bucket in buckets(engine, GATHER_BYTES, skip_frozen=False, wanted=first):
        state.update((name, tensor.detach().to("cpu", copy=True)) for name, tensor in bucket)
    if not first:
        return None
    for name, parameter in module.named_parameters():
        got, want = tuple(state[module.hf_name(name)].shape), engine.full_shape(parameter)
        if got != want:
            raise RuntimeError(f"{name} was gathered with shape {got}, should be {want}")
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, tensor in module.state_dict().items():
        if name not in parameters:
            state[module.hf_name(name)] = tensor.detach().cpu()
    return state


def export_hf(
    engine: TrainingEngine,
    path: str,
    tokenizer: Any,
    *,
    source: str = "",
    averages: dict[str, Tensor] | None = None,
    trial: bool = False,
) -> None:
    """Write the model into the folder `path`; of what is there only an earlier export is replaced.

    Collective; rank 0 writes.

    source: the model that was trained: its generation configuration goes along. averages: the moving average of (some
    of) the weights, written beside the live model, in `<path>/ema`. trial: everything is written and removed again.
    A critic or reward model keeps its head under its name, which the configuration records.
    """
    state = full_state_dict(engine)
    if state is None:
        return
    with publish(path, trial=trial) as folder:
        _write(engine.module, dict(state), tokenizer, folder, source)
        if averages is not None:
            smooth = {name: averages.get(name, tensor).to(tensor.dtype) for name, tensor in state.items()}
            _write(engine.module, smooth, tokenizer, folder / "ema", source)


def _write(module: LearnerModule, state: dict[str, Tensor], tokenizer: Any, folder: Path, source: str) -> None:
    if module.scalar:
        _write_scalar_model(module, state, folder, source)
    else:
        save_model(module.model, folder, source=source, state=state)
    if tokenizer is not None:
        write_tokenizer(tokenizer, folder)


def _write_scalar_model(module: LearnerModule, state: dict[str, Tensor], folder: Path, source: str) -> None:
    """As a sequence-classification model; transformers itself can load it when the head is called `score`."""
    from safetensors.torch import save_file
    from transformers import AutoModelForSequenceClassification

    config = module.model.config
    config.num_labels = 1
    config.value_head_prefix = module.head_name
    known: Any = AutoModelForSequenceClassification._model_mapping
    if type(config) in known:
        config.architectures = [known[type(config)].__name__]
    folder.mkdir(exist_ok=True)
    config.save_pretrained(str(folder))
    write_generation_config(source, folder)
    save_file({k: v.contiguous() for k, v in state.items()}, str(folder / "model.safetensors"), {"format": "pt"})
