"""Whether vLLM can serve an adapter of a model, from the model's configuration and the source of the installed vLLM.

Importing vLLM takes seconds, so nothing is imported. What cannot be known here, such as a model that is not on this
machine yet, counts as impossible: adapters can always be merged instead.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from openrlhf.rollout.vllm.arguments import ADAPTER_RANKS

REGISTRY = ("model_executor", "models", "registry.py")
MODELS = "vllm.model_executor.models."
SUPPORT = "SupportsLoRA"
NOT_LINEAR = ("embed_tokens", "lm_head", "wte", "word_embeddings", "embed_out")
"""Embeddings and heads, by the names that models give them."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def no_room_for_adapter(model: str, targets: Sequence[str], rank: int) -> str:
    """Why vLLM cannot serve an adapter of this rank on these modules of a model; empty when it can."""
    if rank > ADAPTER_RANKS[-1]:
        return f"vLLM serves adapters up to rank {ADAPTER_RANKS[-1]}"
    others = [name for name in targets if name.rpartition(".")[2] in NOT_LINEAR]
    if others:
        return f"vLLM cannot score a text with an adapter on {others[0]}"
    file = Path(model).expanduser() / "config.json"
    if not file.is_file():
        return f"{model!r} is no folder, so nothing is known of it yet"
    config = json.loads(file.read_text(encoding="utf-8"))
    if "vision_config" in config:
        return "adapters on a vision encoder are an experiment of vLLM"
    if any((config.get("text_config") or config).get(name) for name in EXPERTS):
        return "in a mixture of experts vLLM computes all experts as if they had adapters"
    name = next(iter(config.get("architectures") or ()), "")
    return "" if serves_adapters(name) else f"vLLM has no adapters for {name or 'a model that names no class'}"


@functools.cache
def serves_adapters(architecture: str) -> bool:
    """Whether vLLM's class of this architecture says that it takes adapters."""
    found = importlib.util.find_spec("vllm")  # finds it, does not import it
    for folder in (found.submodule_search_locations or ()) if found else ():
        registry = Path(folder).joinpath(*REGISTRY)
        place = _place(registry, architecture) if registry.is_file() else None
        if place is not None:
            return _inherits(registry.parent, *place)
    return False


def _place(registry: Path, architecture: str) -> tuple[str, str] | None:
    """Module and class of an architecture in vLLM's registry of models."""
    for node in ast.walk(ast.parse(registry.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == architecture and isinstance(value, ast.Tuple):
                    module, name = ast.literal_eval(value)
                    return module, name
    return None


def _inherits(folder: Path, module: str, name: str) -> bool:
    """Whether a class of vLLM's models has `SUPPORT` among its bases, or bases of those in this folder."""
    file = folder / f"{module}.py"
    if not file.is_file():
        return False
    tree = ast.parse(file.read_text(encoding="utf-8"))
    origins = {
        alias.asname or alias.name: ((node.module or "").removeprefix(MODELS), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.level == 1 or (node.module or "").startswith(MODELS))
        for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            return SUPPORT in bases or any(_inherits(folder, *origins.get(base, (module, base))) for base in bases)
    return False
