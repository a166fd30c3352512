"""The trainer's kept set is that of vLLM's own sampler, on the same logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

core = pytest.importorskip("openrlhf.core.truncation")  # the engine side alone has no trainer
pytest.importorskip("vllm")
from openrlhf.core.config import Truncation  # noqa: E402 (behind what may be missing)


def processed_logprobs(logits: torch.Tensor, temperature: float, cut: Truncation) -> torch.Tensor:
    """Log-probs of every token as vLLM's sampler reports them with `processed_logprobs`: -inf for what it drops."""
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    from vllm.v1.sample.sampler import Sampler

    n, vocab = logits.shape
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=n))
    processor = MinPLogitsProcessor(config, torch.device("cpu"), False)
    params: Any = SimpleNamespace(min_p=cut.min_p)
    added = [(row, params, None, []) for row in range(n)]
    update: Any = SimpleNamespace(added=added, removed=[], moved=[], batch_size=n)
    processor.update_state(update)
    z = Sampler.apply_temperature(logits.to(torch.float32).clone(), torch.full((n,), temperature), all_random=True)
    z = processor.apply(z)
    k = torch.full((n,), min(cut.top_k, vocab), dtype=torch.int32) if cut.top_k > 0 else None
    p = torch.full((n,), cut.top_p) if cut.top_p < 1 else None
    return Sampler.compute_logprobs(apply_top_k_top_p(z, k, p))


@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 300),
    spread=st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0]),
    grid=st.sampled_from([None, 0.5, 2.0]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([-1, 1, 5, 50, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=200, deadline=None)
def test_the_kept_set_is_vllms_own(
    seed: int,
    vocab: int,
    spread: float,
    grid: float | None,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    dtype: torch.dtype,
) -> None:
    """Bit for bit, equal logits included (grid: logits in steps of so much; bf16 has many equal ones anyway)."""
    logits = spread * torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed))
    if grid is not None:
        logits = (logits / grid).round() * grid
    logits = logits.to(dtype)
    cut = Truncation(top_p=top_p, top_k=top_k, min_p=min_p)
    theirs = processed_logprobs(logits, temperature, cut)
    assert torch.equal(core.kept_mask(logits.float() / temperature, cut), theirs > float("-inf"))

    from openrlhf.core.logprobs import kept_from_logits, logprobs_from_logits

    sampled = theirs.argmax(-1)
    kept, outside = kept_from_logits(logits, sampled, cut, temperature)
    assert not outside.any()
    ours = logprobs_from_logits(logits, sampled, temperature, kept)
    assert torch.allclose(ours, theirs.gather(1, sampled[:, None])[:, 0], rtol=0, atol=1e-5)
