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
from openrlhf.learner.shared_check import sharing_problem
from openrlhf.learner.sharing import find_families
from openrlhf.learner.spec import LearnerSpec, Role

FLASH = "flash_attention_2"
WAYS = ("padded", "packed", "shared")
"""How samples lie. Shared: what they begin with is computed once (`--train.share_prompt`), by flex on GPUs."""
COMMON = 16
"""Tokens that the longer rows begin with."""
EXACT = 1e-4
"""Relative error allowed in float32."""
ROUNDING_FACTOR = 3.0
"""A way of computing in bf16 may be so many times further from float32 than padded sdpa in bf16 is."""


def attention(folder: Path) -> Outcome:
    """Compare gradients with that of padded sdpa in float32."""
    device = training_device()
    model, batch = make_model(folder / "model"), make_batch((37, 5, 64, 18, 9))
    long = batch.lengths > COMMON
    batch.tokens[long, :COMMON] = batch.tokens[long][0, :COMMON]
    reference = _gradient(model, batch, device, "fp32", "sdpa", "padded")
    names = {way: f"{way}-fp32-sdpa" for way in ("packed", "shared")}
    numbers = {n: _error(_gradient(model, batch, device, "fp32", "sdpa", way), reference) for way, n in names.items()}
    limits = dict.fromkeys(numbers, EXACT)
    if device.type == "cuda":
        rounding = _error(_gradient(model, batch, device, "bf16", "sdpa", "padded"), reference)
        kernels = ["sdpa", *({FLASH} & installed_flash_attention())]
        for kernel in kernels:
            for way in WAYS:
                name = f"{way}-bf16-{kernel}"
                numbers[name] = _error(_gradient(model, batch, device, "bf16", kernel, way), reference)
                limits[name] = ROUNDING_FACTOR * rounding
    wrong = [f"{n} {numbers[n]:.2g} (allowed {limits[n]:.2g})" for n in numbers if not numbers[n] <= limits[n]]
    if wrong:
        raise CheckError(f"relative error of the gradient against padded sdpa in float32: {', '.join(wrong)}")
    shown = ", ".join(f"{name} {value:.1e}" for name, value in numbers.items())
    return Outcome(detail=f"relative error of the gradient: {shown}", numbers=numbers)


def _gradient(model: str, batch: Batch, device: torch.device, dtype: str, kernel: str, way: str) -> Tensor:
    """The gradient of a weighted sum of log-probs by all parameters, flat, float64 on the CPU. way: one of `WAYS`."""
    ds = DsConfig(param_dtype=dtype, attn_implementation=kernel, packing_samples=way == "packed")  # type: ignore[arg-type]
    spec = LearnerSpec(role=Role.POLICY, model_path=model, ds=ds, optim=OptimConfig())
    module = load_module(spec, device)
    module.check_head(device)
    families = None
    if way == "shared":
        if problem := sharing_problem(spec, module, device):
            raise CheckError(f"the tokens that samples begin with cannot be computed once: {problem}")
        families = find_families(batch)
    batch = batch.to(device)
    logprobs = module(build_inputs(batch, batch.action_mask, packed=way == "packed", families=families)).primary
    (logprobs * torch.linspace(0.5, 1.5, len(logprobs), device=device)).sum().backward()
    return torch.cat([p.grad.flatten().cpu().double() for p in module.parameters() if p.grad is not None])


def _error(gradient: Tensor, reference: Tensor) -> float:
    if gradient.shape != reference.shape:
        raise CheckError(f"{gradient.numel()} numbers in one gradient, {reference.numel()} in the other")
    return float((gradient - reference).norm() / reference.norm())
