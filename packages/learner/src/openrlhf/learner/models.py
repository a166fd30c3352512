"""Loading Hugging Face models for a role."""

from __future__ import annotations

import json
import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf.learner.heads import ScalarHead, TokenDistribution, token_head
from openrlhf.learner.layers import check_packing, num_experts
from openrlhf.learner.loading import load_pretrained
from openrlhf.learner.lora import add_adapters
from openrlhf.learner.modules import LearnerModule, disable_dropout
from openrlhf.learner.spec import LearnerSpec, Role

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_module(
    spec: LearnerSpec, device: torch.device, *, loading: AbstractContextManager[object] | None = None
) -> LearnerModule:
    """The model of `spec` in its training form.

    loading: open while the weights are loaded; a backend's that partitions them.
    """
    from transformers import AutoConfig

    check_attention(spec.ds.attn_implementation)
    config = AutoConfig.from_pretrained(spec.model_path)
    _check_model(spec, config)
    with loading or nullcontext():
        if spec.role.is_language_model:
            model, scalar_head, head_name = _pretrained(_language_model_class(config), spec, config), None, ""
            if spec.ds.use_liger_kernel:
                apply_liger(model)
        else:
            head_name = getattr(config, "value_head_prefix", None) or spec.ds.value_head_prefix
            weights = head_weights(spec.model_path, head_name)
            _check_head(spec, head_name, weights)
            model = _pretrained(_backbone_class(), spec, config)
            scalar_head = build_head(config.get_text_config().hidden_size, weights, spec).to(_head_dtype(spec))
    _prepare(model, spec)
    if spec.trained and spec.ds.lora.rank > 0:
        add_adapters(model, spec.ds.lora, within=model.get_decoder() if spec.freeze_visual_encoder else None)
    module = LearnerModule(
        model,
        scalar_head or token_head(model),
        head_name=head_name,
        distribution=TokenDistribution(spec.temperature, spec.suppressed_token_ids, spec.truncation),
        aux_loss=spec.aux_loss_coef > 0,
    ).train(spec.trained)
    module.head.requires_grad_(spec.trained)
    return module if spec.zero3 or spec.offload else module.to(device)


def check_attention(implementation: str) -> None:
    """ValueError when the attention kernels are not installed."""
    if implementation != "flash_attention_2":
        return
    from transformers.utils.import_utils import is_flash_attn_2_available

    if not is_flash_attn_2_available():
        raise ValueError(
            "`ds.attn_implementation` 'flash_attention_2' needs the flash-attn package and a GPU: "
            "pip install flash-attn --no-build-isolation, or `ds.attn_implementation` sdpa"
        )


def _check_model(spec: LearnerSpec, config: Any) -> None:
    if spec.aux_loss_coef > 0 and not num_experts(config.get_text_config()):
        raise ValueError(
            f"`aux_loss_coef` {spec.aux_loss_coef!r} needs a mixture of experts, "
            f"{spec.model_path!r} is a dense {config.model_type}: set it to 0"
        )
    if spec.freeze_visual_encoder and not hasattr(config, "vision_config"):
        raise ValueError(f"`freeze_visual_encoder`: {spec.model_path!r} has no vision encoder, leave it out")
    if spec.packed:
        check_packing(config, spec.model_path)
    if spec.ds.use_liger_kernel and not torch.cuda.is_available():
        raise ValueError("`ds.use_liger_kernel` needs a GPU: leave it out")


def apply_liger(model: Any) -> None:
    """Replace the model's norms, rotary embedding and MLP by Liger's fused kernels (Hsu et al., 2024).

    The head stays ours: log-probs come in chunks, without logits of the whole batch. Raises ValueError when the package
    is missing or does not know the architecture.
    """
    try:
        from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
            _apply_liger_kernel_to_instance,
        )
        from liger_kernel.transformers.monkey_patch import (  # pyright: ignore[reportMissingImports]
            MODEL_TYPE_TO_APPLY_LIGER_FN,
        )
    except ImportError as error:
        raise ValueError("`ds.use_liger_kernel` needs a package: pip install liger-kernel") from error
    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"`ds.use_liger_kernel` does not know {model.config.model_type!r} models: leave it out")
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)


def _language_model_class(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def _backbone_class() -> Any:
    from transformers import AutoModel

    return AutoModel


def _pretrained(auto_class: Any, spec: LearnerSpec, config: Any) -> Any:
    extra: dict[str, Any] = {}
    if spec.ds.experts_implementation is not None:
        extra["experts_implementation"] = spec.ds.experts_implementation
    if spec.ds.load_in_4bit:
        extra |= four_bit(spec)
    return load_pretrained(
        auto_class,
        spec.model_path,
        config=config,
        dtype=DTYPES[spec.ds.param_dtype],
        attn_implementation=spec.ds.attn_implementation,
        **extra,
    )


def four_bit(spec: LearnerSpec) -> dict[str, Any]:
    """Arguments that load the weights in 4-bit NormalFloat (Dettmers et al., 2023) straight onto this rank's GPU.

    Raises ValueError without a GPU or without bitsandbytes.
    """
    if not torch.cuda.is_available():
        raise ValueError("`ds.load_in_4bit` needs a GPU: leave it out")
    from transformers import BitsAndBytesConfig
    from transformers.utils.import_utils import is_bitsandbytes_available

    if not is_bitsandbytes_available():
        raise ValueError("`ds.load_in_4bit` needs a package: pip install 'openrlhf-learner[4bit]'")
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[spec.ds.param_dtype],
    )
    return {"quantization_config": settings, "device_map": {"": torch.cuda.current_device()}}


