"""Clipping for Muon under ZeRO: the raw gradient is measured and scaled before momentum and Newton-Schulz.

DeepSpeed 0.19.8 orthogonalises first (on stages 1 and 2 at the end of the last backward pass, on stage 3 in its step)
and then measures and clips the update, which shrinks it to nothing. So its clipping is off, and the classes here step
in between. They can go when DeepSpeed clips the raw gradient itself.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

NORM_EPSILON = 1e-6
"""DeepSpeed's, so that Adam and Muon are clipped by the same formula."""


def clip_factor(norm: float, max_norm: float) -> float:
    """What to multiply a gradient of this norm with; max_norm 0 never clips."""
    return max_norm / (norm + NORM_EPSILON) if 0.0 < max_norm < norm else 1.0


class RawClipping(Protocol):
    def before_step(self) -> float:
        """Measure, clip and orthogonalise what needs it. Returns the norm before clipping; collective."""
        ...


def raw_clipping(zero_optimizer: Any, stage: int, max_norm: float) -> RawClipping:
    """For a ZeRO optimiser around Muon."""
    if stage == 3:
        return _PartitionedParameters(zero_optimizer, max_norm)
    return _PartitionedOptimizer(zero_optimizer, max_norm)


class _PartitionedOptimizer:
    """Stages 1 and 2: hold back the orthogonalisation, which DeepSpeed does while it fills its gradient partition."""

    def __init__(self, zero_optimizer: Any, max_norm: float) -> None:
        self._zero = zero_optimizer
        self._max_norm = max_norm
        self._fill = zero_optimizer.get_flat_partition
        self._held: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = {}
        zero_optimizer.get_flat_partition = self._fill_raw

    def _fill_raw(self, tensor_list: Any, *args: Any, **kwargs: Any) -> Any:
        """The partition of raw gradients; what is needed to fill it again with updates is kept."""
        group = kwargs["param_group_idx"]
        muon = [t for t in tensor_list if t.use_muon]
        if not muon:
            return self._fill(tensor_list, *args, **kwargs)
        self._held[group] = (tensor_list, args, kwargs, self._zero.all_grad_tensors[group])
        for tensor in muon:
            tensor.use_muon = False
        try:
            return self._fill(tensor_list, *args, **kwargs)
        finally:
            for tensor in muon:
                tensor.use_muon = True

    @torch.no_grad()
    def before_step(self) -> float:
        zero = self._zero
        zero.groups_lacking_loss_scale.clear()
        norm = float(zero.scaled_global_norm()) / zero.loss_scale
        if norm != float("inf"):  # DeepSpeed's word for a gradient that is not finite; it will skip the step
            factor = clip_factor(norm, self._max_norm)
            for group, gradients in list(zero.averaged_gradients.items()):
                if group not in self._held:
                    torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
                    continue
                tensor_list, args, kwargs, whole = self._held[group]
                torch._foreach_mul_(whole, factor)  # pyright: ignore[reportPrivateImportUsage]
                zero.all_grad_tensors[group] = whole
                zero.averaged_gradients[group] = self._fill(tensor_list, *args, **kwargs)
                zero.all_grad_tensors[group] = None
        self._held.clear()
        return norm


class _PartitionedParameters:
    """Stage 3: gradients are still raw when its step begins."""

    def __init__(self, zero_optimizer: Any, max_norm: float) -> None:
        self._zero = zero_optimizer
        self._max_norm = max_norm

    @torch.no_grad()
    def before_step(self) -> float:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        zero = self._zero
        zero.sub_groups_lacking_loss_scale.clear()
        norm = float(combine_grad_norm_groups(zero._get_norm_groups())) / zero.loss_scale
        factor = clip_factor(norm, self._max_norm)
        if factor != 1.0 and norm != float("inf"):
            for gradients in zero.averaged_gradients.values():
                torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
        return norm
