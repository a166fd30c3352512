"""An independent judge: loads an exported model with transformers, samples once per question, counts right answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from model import render_prompt
from task import Example
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

MAX_NEW_TOKENS = 10


def decode_answer(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text before the end mark; without one, all of it (special tokens included, so it can't match by chance)."""
    end = tokenizer.eos_token_id
    kept = list(ids[: ids.index(end)]) if end in ids else list(ids)
    return str(tokenizer.decode(kept))


@torch.no_grad()
def sample_answers(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, questions: Sequence[str], *, temperature: float = 1.0
) -> list[str]:
    """One answer per question, sampled from the untruncated distribution; temperature 0 is greedy."""
    prompts = [render_prompt(tokenizer, q) for q in questions]
    ids = tokenizer(prompts, add_special_tokens=False, return_tensors="pt", padding=True, padding_side="left")
    sampled = temperature > 0
    options = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if sampled else {}
    out = model.generate(  # pyright: ignore[reportCallIssue]
        **ids, do_sample=sampled, max_new_tokens=MAX_NEW_TOKENS, pad_token_id=tokenizer.pad_token_id, **options
    )
    start = ids["input_ids"].shape[1]
    return [decode_answer(tokenizer, row[start:].tolist()) for row in out]


def accuracy(model_folder: Path, examples: Sequence[Example], *, temperature: float = 1.0, seed: int = 0) -> float:
    """The share of questions answered right by the model in `model_folder`, one sample each."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    answers = sample_answers(model, tokenizer, [e.question for e in examples], temperature=temperature)
    return sum(a == e.answer for a, e in zip(answers, examples, strict=True)) / len(examples)
