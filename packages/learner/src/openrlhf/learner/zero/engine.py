"""`ZeroEngine`: a model on DeepSpeed, with ZeRO stage 0 to 3 or tensor parallelism. A whole frozen one does without."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openrlhf.core.batch import Batch
from openrlhf.learner.engine import TrainingEngine
from openrlhf.learner.models import load_module
from openrlhf.learner.modules import LearnerModule, Readings
from openrlhf.learner.packing import ModelInputs
from openrlhf.learner.schedule import build_schedule
from openrlhf.learner.spec import LearnerSpec
from openrlhf.learner.zero import checkpoint, partition, sleep
from openrlhf.learner.zero.config import deepspeed_config
from openrlhf.learner.zero.optim import build_optimizer, clip_factor, raw_clipping
from openrlhf.learner.zero.tensor_parallel import TensorParallel, check_model, check_world, shard_of


class ZeroEngine:
    """A `TrainingEngine`. ds_engine: DeepSpeed's engine around the module; None for a whole frozen model."""

    def __init__(self, spec: LearnerSpec, module: LearnerModule, ds_engine: Any, device: torch.device) -> None:
        self.spec = spec
        self.module = module
        self.ds_engine = ds_engine
        self.waits_in_forward = spec.zero3
        self._device = device
        self.shards = TensorParallel(spec.ds.tensor_parallel_size, device)
        self.data_group = self.shards.data_group
        self._clip_raw: Callable[[], float] | None = None
        if spec.optim is not None and spec.optim.optim == "muon" and spec.ds.zero_stage > 0:
            self._clip_raw = raw_clipping(ds_engine.optimizer, spec.ds.zero_stage, spec.optim.max_norm)

    # -- steps

    @contextmanager
    def on_device(self) -> Iterator[None]:
        if not self.spec.offload or self.spec.zero3:
            yield
            return
        self.module.to(self._device)
        try:
            yield
        finally:
            self.module.to("cpu")

    def check_batch(self, batch: Batch) -> None:
        self.shards.check_same(batch)

    def forward(self, inputs: ModelInputs, **options: Any) -> Readings:
        """Through DeepSpeed's engine where there is one, so that its hooks fire."""
        model = self.module if self.ds_engine is None else self.ds_engine
        return model(inputs, **options)

    def learning_rate(self) -> float:
        return float(self.ds_engine.get_lr()[0])

    def update(self, micro_batches: int, loss: Callable[[int], Tensor]) -> tuple[bool, float]:
        at_once = micro_batches > 1 and self._reduces_at_once
        with self.ds_engine.coalesce_grad_reduction() if at_once else nullcontext():
            for number in range(micro_batches):
                # before the forward pass: stages 2 and 3 ask for it in its hooks
                self.ds_engine.set_gradient_accumulation_boundary(number == micro_batches - 1)
                self.ds_engine.backward(loss(number), scale_wrt_gas=False)
        return self.step()

    @property
    def _reduces_at_once(self) -> bool:
        """Whether gradients are reduced once for all micro-batches, where stage 2 would do it after each of them.

        On a CPU that pass over all gradients costs more than a small micro-batch, and memory is no scarcer than it is
        at stage 1. Only where gradients are added up in the same number format either way, and raw.
        """
        spec = self.spec
        assert spec.optim is not None
        return (
            self._device.type == "cpu"
            and spec.ds.zero_stage == 2
            and spec.ds.param_dtype == "fp32"
            and spec.ds.grad_accum_dtype is None
            and spec.optim.optim == "adam"
            and not (spec.ds.adam_offload or spec.ds.overlap_comm or spec.ds.deepcompile)
        )

    def step(self) -> tuple[bool, float]:
        """The optimiser's part of `update`."""
        if self.spec.ds.zero_stage == 0:
            return self._step_unpartitioned()
        raw_norm = None if self._clip_raw is None else self._clip_raw()
        self.ds_engine.step()
        norm = float(self.ds_engine.get_global_grad_norm()) if raw_norm is None else raw_norm
        return bool(self.ds_engine.was_step_applied()), norm

    def _step_unpartitioned(self) -> tuple[bool, float]:
        """Stage 0: DeepSpeed neither reports a norm nor looks for non-finite gradients. They are equal on all ranks."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = self.shards.gradient_norm(self.module.parameters())
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

    def sleep(self) -> None:
        sleep.sleep(self.ds_engine, self.spec.ds.zero_stage, self._device, host_optimizer=self.spec.ds.adam_offload)

    def wake(self) -> None:
        sleep.wake(self.ds_engine, self.spec.ds.zero_stage, self._device, host_optimizer=self.spec.ds.adam_offload)

    # -- whole tensors and their parts

    def full_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        shard = shard_of(parameter)
        return partition.full_shape(parameter) if shard is None else shard.shape

    def whole(self, groups: Iterable[Sequence[nn.Parameter]], *, wanted: bool) -> Iterator[list[Tensor]]:
        makes_whole = self.shards.any_wants(wanted)
        for group in groups:
            with partition.gathered(group):
                with torch.no_grad():  # not around the yield: who asks for buckets now and then trains between them
                    tensors = [self.shards.whole(p, p.data) for p in group] if makes_whole else []
                yield tensors if wanted else []

    def part(self, parameter: nn.Parameter) -> Tensor | None:
        """The partition of ZeRO-3; else all of it or the shard, on rank 0 and in its tensor-parallel group."""
        if partition.is_partitioned(parameter):
            return partition.own(parameter)
        return parameter.detach() if self.shards.has_rank_0 else None

    def join(self, parameter: nn.Parameter, part: Tensor | None) -> Tensor | None:
        first = not dist.is_initialized() or dist.get_rank() == 0
        if partition.is_partitioned(parameter):
            assert part is not None
            return partition.join(parameter, part, wanted=first)
        if part is None:
            return None
        whole = self.shards.whole(parameter, part.to(parameter.device)).to("cpu", copy=True)
        return whole if first else None

    def cut(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        if partition.is_partitioned(parameter):
            return partition.cut(parameter, whole)
        return self.shards.local(parameter, whole)

    def held(self, parameter: nn.Parameter) -> Tensor:
        return partition.own(parameter) if partition.is_partitioned(parameter) else parameter.detach()

    def put(self, parameter: nn.Parameter, part: Tensor) -> None:
        assert not parameter.requires_grad, "the optimiser of a trained model has weights of its own"
        self.held(parameter).copy_(part)
        if partition.is_partitioned(parameter):
            partition.forget_whole(parameter)

    # -- checkpoints

    def layout(self) -> dict[str, Any]:
        return checkpoint.layout(self.spec)

    def save(self, folder: Path) -> None:
        checkpoint.save(self.ds_engine, self.spec, folder)

    def load(self, folder: Path, saved: Mapping[str, Any]) -> None:
        checkpoint.load(self.ds_engine, self.spec, folder, saved)


def build_engine(spec: LearnerSpec, device: torch.device) -> TrainingEngine:
    """A `BuildEngine`: the model of `spec` on DeepSpeed."""
    plan = None
    if spec.tensor_parallel:
        from transformers import AutoConfig

        model_config = AutoConfig.from_pretrained(spec.model_path)
        check_model(spec, model_config)
        check_world(spec.ds.tensor_parallel_size, dist.get_world_size() if dist.is_initialized() else 1)
        plan = model_config.base_model_tp_plan
    config = deepspeed_config(spec, device_type=device.type, tp_plan=plan)
    wrapped = spec.trained or spec.zero3 or spec.tensor_parallel
    if wrapped:
        start_deepspeed()
    module = load_module(spec, device, loading=partition.loading(config) if spec.zero3 else None)
    if spec.zero3:
        partition.gather_with_readers(module)
    return ZeroEngine(spec, module, _initialize(spec, module, config) if wrapped else None, device)


def start_deepspeed() -> None:
    """Import DeepSpeed and let it see the process group. Twice is harmless."""
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed 0.19.8 builds this op with a C++ compiler (minutes) whenever it starts on a CPU; only its inference
    # all-reduce uses it. Can go when TorchBackend builds it on first use.
    ops: dict[str, bool] = deepspeed.ops.__compatible_ops__  # pyright: ignore[reportAttributeAccessIssue]
    ops["deepspeed_shm_comm"] = False
    if dist.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def _initialize(spec: LearnerSpec, module: LearnerModule, config: dict[str, Any]) -> Any:
    import deepspeed

    if spec.optim is None:
        engine = deepspeed.initialize(model=module, config=config)[0]
    else:
        optim, horizon = spec.optim, spec.max_optimizer_steps
        engine = deepspeed.initialize(
            model=module,
            optimizer=build_optimizer(module, optim),
            # DeepSpeed's annotation names torch's old private base class
            lr_scheduler=lambda it: build_schedule(it, optim, horizon),  # pyright: ignore[reportArgumentType]
            config=config,
        )[0]
        check_wrapper(engine.optimizer, spec.ds.zero_stage)
        if optim.optim == "adam" and spec.ds.zero_stage in (1, 2):
            _find_overflow_by_norm(engine.optimizer)
    if spec.tensor_parallel:
        # Compares the arguments of the first call over the group, which must be lists of tensors; ours are not, and
        # `TensorParallel.check_same` compares every batch.
        hook: Any = engine.first_dataloader_check
        hook.remove()
    return engine


def known_wrappers() -> dict[int, tuple[type, ...]]:
    """ZeRO stage -> the classes around an optimiser whose insides clipping, sleep and skipped steps know.

    Stage 0 leaves the optimiser as it is in float32; the wrapper is that of 16 bit.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    return {
        0: (torch.optim.AdamW, MuonWithAuxAdam, FP16_UnfusedOptimizer),
        1: (DeepSpeedZeroOptimizer,),
        2: (DeepSpeedZeroOptimizer,),
        3: (DeepSpeedZeroOptimizer_Stage3,),
    }


def check_wrapper(optimizer: Any, stage: int) -> None:
    """ValueError unless DeepSpeed made one of the known classes of the optimiser."""
    known = known_wrappers()
    if type(optimizer) not in known[stage]:
        others = dict.fromkeys(kind.__name__ for kinds in known.values() for kind in kinds)
        raise ValueError(
            f"DeepSpeed made a {type(optimizer).__name__} of the optimiser for `ds.zero_stage` {stage!r}, needed "
            f"{' or '.join(kind.__name__ for kind in known[stage])} (known are {', '.join(others)}): "
            "use `ds.zero_stage` 2, or leave `ds.grad_accum_dtype` out"
        )


def _find_overflow_by_norm(zero_optimizer: Any) -> None:
    """Spare the 16-bit gradients a pass of their own in search of infinities and NaN, 6 % of a small model's step.

    The optimiser measures the norm right afterwards, over the same gradients in float32, and skips a step whose norm is
    not finite: in float32 training that is its only check.
    """
    zero_optimizer.check_overflow = lambda partition_gradients=True: None
