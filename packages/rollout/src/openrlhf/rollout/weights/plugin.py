"""The vLLM plugin: makes the weight-transfer backend "gloo" known in every vLLM process.

vLLM calls `register` through the entry point group `vllm.general_plugins` at the start of the frontend, of each
engine core and of each worker. It names the receiver by module path, so that only workers that use it import it.
"""

from __future__ import annotations

GLOO_BACKEND = "gloo"


def register() -> None:
    """Register the gloo receiver with vLLM's factory; calling it again changes nothing."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if GLOO_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            GLOO_BACKEND, "openrlhf.rollout.weights.gloo_engine", "GlooWeightTransferEngine"
        )