def _prepare(model: Any, spec: LearnerSpec) -> None:
    disable_dropout(model)
    if not spec.trained:
        model.requires_grad_(False).eval()
        return
    model.train()
    if spec.freeze_visual_encoder:
        model.requires_grad_(False)
        model.get_decoder().requires_grad_(True)
        model.get_output_embeddings().requires_grad_(True)
    if spec.model.gradient_checkpointing_enable:
        reentrant = spec.model.gradient_checkpointing_reentrant
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()


def _head_dtype(spec: LearnerSpec) -> torch.dtype:
    """float32 where the model is only read; a backend casts every parameter (its master weights are float32)."""
    whole = not (spec.trained or spec.zero3 or spec.tensor_parallel)
    return torch.float32 if whole else DTYPES[spec.ds.param_dtype]


def build_head(hidden_size: int, weights: dict[str, Tensor], spec: LearnerSpec) -> ScalarHead:
    """The scalar head, from the checkpoint or fresh (normal, std 1/(hidden+1), the same on every rank)."""
    head = ScalarHead(hidden_size, 1, bias="bias" in weights)
    with torch.no_grad():
        if weights:
            for name, parameter in head.named_parameters():
                if parameter.shape != weights[name].shape:
                    raise ValueError(
                        f"the scalar head in {spec.model_path!r} has shape {tuple(weights[name].shape)}, "
                        f"needed {tuple(parameter.shape)}: a reward model must have num_labels 1"
                    )
                parameter.copy_(weights[name])
        else:
            generator = torch.Generator().manual_seed(spec.batch.seed)
            head.weight.normal_(0.0, 1.0 / (hidden_size + 1), generator=generator)
    return head


def _check_head(spec: LearnerSpec, head_name: str, weights: dict[str, Tensor]) -> None:
    """A head under another name must never become a random one."""
    if weights:
        return
    others = scalar_heads(spec.model_path)
    if (spec.role is Role.REWARD and not spec.trained) or others:
        found = f"it has {', '.join(map(repr, others))}" if others else "it has no scalar head at all"
        raise ValueError(
            f"{spec.role.value} model {spec.model_path!r} has no head {head_name!r}; {found}. "
            "Name the head with `ds.value_head_prefix`, or give a model with a scalar head"
        )
    logger.info("model %r has no head %r in its files: a new one is initialised", spec.model_path, head_name)


def head_weights(model_path: str, head_name: str) -> dict[str, Tensor]:
    """weight (and bias) of the head in the checkpoint; empty when it has none."""
    found = {}
    for key, load in _checkpoint_tensors(model_path).items():
        if key in (f"{head_name}.weight", f"{head_name}.bias"):
            found[key.rpartition(".")[2]] = load()
    return found


def scalar_heads(model_path: str) -> list[str]:
    """Names of modules at the top level of the checkpoint whose weight is [1, hidden]."""
    names = []
    for key, load in _checkpoint_tensors(model_path).items():
        if key.count(".") == 1 and key.endswith(".weight"):
            shape = load().shape
            if len(shape) == 2 and shape[0] == 1:
                names.append(key.partition(".")[0])
    return names


def _checkpoint_tensors(model_path: str) -> dict[str, Any]:
    """Tensor name -> function that reads it, over all safetensors files of a model."""
    from safetensors import safe_open

    def reader(file: str, key: str) -> Any:
        def load() -> Tensor:
            with safe_open(file, framework="pt") as handle:
                return handle.get_tensor(key)

        return load

    tensors: dict[str, Any] = {}
    for file in _safetensors_files(model_path):
        with safe_open(file, framework="pt") as handle:
            tensors.update({key: reader(file, key) for key in handle.keys()})  # noqa: SIM118 (not a mapping)
    return tensors


def _safetensors_files(model_path: str) -> list[str]:
    from transformers.utils.hub import cached_file

    def find(name: str) -> str | None:
        return cached_file(model_path, name, _raise_exceptions_for_missing_entries=False)

    index = find("model.safetensors.index.json")
    if index is not None:
        names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
        return [path for name in names if (path := find(name)) is not None]
    single = find("model.safetensors")
    if single is None:
        raise ValueError(f"{model_path!r} has no model.safetensors: convert it with save_pretrained first")
    return [single]


def reward_statistics(module: LearnerModule) -> tuple[float, float] | None:
    """(mean, std) of the rewards, if the model's configuration carries them."""
    mean, std = getattr(module.model.config, "mean", None), getattr(module.model.config, "std", None)
    return (float(mean), float(std)) if mean is not None and std is not None else None
