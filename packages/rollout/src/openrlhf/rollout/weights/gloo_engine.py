"""The engine worker's end of a weight push on CPU: a vLLM weight-transfer backend, loaded through the plugin.

In shared memory where the trainer is on this host, else over gloo.

On CPU vLLM re-packs every linear layer for oneDNN after loading and empties the original parameter, so weights can't
be copied into a live model. vLLM's layer-wise reload is the way that works: it puts the layers back into their
loading state, loads, and packs again. The whole push, reload included, happens inside `update_weights`, so the engine
never runs a step on a half-loaded model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from openrlhf.rollout.weights.group import GroupAddress, WeightGroup
from openrlhf.rollout.weights.parts import AdapterParts
from openrlhf.rollout.weights.wire import BucketPlan

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """`GroupAddress.for_engine`, as it arrives by remote call."""

    master_address: str
    master_port: int
    world_size: int
    generation: int
    rank_offset: int
    timeout_s: float
    local: str


@dataclass(kw_only=True)
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What the next push brings: `BucketPlan.to_dict()` and the version."""

    plan: dict[str, Any]
    version: int


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives flat buckets from the trainer's rank 0 and loads them layer by layer."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: WeightGroup | None = None

    @cached_property
    def parts(self) -> AdapterParts:
        """Of the adapter, where the engine serves one."""
        return AdapterParts()

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join a group, leaving an older one. Raises RuntimeError when the others don't come in time."""
        self.shutdown()
        # One warning per push and layer that holds no weights of its own (rotary embedding, tied head).
        logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)
        address = GroupAddress(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            world_size=init_info.world_size,
            generation=init_info.generation,
            timeout_s=init_info.timeout_s,
            local=init_info.local,
        )
        self._group = WeightGroup.join(address, init_info.rank_offset + self.parallel_config.rank)

    def start_weight_update(self) -> None:
        """Nothing to do: see `update_weights`."""

    def finish_weight_update(self) -> None:
        """Nothing to do: see `update_weights`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """One whole push.

        After a failed one the model holds a mix of old and new weights and must not serve until a later push has
        succeeded; it can still run a step without crashing, since every layer is back in its working state.
        """
        info = self.parse_update_info(update_info)
        moves_base = BucketPlan.from_dict(info.plan).moves_base
        self.parts.begin(with_base=moves_base)
        if not moves_base:
            self.receive_weights(info)
            return
        with _packing_experts(self.model):
            initialize_layerwise_reload(self.model)
            try:
                self.receive_weights(info)
            finally:
                finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_lm_head(self.model)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive and load all buckets. Raises RuntimeError when the sender is gone or follows another plan."""
        if self._group is None:
            raise RuntimeError("no weight group: init_weight_transfer must come before a push, and again after a fault")
        try:
            plan = BucketPlan.from_dict(update_info.plan)
            self.parts.load(self.model, self._group.receive(plan, update_info.version))
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
        self._group = None


@contextmanager
def _packing_experts(model: torch.nn.Module) -> Iterator[None]:
    """Pack the experts of a mixture whenever a layer is reloaded.

    Upstream fault (vLLM 0.32, CPU): `UnquantizedFusedMoEMethod._setup_kernel` packs them for the grouped matrix product
    only when there is no kernel yet. A reload writes them unpacked over the packed ones, which the kernel then reads in
    a wrong order, or fails where packing pads them. Must go once a reload packs them itself, since it would be done
    twice; tests/rollout compares log-probs after pushes to a mixture.
    """
    methods = [m for m in model.modules() if isinstance(m, UnquantizedFusedMoEMethod)]
    for method in methods:
        experts = method.moe_kernel and method.moe_kernel.fused_experts
        if isinstance(experts, CPUUnquantizedExperts):
            vars(method)["process_weights_after_loading"] = _processing_and_packing(method, experts)
    try:
        yield
    finally:
        for method in methods:
            vars(method).pop("process_weights_after_loading", None)


def _processing_and_packing(method: UnquantizedFusedMoEMethod, experts: CPUUnquantizedExperts) -> Callable[[Any], None]:
    process = method.process_weights_after_loading

    def process_and_pack(layer: Any) -> None:
        process(layer)
        experts.process_weights_after_loading(layer)

    return process_and_pack


def _repack_tied_lm_head(model: torch.nn.Module) -> None:
    """Give a tied lm_head the new weights.

    Upstream fault (vLLM 0.32, CPU): a tied lm_head shares the embedding's parameter, but its own oneDNN copy
    (`cpu_linear`) is not renewed by the layer-wise reload, so the old head would go on with the new body. The embedding
    has packed the same weights, for nobody: the head takes that copy. Can go once the reload re-packs tied heads
    itself; tests/rollout compares log-probs after a push to a tied model.
    """
    layers = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    for head in layers:
        if isinstance(head, ParallelLMHead) and hasattr(head, "cpu_linear"):
            twin = next((m for m in layers if m.weight is head.weight and not isinstance(m, ParallelLMHead)), None)
            if twin is not None and hasattr(twin, "cpu_linear"):
                head.cpu_linear = twin.cpu_linear
            else:
                dispatch_cpu_unquantized_gemm(head, remove_weight=False)
