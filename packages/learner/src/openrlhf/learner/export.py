"""Hugging Face export: safetensors, configuration and tokenizer, complete or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from openrlhf.learner.collective import rank_and_world
from openrlhf.learner.engine import TrainingEngine
from openrlhf.learner.folders.publish import publish
from openrlhf.learner.lora_stream import streamed
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.settings_files import save_model, write_generation_config, write_tokenizer


def full_states(
    engine: TrainingEngine, averages: dict[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All parameters and persistent buffers, whole, on the CPU: live, and with averages in the place of some.

    Adapters are merged into the weights that they belong to. Both are empty but on rank 0, and the second without
    averages. Collective.
    """
    module, first = engine.module, rank_and_world()[0] == 0
    names = {id(p): module.hf_name(name) for name, p in module.named_parameters()}
    live: dict[str, Tensor] = {}
    smooth: dict[str, Tensor] = {}
    items = streamed(module, skip_frozen=False)
    for item, whole in zip(items, engine.whole((item.parameters for item in items), wanted=first), strict=True):
        for parameter, tensor in zip(item.parameters, whole, strict=first):
            got, want = tuple(tensor.shape), engine.full_shape(parameter)
            if got != want:
                raise RuntimeError(f"{names[id(parameter)]} was gathered with shape {got}, should be {want}")
        if first:
            live[item.name] = item.make(whole).detach().to("cpu", copy=True)
        if averages is not None:
            found = (averages.get(names[id(p)]) for p in item.parameters)
            places = [t if a is None else a.to(t) for t, a in zip(whole, found, strict=True)]
            smooth[item.name] = item.make(places).detach().to("cpu", copy=True)
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {module.hf_name(n): t.detach().cpu() for n, t in module.state_dict().items() if n not in known}
    return (live | buffers if first else {}), (smooth | buffers if averages is not None else {})


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
    live, smooth = full_states(engine, averages)
    if not live:
        return
    with publish(path, trial=trial) as folder:
        _write(engine.module, live, tokenizer, folder, source)
        if smooth:
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
