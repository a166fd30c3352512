"""`TrainingEngine`: the one place that drives DeepSpeed. A frozen model that is whole does without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf.learner.config import OptimConfig
from openrlhf.learner.ds_config import deepspeed_config
from openrlhf.learner.models import load_module
from openrlhf.learner.modules import LearnerModule, Readings
from openrlhf.learner.muon import RawClipping, clip_factor, raw_clipping
from openrlhf.learner.optim import build_optimizer
from openrlhf.learner.packing import ModelInputs
from openrlhf.learner.schedule import build_schedule
from openrlhf.learner.spec import LearnerSpec
from openrlhf.learner.tensor_parallel import TensorParallel, check_world


class TrainingEngine:
    """A module with its DeepSpeed engine (None for a whole frozen model)."""

    def __init__(self, spec: LearnerSpec, module: LearnerModule, ds_engine: Any, device: torch.device) -> None:
        self.spec = spec
        self.module = module
        self.ds_engine = ds_engine
        self.device = device
        self.steps = 0
        self.communicates_in_forward = spec.zero3
        self.tensor_parallel = TensorParallel(spec.ds.tensor_parallel_size, device)
        self._raw_clipping: RawClipping | None = None
        if spec.optim is not None and spec.optim.optim == "muon" and spec.ds.zero_stage > 0:
            self._raw_clipping = raw_clipping(ds_engine.optimizer, spec.ds.zero_stage, spec.optim.max_norm)

    def forward(self, inputs: ModelInputs, **options: Any) -> Readings:
        """Call the module (options: its own). Through DeepSpeed's engine where there is one, so that its hooks fire."""
        model = self.module if self.ds_engine is None else self.ds_engine
        return model(inputs, **options)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A frozen model kept in host memory is on the device inside."""
        if not self.spec.offload or self.spec.zero3:
            yield
            return
        self.module.to(self.device)
        try:
            yield
        finally:
            self.module.to("cpu")

    def learning_rate(self) -> float:
        """Rate of the first parameter group for the next step."""
        return float(self.ds_engine.get_lr()[0])

    def set_boundary(self, last: bool) -> None:
        """Say whether the coming forward and backward are the last of this optimiser step."""
        self.ds_engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Tensor) -> None:
        self.ds_engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> tuple[bool, float]:
        """Take the step. Returns whether it was taken and the gradient norm before clipping.

        With a non-finite gradient no rank takes it, and the schedule does not move.
        """
        if self.spec.ds.zero_stage == 0:
            applied, norm = self._step_unpartitioned()
        else:
            raw_norm = None if self._raw_clipping is None else self._raw_clipping.before_step()
            self.ds_engine.step()
            applied = bool(self.ds_engine.was_step_applied())
            norm = float(self.ds_engine.get_global_grad_norm()) if raw_norm is None else raw_norm
        self.steps += int(applied)
        return applied, norm

    def _step_unpartitioned(self) -> tuple[bool, float]:
        """Stage 0: DeepSpeed neither reports a norm nor looks for non-finite gradients. They are equal on all ranks."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = self.tensor_parallel.gradient_norm(self.module.parameters())
        value = float(norm)
        if not torch.isfinite(norm):
            self.ds_engine.zero_grad()
            return False, value
        assert self.spec.optim is not None
        factor = clip_factor(value, self.spec.optim.max_norm)
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
        self.ds_engine.step()
        return True, value


def build_engine(spec: LearnerSpec, device: torch.device) -> TrainingEngine:
    """Load the model and wrap it as its spec needs. Collective.

    Raises:
        ValueError: options that DeepSpeed would ignore or that would give wrong numbers.
    """
    config = deepspeed_config(spec, device_type=device.type)
    module = load_module(spec, config, device)
    if spec.tensor_parallel:
        check_world(spec.ds.tensor_parallel_size, dist.get_world_size() if dist.is_initialized() else 1)
        config = deepspeed_config(spec, device_type=device.type, tp_plan=module.model.config.base_model_tp_plan)
    ds_engine = None
    if spec.trained or spec.zero3 or spec.tensor_parallel:
        ds_engine = _initialize(spec, module, config)
    engine = TrainingEngine(spec, module, ds_engine, device)
    with engine.on_device():
        module.check_head(device)
        if spec.packed:
            module.check_packing(device)
    return engine


def _initialize(spec: LearnerSpec, module: LearnerModule, config: dict[str, Any]) -> Any:
    import deepspeed

    if spec.optim is None:
        engine = deepspeed.initialize(model=module, config=config)[0]
    else:
        engine = _with_optimizer(spec.optim, spec.max_optimizer_steps, module, config)
        check_wrapper(engine.optimizer, spec.ds.zero_stage)
        if spec.optim.optim == "adam" and spec.ds.zero_stage in (1, 2):
            _find_overflow_by_norm(engine.optimizer)
    if spec.tensor_parallel:
        # Compares the arguments of the first call over the group, which must be lists of tensors; ours are not, and
        # `TensorParallel.check_same` compares every batch.
        hook: Any = engine.first_dataloader_check
        hook.remove()
    return engine


def check_wrapper(optimizer: Any, stage: int) -> None:
    """ValueError unless DeepSpeed wrapped the optimiser as clipping, sleep and skipped steps need it on this stage."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    known = {1: DeepSpeedZeroOptimizer, 2: DeepSpeedZeroOptimizer, 3: DeepSpeedZeroOptimizer_Stage3}
    if stage in known and type(optimizer) is not known[stage]:
        raise ValueError(
            f"DeepSpeed made a {type(optimizer).__name__} of the optimiser for `ds.zero_stage` {stage!r}, needed "
            f"{known[stage].__name__}: use `ds.zero_stage` 2, or leave `ds.grad_accum_dtype` out"
        )


def _find_overflow_by_norm(zero_optimizer: Any) -> None:
    """Spare the 16-bit gradients a pass of their own in search of infinities and NaN, 6 % of a small model's step.

    The optimiser measures the norm right afterwards, over the same gradients in float32, and skips a step whose norm is
    not finite: in float32 training that is its only check.
    """
    zero_optimizer.check_overflow = lambda partition_gradients=True: None


def _with_optimizer(optim: OptimConfig, horizon: int, module: LearnerModule, config: dict[str, Any]) -> Any:
    import deepspeed

    return deepspeed.initialize(
        model=module,
        optimizer=build_optimizer(module, optim),
        # DeepSpeed's annotation names torch's old private base class
        lr_scheduler=lambda optimizer: build_schedule(optimizer, optim, horizon),  # pyright: ignore[reportArgumentType]
        config=config,
    )[0]
