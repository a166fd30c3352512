"""From a `LearnerSpec` to DeepSpeed's configuration dictionary: one pure function.

The optimiser and the schedule are not in it: we build them (`optim.py`), so that no DeepSpeed op needs a compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrlhf.learner.spec import LearnerSpec
from openrlhf.learner.zero.tensor_parallel import layer_specs

NEVER = 10**9
"""DeepSpeed's own progress lines are never wanted."""

CPU_BUCKET = 2**22
"""Gradient elements that are reduced together on a CPU: 16 MiB stay near the caches, and pages are reused. DeepSpeed's
500 million copy the whole gradient through fresh memory."""


def deepspeed_config(
    spec: LearnerSpec, *, device_type: str, tp_plan: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize`. tp_plan: transformers' tensor-parallel plan of the architecture.

    The batch sizes in it are formal: `Learner.update` sets the accumulation boundary itself and scales the loss.
    Clipping is DeepSpeed's only where it acts on the raw gradient: with Adam on stages 1 to 3. Muon's update is
    orthogonalised before DeepSpeed would clip, and stage 0 reports no gradient norm.
    """
    ds = spec.ds
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": NEVER,
        "gradient_clipping": clipping_by_deepspeed(spec),
        "zero_optimization": _zero_section(spec, device_type),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if ds.param_dtype in ("bf16", "fp16"):
        config[ds.param_dtype] = {"enabled": True}
    if ds.grad_accum_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": ds.grad_accum_dtype}
    if ds.deepcompile and spec.trained:
        config["compile"] = {"deepcompile": True}
    if ds.tensor_parallel_size > 1:
        config["tensor_parallel"] = {
            "autotp_size": ds.tensor_parallel_size,
            "vocab_parallel_lm_head": False,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": layer_specs(tp_plan or {}, trained=spec.trained),
            },
        }
    if ds.use_universal_ckpt and ds.zero_stage > 0:
        config["checkpoint"] = {"load_universal": True}
    return config


def clipping_by_deepspeed(spec: LearnerSpec) -> float:
    """The gradient norm that DeepSpeed itself clips to; 0 where we do it or nobody does."""
    if spec.optim is None or spec.optim.optim == "muon" or spec.ds.zero_stage == 0:
        return 0.0
    return spec.optim.max_norm


def _zero_section(spec: LearnerSpec, device_type: str) -> dict[str, Any]:
    ds = spec.ds
    zero: dict[str, Any] = {
        "stage": ds.zero_stage if spec.trained or spec.zero3 else 0,
        "overlap_comm": ds.overlap_comm,
        # A contiguous buffer only pays off together with overlapping, and costs a bucket of memory.
        "contiguous_gradients": ds.overlap_comm,
    }
    pin = device_type != "cpu"
    if not pin:
        zero["reduce_bucket_size"] = CPU_BUCKET
    if ds.zero_stage > 0 and spec.trained and ds.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pin}
    if ds.zero_stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        if ds.zpg > 1:
            zero["zero_hpz_partition_size"] = ds.zpg
        if spec.offload:
            zero["offload_param"] = {"device": "cpu", "pin_memory": pin}
        if spec.optim is not None and spec.optim.optim == "muon":
            zero["reduce_scatter"] = False  # Muon needs whole gradients; DeepSpeed refuses the combination
    return zero
