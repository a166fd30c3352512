"""Row `attention`: one gradient, whichever way the samples lie and whoever computes the attention."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from openrlhf.core.batch import Batch
from openrlhf.launcher.machine import installed_flash_attention
from openrlhf.launcher.selfcheck.models import make_batch, make_model
from openrlhf.launcher.selfcheck.outcome import CheckError, Outcome
from openrlhf.learner.config import DsConfig, OptimConfig
from openrlhf.learner.models import load_module
from openrlhf.learner.packing import build_inputs
from openrlhf.learner.setup import training_device
from openrlhf.learner.spec import LearnerSpec, Role

FLASH = "flash_attention_2"
EXACT = 1e-4
"""Relative error allowed in float32."""
ROUNDING_FACTOR = 3.0
"""A way of computing in bf16 may be so many times further from float32 than padded sdpa in bf16 is."""


def attention(folder: Path) -> Outcome:
    """Compare gradients with that of padded sdpa in float32."""
    device = training_device()
    model, batch = make_model(folder / "model"), make_batch((37, 5, 64, 18, 9))
    reference = _gradient(model, batch, device, "fp32", "sdpa", packed=False)
    numbers = {"packed-fp32-sdpa": _error(_gradient(model, batch, device, "fp32", "sdpa", packed=True), reference)}
    limits = {"packed-fp32-sdpa": EXACT}
    if device.type == "cuda":
        rounding = _error(_gradient(model, batch, device, "bf16", "sdpa", packed=False), reference)
        kernels = ["sdpa", *({FLASH} & installed_flash_attention())]
        for kernel in kernels:
            for packed in (False, True):
                name = f"{'packed' if packed else 'padded'}-bf16-{kernel}"
                numbers[name] = _error(_gradient(model, batch, device, "bf16", kernel, packed=packed), reference)
                limits[name] = ROUNDING_FACTOR * rounding
    wrong = [f"{n} {numbers[n]:.2g} (allowed {limits[n]:.2g})" for n in numbers if not numbers[n] <= limits[n]]
    if wrong:
        raise CheckError(f"relative error of the gradient against padded sdpa in float32: {', '.join(wrong)}")
    shown = ", ".join(f"{name} {value:.1e}" for name, value in numbers.items())
    return Outcome(detail=f"relative error of the gradient: {shown}", numbers=numbers)


def _gradient(model: str, batch: Batch, device: torch.device, dtype: str, kernel: str, *, packed: bool) -> Tensor:
    """The gradient of a weighted sum of log-probs by all parameters, flat, float64 on the CPU."""
    ds = DsConfig(param_dtype=dtype, attn_implementation=kernel, packing_samples=packed)  # type: ignore[arg-type]
    module = load_module(LearnerSpec(role=Role.POLICY, model_path=model, ds=ds, optim=OptimConfig()), device)
    module.check_head(device)
    batch = batch.to(device)
    logprobs = module(build_inputs(batch, batch.action_mask, packed=packed)).primary
    (logprobs * torch.linspace(0.5, 1.5, len(logprobs), device=device)).sum().backward()
    return torch.cat([p.grad.flatten().cpu().double() for p in module.parameters() if p.grad is not None])


def _error(gradient: Tensor, reference: Tensor) -> float:
    if gradient.shape != reference.shape:
        raise CheckError(f"{gradient.numel()} numbers in one gradient, {reference.numel()} in the other")
    return float((gradient - reference).norm() / reference.norm())
