"""`RewardScorer`: texts -> rewards with a reward model, the same numbers as the learner's reward role gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from openrlhf.core.batch import Batch, pad_rows
from openrlhf.learner.config import DsConfig
from openrlhf.learner.models import load_module, reward_statistics
from openrlhf.learner.packing import build_last_token_inputs
from openrlhf.learner.setup import training_device
from openrlhf.learner.spec import LearnerSpec, Role


class RewardScorer:
    """A Hugging Face model with a scalar head, read at the last token of each text.

    ds: `param_dtype` and `attn_implementation` resolved. max_len: most tokens of a text. batch_size: texts per forward
    pass, None for all at once. normalize: (reward - mean) / std with the mean and std of the model's configuration.
    Raises ValueError for a model without a scalar head, and for `normalize` with a model without mean and std.
    """

    def __init__(
        self,
        model_path: str,
        ds: DsConfig,
        *,
        max_len: int,
        batch_size: int | None = None,
        normalize: bool = False,
    ) -> None:
        from transformers import AutoTokenizer

        self.max_len = max_len
        self._batch_size = batch_size
        self._packed = ds.packing_samples
        self._device = training_device()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        self._module = load_module(LearnerSpec(role=Role.REWARD, model_path=model_path, ds=ds), self._device)
        self._mean, self._std = _statistics(self._module, model_path) if normalize else (0.0, 1.0)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text; the text holds its special tokens already, none are added."""
        return self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """One reward per row of token ids, [B] -> [B]; rows of similar length share a forward pass."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        step = self._batch_size or len(rows)
        rewards = [0.0] * len(rows)
        for start in range(0, len(rows), step):
            part = order[start : start + step]
            for i, value in zip(part, self._forward([rows[i] for i in part]), strict=True):
                rewards[i] = (value - self._mean) / self._std
        return rewards

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        width = max(map(len, rows))
        mask = pad_rows([[1] * len(r) for r in rows], width=width, value=0, dtype=torch.bool)
        batch = Batch(
            tokens=pad_rows(rows, width=width, value=0, dtype=torch.long),
            attention_mask=mask,
            action_mask=torch.zeros_like(mask),
            index=torch.arange(len(rows)),
        )
        inputs = build_last_token_inputs(batch.to(self._device), packed=self._packed)
        return self._module(inputs).primary.cpu().tolist()


def _statistics(module: Any, model_path: str) -> tuple[float, float]:
    found = reward_statistics(module)
    if found is None or not found[1] > 0:
        raise ValueError(
            f"--reward.normalize_enable: the configuration of {model_path!r} has no mean and std; drop the flag, or "
            "use a reward model trained with them"
        )
    return found
