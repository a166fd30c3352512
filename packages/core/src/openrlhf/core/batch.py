"""`Batch`: the tensors of some samples, padded on the right.

Every per-token tensor is [B, T] and index t speaks of token t: logprobs[b, t] is the log-probability of
tokens[b, t] given tokens[b, :t]. Index 0 has no prefix and is never trainable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from openrlhf.core.truncation import KeptTokens


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples as tensors.

    tokens [B, T] int64, padded with any id where attention_mask is False.
    attention_mask [B, T] bool: True on real tokens, a prefix of each row.
    action_mask [B, T] bool: True where the policy sampled the token.
    index [B] int64: the sample's number in the rollout batch (stable under reordering); -1 for a padding row.
    rollout_logprobs, old_logprobs, ref_logprobs, values, advantages, returns [B, T] float32, 0 where not action_mask.
    versions [B, T] int32: weight version per sampled token, -1 elsewhere.
    rewards [B] float32: the scalar shaped reward (after baseline), to be placed on the last action token.
    turn_rewards [B, T] float32: in the place of rewards where turns are credited one by one, each at the last trainable
    token of its turn.
    margins [B] float32: by how much a chosen answer should win over its rejected one (the same on both rows of a pair).
    kept: per row what truncation keeps at its action tokens, in order; None: log-probs are over all tokens, or over
    what the model that is asked keeps itself.
    temperatures [B, T] float32: at which a token was sampled, where it was not the run's temperature, else 0.
    teacher: per row what a teacher says of its trainable tokens in order, tensors [n, ...] by name.
    extra: model inputs of other modalities (pixel_values, ...): a list of B tensors each, None for a row without.
    """

    tokens: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    index: Tensor
    rollout_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    versions: Tensor | None = None
    rewards: Tensor | None = None
    turn_rewards: Tensor | None = None
    temperatures: Tensor | None = None
    margins: Tensor | None = None
    kept: list[KeptTokens] | None = None
    teacher: list[dict[str, Tensor]] | None = None
    extra: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        shape = self.tokens.shape
        if self.tokens.ndim != 2:
            raise ValueError(f"Batch.tokens must be [B, T], got {tuple(shape)}")
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, Tensor) or f.name == "tokens":
                continue
            want = shape[:1] if f.name in ("index", "rewards", "margins") else shape
            if value.shape != want:
                raise ValueError(f"Batch.{f.name} must have shape {tuple(want)}, got {tuple(value.shape)}")
        if self.kept is not None and len(self.kept) != shape[0]:
            raise ValueError(f"Batch.kept must have {shape[0]} rows, got {len(self.kept)}")

    @property
    def size(self) -> int:
        return self.tokens.shape[0]

    @property
    def lengths(self) -> Tensor:
        """Real tokens per row, [B] int64."""
        return self.attention_mask.sum(-1)

    def with_(self, **changes: Any) -> Batch:
        """A copy with these fields replaced."""
        return replace(self, **changes)

    def select(self, rows: Sequence[int] | Tensor) -> Batch:
        """The given rows, cut to the longest of them."""
        idx = torch.as_tensor(rows, dtype=torch.long)
        width = int(self.lengths[idx].max()) if len(idx) else 0
        changes: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                changes[f.name] = value[idx] if value.ndim == 1 else value[idx, :width]
            elif isinstance(value, list):
                changes[f.name] = [value[i] for i in idx.tolist()]
            elif f.name == "extra" and value is not None:
                changes[f.name] = {k: [v[i] for i in idx.tolist()] for k, v in value.items()}
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> Batch:
        return replace(
            self, **{f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        )

    def first_non_finite(self, rows: Sequence[int]) -> int:
        """Number (`index`) of the first of these rows that holds a non-finite value; of the first row if none does."""
        inputs = (self.advantages, self.returns, self.old_logprobs, self.ref_logprobs, self.values)
        for row in rows:
            if any(f is not None and not bool(torch.isfinite(f[row]).all()) for f in inputs):
                return int(self.index[row])
        return int(self.index[rows[0]])


def pad_rows(
    rows: Sequence[Sequence[float] | Sequence[int]], *, width: int, value: float, dtype: torch.dtype
) -> Tensor:
    """Stack ragged rows to [B, width], padded on the right with `value`."""
    out = torch.full((len(rows), width), value, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return out
