"""Number formats on real engines: the optimiser's wrapper, and scalar heads in bf16."""

from __future__ import annotations

import pytest
import torch

from openrlhf.learner.config import DsConfig, OptimConfig
from openrlhf.learner.heads import ScalarHead
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.zero.engine import check_wrapper
from support.learner_ranks import RankResults, result

RANK_CASES = {1: ["wrapper", "bf16_critic"]}


@pytest.mark.ranks
@pytest.mark.xdist_group("ranks")
@pytest.mark.timeout(600)
def test_an_unknown_wrapper_ends_the_start(ranks: RankResults) -> None:
    (said,) = result(ranks, "wrapper", 1)
    assert "made a BF16_Optimizer" in said
    assert "needed DeepSpeedZeroOptimizer (known are AdamW, MuonWithAuxAdam, FP16_UnfusedOptimizer" in said
    assert "`ds.zero_stage` 2" in said


# DeepSpeed 0.19.8 compiles helpers with torch.jit when it is imported
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("stage", range(4))
def test_each_stage_has_wrappers_of_its_own(stage: int) -> None:
    own = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    if stage == 0:
        check_wrapper(own, stage)
        own = torch.optim.SGD(own.param_groups[0]["params"])
    with pytest.raises(ValueError, match=f"made a {type(own).__name__} of the optimiser for `ds.zero_stage` {stage}"):
        check_wrapper(own, stage)


@pytest.mark.parametrize(
    ("stage", "dtype", "offload", "refused"),
    [(1, "bf16", False, True), (1, "bf16", True, False), (2, "bf16", False, False), (1, "fp32", False, False)],
)
def test_refused_by_name(stage: int, dtype: str, offload: bool, refused: bool) -> None:
    def spec(optim: OptimConfig | None) -> LearnerSpec:
        ds = DsConfig(zero_stage=stage, attn_implementation="sdpa", grad_accum_dtype="fp32", adam_offload=offload)
        ds = DsConfig(**{**vars(ds), "param_dtype": dtype})
        return LearnerSpec(role=Role.POLICY, model_path="m", ds=ds, optim=optim)

    spec(None)  # a frozen model accumulates nothing
    if refused:
        with pytest.raises(ValueError, match=r"`ds.grad_accum_dtype` 'fp32' .*`ds.zero_stage` 1: .*`ds.zero_stage` 2"):
            spec(OptimConfig())
    else:
        spec(OptimConfig())


def test_a_head_computes_in_float32() -> None:
    torch.manual_seed(0)
    head = ScalarHead(64, 1, bias=True).bfloat16()
    hidden = torch.randn(10, 64).bfloat16().requires_grad_()
    value = head(hidden)
    weight, bias = head.weight.detach().float(), head.bias.detach().float()
    assert torch.equal(value, torch.nn.functional.linear(hidden.detach().float(), weight, bias))
    value.sum().backward()
    assert head.weight.grad is not None
    assert head.weight.grad.dtype is torch.bfloat16
    assert torch.equal(head.weight.grad, hidden.detach().float().sum(0, keepdim=True).bfloat16())
    plain = torch.nn.Linear(64, 1)
    same = ScalarHead(64, 1)
    same.load_state_dict(plain.state_dict())
    x = torch.randn(5, 64)
    assert torch.equal(same(x), plain(x))  # float32 as before


@pytest.mark.ranks
@pytest.mark.xdist_group("ranks")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", range(4))
def test_values_of_a_bf16_critic_are_not_rounded_to_bf16(ranks: RankResults, stage: int) -> None:
    (found,) = result(ranks, "bf16_critic", 1)
    got = found[stage]
    for name in ("before", "after"):
        values = got[name][got[name] != 0]
        assert values.dtype is torch.float32
        assert float((values.bfloat16().float() != values).float().mean()) > 0.8
    assert got["metrics"]["skipped_steps"] == (0.0, 1.0)
    assert not torch.equal(got["before"], got["after"])
    assert torch.equal(got["after"], got["resumed"])
    assert (got["head"].dtype, tuple(got["head"].shape)) == (torch.bfloat16, (1, 64))
