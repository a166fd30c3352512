"""Hugging Face export: safetensors, configuration and tokenizer, complete or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from openrlhf.learner.checkpoint_dir import replace_directory
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.tensor_parallel import TensorParallel
from openrlhf.learner.weights import buckets, full_shape

GATHER_BYTES = 512 * 2**20


def full_state_dict(module: LearnerModule, tensor_parallel: TensorParallel) -> dict[str, Tensor] | None:
    """All parameters and persistent buffers, whole, on the CPU, on rank 0; None elsewhere. Collective."""
    state: dict[str, Tensor] = {}
    for bucket in buckets(module, tensor_parallel, GATHER_BYTES, skip_frozen=False):
        state.update((name, tensor.detach().to("cpu", copy=True)) for name, tensor in bucket)
    if dist.is_initialized() and dist.get_rank() != 0:
        return None
    for name, parameter in module.named_parameters():
        got, want = tuple(state[module.hf_name(name)].shape), full_shape(parameter)
        if got != want:
            raise RuntimeError(f"{name} was gathered with shape {got}, should be {want}")
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, tensor in module.state_dict().items():
        if name not in parameters:
            state[module.hf_name(name)] = tensor.detach().cpu()
    return state


def export_hf(
    module: LearnerModule,
    tensor_parallel: TensorParallel,
    path: str,
    tokenizer: Any,
    *,
    averages: dict[str, Tensor] | None = None,
) -> None:
    """Write the model under `path`, replacing what was there. Collective; rank 0 writes.

    averages: the moving average of (some of) the weights, written beside the live model, in `<path>/ema`.
    A critic or reward model keeps its head under its name, which the configuration records.
    """
    state = full_state_dict(module, tensor_parallel)
    if state is None:
        return
    with replace_directory(Path(path)) as folder:
        _write(module, state, tokenizer, folder)
        if averages is not None:
            smooth = {name: averages.get(name, tensor).to(tensor.dtype) for name, tensor in state.items()}
            _write(module, smooth, tokenizer, folder / "ema")


def _write(module: LearnerModule, state: dict[str, Tensor], tokenizer: Any, folder: Path) -> None:
    _write_model(module, state, folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def _write_model(module: LearnerModule, state: dict[str, Tensor], folder: Path) -> None:
    config = module.model.config
    use_cache, config.use_cache = config.use_cache, True
    try:
        if module.head is None:
            module.model.save_pretrained(str(folder), state_dict=state)
        else:
            _write_scalar_model(module, state, folder)
    finally:
        config.use_cache = use_cache


def _write_scalar_model(module: LearnerModule, state: dict[str, Tensor], folder: Path) -> None:
    """As a sequence-classification model; transformers itself can load it when the head is called `score`."""
    from safetensors.torch import save_file
    from transformers import AutoModelForSequenceClassification

    config = module.model.config
    config.num_labels = 1
    config.value_head_prefix = module.head_name
    known: Any = AutoModelForSequenceClassification._model_mapping
    if type(config) in known:
        config.architectures = [known[type(config)].__name__]
    config.save_pretrained(str(folder))
    save_file({k: v.contiguous() for k, v in state.items()}, str(folder / "model.safetensors"), {"format": "pt"})
