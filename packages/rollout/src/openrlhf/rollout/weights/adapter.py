"""The engine worker's end of a push of adapters: gives what came to vLLM. Loaded where an engine serves one."""

from __future__ import annotations

from typing import Any, cast

from vllm.lora import model_manager
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import get_supported_lora_modules

from openrlhf.rollout.vllm.arguments import ADAPTER_ID
from openrlhf.rollout.weights.parts import FIRST, AdapterParts


class AdapterWorker:
    """What vLLM's worker gets beside its own methods (`worker_extension_cls`) in an engine that serves an adapter."""

    def install_adapter(self) -> None:
        """The last part of a push: vLLM forgets all adapters when weights have come (`reset_lora_state`)."""
        worker: Any = self
        receiver = worker.weight_transfer_engine
        install(receiver.parts, receiver.model, worker.vllm_config)


def install(parts: AdapterParts, model: Any, vllm_config: Any) -> None:
    """Make the adapter that came the one that the engine has, in the place of an older one.

    Raises ValueError for one that is not as it should be, or has a part for which this engine has no place: vLLM would
    leave it out in silence.
    """
    tensors, modules = parts.take()
    manager, settings = model.lora_manager, vllm_config.lora_config
    rank = max(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(FIRST))
    helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=sorted(modules))
    helper.validate_legal(settings)
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        tensors,
        helper,
        device="cpu",
        dtype=cast(Any, settings.lora_dtype),
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    homeless = sorted(set(adapter.loras) - set(manager.modules))
    if homeless:
        manager.remove_adapter(ADAPTER_ID)
        raise ValueError(
            f"the adapter has parts for {', '.join(homeless)}, where vLLM has no room for one: merge it into the "
            "weights (`lora_push` merged)"
        )
    manager.activate_adapter(ADAPTER_ID)


def _supported_modules(model: Any) -> list[str]:
    """Modules of a model that get room for an adapter: linear layers, not the embedding and the head.

    Upstream fault (vLLM 0.32): with room at the head the logits of a prompt's tokens are taken for one per request, and
    every request for the log-probs of a prompt fails (on CPU the engine dies of it). Can go once those can be asked of
    an engine that serves adapters; tests/rollout scores with one.
    """
    embeddings = {name for m in model.modules() for name in (getattr(m, "embedding_modules", None) or ())}
    return [name for name in get_supported_lora_modules(model) if name not in embeddings]


setattr(model_manager, get_supported_lora_modules.__name__, _supported_modules)
