"""Learning from a teacher's distributions on real ranks, however the samples and both models are laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openrlhf.learner.heads import LogitsHead, TokenDistribution
from openrlhf.learner.teaching import Lesson, TeachingHead
from support.learner_models import VOCAB, make_batch
from support.learner_ranks import RankResults, result
from support.learner_teaching_cases import LAYOUTS, LESSONS, OBJECTIVE

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]

RANK_CASES = {2: ["teaching"], 1: ["teaching", "own_teacher"]}


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def divergence(name: str, log_q: Tensor, log_p: Tensor) -> Tensor:
    """From the definitions, for the lessons of the cases; all [N, V]."""
    if name == "reverse":
        return kl(log_q, log_p)
    if name == "jsd-all":
        log_m = (0.3 * log_p.exp() + 0.7 * log_q.exp()).log()
        return 0.3 * kl(log_p, log_m) + 0.7 * kl(log_q, log_m)
    ids = log_p.topk(5, -1).indices
    tops = [x.gather(-1, ids) for x in (log_p, log_q)]
    p, q = (torch.cat([top, torch.log1p(-top.exp().sum(-1, keepdim=True))], -1) for top in tops)
    return kl(p, q)


@pytest.fixture(scope="module")
def reference(rank_folder: Path) -> dict[str, dict[str, Any]]:
    """Per lesson: the terms and the gradients by plain PyTorch, a sample at a time, from whole logits."""
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    student, teacher = (load(rank_folder / name, dtype=torch.float32) for name in ("qwen3", "teacher"))
    batch, found = make_batch(), {}
    tokens = float(batch.action_mask.sum())
    for name in LESSONS:
        student.zero_grad()
        nll, distance = torch.zeros(()), torch.zeros(())
        for row in range(batch.size):
            length = int(batch.lengths[row])
            ids, mask = batch.tokens[row : row + 1, :length], batch.action_mask[row, 1:length]
            log_q = student(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            with torch.no_grad():
                log_p = teacher(input_ids=ids, use_cache=False).logits[0, :-1, :VOCAB].log_softmax(-1)
            nll = nll - (log_q.gather(-1, ids[0, 1:, None])[:, 0] * mask).sum()
            distance = distance + (divergence(name, log_q, log_p) * mask).sum()
        (OBJECTIVE.nll_coef * nll / tokens + 0.7 * distance / tokens).backward()
        gradients = {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}
        found[name] = {
            "gpt_loss": nll.item() / tokens,
            "distill_loss": distance.item() / tokens,
            "gradients": gradients,
        }
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LESSONS)
def test_a_step_is_the_same_however_it_is_laid_out(
    ranks: RankResults, reference: dict[str, dict[str, Any]], name: str, layout: str, world: int
) -> None:
    want = reference[name]
    for outcome in (of_rank[layout, name] for of_rank in result(ranks, "teaching", world)):
        metrics = {key: total / count for key, (total, count) in outcome["metrics"].items()}
        for key in ("gpt_loss", "distill_loss"):
            assert metrics[key] == pytest.approx(want[key], rel=1e-6, abs=1e-6), key
        assert outcome["gradients"].keys() == want["gradients"].keys()
        assert (
            max(float((outcome["gradients"][n] - want["gradients"][n]).abs().max()) for n in want["gradients"]) < 1e-6
        )


def test_a_model_learns_nothing_from_itself(ranks: RankResults) -> None:
    (norms,) = result(ranks, "own_teacher", 1)
    assert set(norms) == set(LESSONS)
    assert max(norms.values()) <= 1e-7


def test_states_of_a_teacher_with_logits_of_its_own_say_nothing() -> None:
    head = TeachingHead(LogitsHead())
    with pytest.raises(ValueError, match=r"compare the most probable tokens, `distill\.top_k` 64"):
        head(torch.zeros(2, 3), Lesson(kind="forward"), None, TokenDistribution())
    assert head.borrowed == []
    assert not list(nn.Module.parameters(head))
