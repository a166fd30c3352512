"""The sync check in bf16 without an engine: a learner against transformers' eager kernels, one row at a time.

What rounding does to a real engine, and many more faults: tests/transports/test_sync_check_proof.py.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from openrlhf.core.config import AlgoConfig, PolicyLossConfig
from openrlhf.launcher.ranks.config import RankConfig
from openrlhf.launcher.ranks.roles import PolicyRank
from openrlhf.learner.config import DsConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.rollout.sync_check import mean_difference, measured_tolerance
from support.learner_models import tiny_config
from support.sync_faults import FAULTS, STEPS_MISSED, share_of

BITS = 7
RULES = RankConfig(
    algo=AlgoConfig(), policy_loss=PolicyLossConfig(), value_clip=0.2, max_len=64, agg_constant=1.0, pad_token_id=0
)
FAMILIES = {"qwen3": True, "llama": False, "qwen3_moe": False}
"""Architecture -> whether its head is the embedding."""


class Sides:
    """A learner, an "engine" that loads what is pushed, and text that the engine has written."""

    def __init__(self, folder: Path, family: str, dtype: str) -> None:
        torch.manual_seed(0)
        config = tiny_config(family, tie=FAMILIES[family])
        model: Any = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # distributions far from uniform
            for name, parameter in model.named_parameters():
                parameter.add_(torch.randn_like(parameter) * (0.02 if "norm" in name else 0.15))
        model.save_pretrained(folder)
        ds = DsConfig(param_dtype=dtype, attn_implementation="sdpa")  # type: ignore[arg-type]
        # samples may be drawn otherwise; the check is about the whole distribution at temperature 1
        sampling: dict[str, Any] = {"temperature": 0.5, "suppressed_token_ids": (9,)}
        spec = LearnerSpec(role=Role.REFERENCE, model_path=str(folder), ds=ds, **sampling)
        self.trainer = PolicyRank(Learner(spec), RULES, resolve=lambda what, handles: list(handles))
        self.engine: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32, attn_implementation="eager"
        )
        self.earlier = [self.weights()]
        self.rows = [self._write([3 + i, 40 + 7 * i, 100 - i]) for i in range(8)]

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.trainer.learner.module.model.named_parameters()}

    def step(self, size: float = 2e-3) -> None:
        """Weights move as by an optimiser step of a small model."""
        with torch.no_grad():
            for parameter in self.trainer.learner.module.model.parameters():
                parameter.add_(torch.randn_like(parameter) * size)
        self.earlier.insert(0, self.weights())

    def push(self, weights: dict[str, Tensor]) -> None:
        self.engine.load_state_dict(weights, strict=False)

    @torch.no_grad()
    def _write(self, row: list[int]) -> list[int]:
        for _ in range(24):
            row = [*row, int(self.engine(torch.tensor([row])).logits[0, -1].argmax())]
        return row

    @torch.no_grad()
    def engine_scores(self) -> list[list[float]]:
        found = []
        for row in self.rows:
            ids = torch.tensor(row)
            logprobs = self.engine(ids[None]).logits[0, :-1].float().log_softmax(-1)
            found.append([0.0, *logprobs.gather(-1, ids[1:, None])[:, 0].tolist()])
        return found

    def check(self) -> float:
        """The difference after a push in units of what a run allows: above 1 it stops."""
        own = self.trainer.check_logprobs(self.rows)
        rounded = self.trainer.check_logprobs(self.rows, bits=BITS)
        return share_of(measured_tolerance(own, rounded, bits=BITS), own, self.engine_scores())


@pytest.mark.parametrize("family", FAMILIES)
def test_faults_exceed_the_measured_tolerance_and_rounding_does_not(tmp_path: Path, family: str) -> None:
    sides, rng = Sides(tmp_path, family, "bf16"), random.Random(0)
    for _ in range(STEPS_MISSED):
        sides.step()
        sides.push(sides.weights())
        assert 0 < sides.check() < 1
    for name, fault in FAULTS.items():
        spoiled = sides.weights()
        what = fault(spoiled, sides.earlier[1:], rng)
        sides.push(spoiled)
        assert sides.check() > 1, f"{name}: {what}"


def test_in_fp32_both_sides_agree_on_rows_of_any_length_in_one_forward_pass(tmp_path: Path) -> None:
    sides = Sides(tmp_path, "llama", "fp32")
    sides.rows = [row[: 27 - 3 * i] for i, row in enumerate(sides.rows)]
    learner = sides.trainer.learner
    passes: list[object] = []
    handle = learner.module.register_forward_pre_hook(lambda *args: passes.append(args))
    own = sides.trainer.check_logprobs(sides.rows)
    handle.remove()
    assert len(passes) == 1
    assert [len(scores) for scores in own] == [27, 24, 21, 18, 15, 12, 9, 6]
    assert {scores[0] for scores in own} == {0.0}
    assert mean_difference(own, sides.engine_scores()) < 1e-5
    assert mean_difference(own, sides.trainer.check_logprobs(sides.rows, bits=BITS)) > 1e-3


def test_a_tied_head_that_stayed_behind_is_found(tmp_path: Path) -> None:
    """As engines on CPU do it that keep a packed copy of the head."""
    sides = Sides(tmp_path, "qwen3", "bf16")
    for _ in range(STEPS_MISSED):
        sides.step(4e-3)
    sides.push(sides.weights())
    assert sides.check() < 1
    sides.engine.lm_head = torch.nn.Linear(64, 128, bias=False, dtype=torch.bfloat16)
    sides.engine.lm_head.weight.data = sides.earlier[STEPS_MISSED]["model.embed_tokens.weight"]
    assert sides.check() > 1
