"""From a spec to DeepSpeed's dictionary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from openrlhf.learner.config import AdamConfig, DsConfig, MuonConfig, OptimConfig
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.zero.config import deepspeed_config

DS = DsConfig(param_dtype="fp32", attn_implementation="sdpa")


def spec(optim: OptimConfig | None = OptimConfig(), **changes: Any) -> LearnerSpec:  # noqa: B008 (frozen)
    role_changes = {k: changes.pop(k) for k in ("offload",) if k in changes}
    return LearnerSpec(role=Role.POLICY, model_path="m", ds=replace(DS, **changes), optim=optim, **role_changes)


def config(*args: Any, device_type: str = "cpu", **changes: Any) -> dict[str, Any]:
    return deepspeed_config(spec(*args, **changes), device_type=device_type)


def test_whole_dictionary_of_the_default_on_a_cpu() -> None:
    assert config() == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": False,
            "contiguous_gradients": False,
            "reduce_bucket_size": 2**22,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_param_dtype(dtype: str) -> None:
    assert config(param_dtype=dtype)[dtype] == {"enabled": True}


def test_stage_3_frozen_and_offloaded() -> None:
    zero = config(None, zero_stage=3, offload=True)["zero_optimization"]
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    assert config(None, zero_stage=3)["gradient_clipping"] == 0.0


def test_pass_through_options() -> None:
    result = config(
        device_type="cuda",
        zero_stage=3,
        zpg=4,
        overlap_comm=True,
        deepcompile=True,
        grad_accum_dtype="fp32",
        adam_offload=True,
        use_universal_ckpt=True,
    )
    zero = result["zero_optimization"]
    assert zero["zero_hpz_partition_size"] == 4
    assert zero["overlap_comm"] is True
    assert zero["contiguous_gradients"] is True
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert result["data_types"] == {"grad_accum_dtype": "fp32"}
    assert result["compile"] == {"deepcompile": True}
    assert result["checkpoint"] == {"load_universal": True}


def test_tensor_parallel_follows_the_plan_and_keeps_the_head_whole() -> None:
    made = deepspeed_config(
        spec(tensor_parallel_size=2), device_type="cpu", tp_plan={"layers.*.mlp.down_proj": "rowwise"}
    )
    assert made["tensor_parallel"] == {
        "autotp_size": 2,
        "vocab_parallel_lm_head": False,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [{"patterns": [r"(.*\.)?layers\.[0-9]+\.mlp\.down_proj\.weight$"], "partition_type": "row"}],
        },
    }


def test_deepcompile_is_only_for_trained_models() -> None:
    assert "compile" not in config(None, deepcompile=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_never_clips_muon_nor_stage_0(stage: int) -> None:
    # B122: on stages 1 to 3 it would shrink the orthogonalised update
    muon = config(OptimConfig(optim="muon"), zero_stage=stage)
    assert muon["gradient_clipping"] == 0.0
    assert muon["zero_optimization"].get("reduce_scatter", True) is (stage != 3)
    assert config(OptimConfig(max_norm=0.5), zero_stage=stage)["gradient_clipping"] == (0.5 if stage else 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"param_dtype": "auto"}, "`ds.param_dtype`"),
        ({"attn_implementation": "auto"}, "`ds.attn_implementation`"),
        ({"zero_stage": 4}, "`ds.zero_stage`"),
        ({"load_in_4bit": True}, "`ds.load_in_4bit`"),
    ],
)
def test_spec_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(**changes)


def test_spec_refuses_temperature_zero() -> None:
    with pytest.raises(ValueError, match=r"`temperature`"):
        LearnerSpec(role=Role.POLICY, model_path="m", ds=DS, temperature=0.0)


def test_optimizer_defaults_are_those_of_the_command_line() -> None:
    assert OptimConfig() == OptimConfig(
        optim="adam",
        muon=MuonConfig(lr=0.02, momentum=0.95, ns_steps=5, nesterov=True),
        adam=AdamConfig(lr=1e-6, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
        lr_scheduler="cosine_with_min_lr",
        lr_warmup_ratio=0.03,
        min_lr_ratio=0.1,
        max_norm=1.0,
    )
