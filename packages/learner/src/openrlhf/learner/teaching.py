"""What a teacher tells a student, and how the student is compared with it: a head beside that of log-probs.

A teacher tells its k most probable tokens at every place, or its last hidden state there; with its output layer, which
the student is given once, the state says the whole distribution in H numbers instead of V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.core.batch import Batch
from openrlhf.core.config import Divergence
from openrlhf.core.losses.distill import OutputLayer, Teacher, TeacherStates, TopTokens, token_divergence, top_tokens
from openrlhf.learner.heads import LogitsHead, TokenDistribution, TokenHead
from openrlhf.learner.packing import ModelInputs

NO_STATES = (
    "this teacher's logits are not those of its output layer alone, so its states do not say its distribution: compare "
    "the most probable tokens, `distill.top_k` 64"
)
Told = dict[str, Tensor]
"""What is told of n tokens: `states` [n, H], or `ids`, `logprobs` [n, k] and `rest` [n] (`core.losses.distill`)."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What a teacher is asked, and how its student is compared with it.

    kind, beta: the divergence. top_k: how many tokens are told; 0: states. vocab: the ids that both models have; None:
    all. layer: the teacher's output layer, which states need.
    """

    kind: Divergence
    beta: float = 0.5
    top_k: int = 0
    vocab: int | None = None
    layer: OutputLayer | None = None

    def teacher(self, batch: Batch, places: int, device: torch.device) -> Teacher:
        """The teacher at the trainable tokens of `batch`, in order, and at any further of `places`, where it is empty.

        Those belong to no token; a result there has no gradient.
        """
        rows = batch.teacher or []
        told = {name: torch.cat([row[name] for row in rows]).to(device) for name in (rows[0] if rows else ())}
        if self.top_k:
            ids = _filled(told.get("ids"), (0, self.top_k), places, device).long()
            logprobs = _filled(told.get("logprobs"), (0, ids.shape[1]), places, device)
            return TopTokens(ids=ids, logprobs=logprobs, rest=_filled(told.get("rest"), (0,), places, device))
        assert self.layer is not None, "states need the output layer of their model"
        assert self.layer.weight is not None
        empty = (0, self.layer.weight.shape[1])
        return TeacherStates(states=_filled(told.get("states"), empty, places, device), layer=self.layer)


def _filled(told: Tensor | None, empty: tuple[int, ...], places: int, device: torch.device) -> Tensor:
    """Rows of zeros behind those that are told, up to `places`."""
    told = torch.zeros(empty, device=device) if told is None else told
    return torch.cat([told, told.new_zeros(places - len(told), *told.shape[1:])])


class TeachingHead(nn.Module):
    """Tells what a teacher is asked, or compares a student with one, from the states that its language head reads.

    It has no parameters of its own; those of the output layer have to be gathered for its calls like a `TokenHead`'s.
    """

    def __init__(self, head: TokenHead | LogitsHead) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple torch does not see it

    @property
    def borrowed(self) -> list[nn.Parameter]:
        """The output layer's parameters, where it reads them."""
        (head,) = self._head
        return head.borrowed if isinstance(head, TokenHead) else []

    def layer(self, distribution: TokenDistribution, vocab: int | None) -> OutputLayer:
        """What makes distributions of the states."""
        (head,) = self._head
        weight, bias = head.output if isinstance(head, TokenHead) else (None, None)
        return OutputLayer(
            weight=weight,
            bias=bias,
            temperature=distribution.temperature,
            vocab=vocab,
            suppressed=distribution.suppressed,
        )

    def forward(
        self, states: Tensor, lesson: Lesson, teacher: Teacher | None, distribution: TokenDistribution
    ) -> Tensor | tuple[Tensor, ...]:
        """The divergence [N] from a teacher; without one what this model tells: tensors in the order of `Told`."""
        layer = self.layer(distribution, lesson.vocab)
        if teacher is not None:
            return token_divergence(states, layer, teacher, lesson.kind, lesson.beta)
        if lesson.top_k:
            top = top_tokens(states, layer, lesson.top_k)
            return top.ids.int(), top.logprobs, top.rest
        if layer.weight is None:
            raise ValueError(NO_STATES)
        return (states,)


@torch.no_grad()
def tell(
    forward: Callable[..., Any], micro_batches: Iterable[tuple[Sequence[int], ModelInputs]], lesson: Lesson
) -> list[Told]:
    """What a model tells of every row of micro-batches: (trainable tokens of each row, inputs)."""
    found: list[Told] = []
    for sizes, inputs in micro_batches:
        told: tuple[Tensor, ...] = forward(inputs, lesson=lesson).told
        names = ("states",) if len(told) == 1 else ("ids", "logprobs", "rest")
        rows = [tensor[: sum(sizes)].cpu().split(list(sizes)) for tensor in told]
        found += [{name: own.clone() for name, own in zip(names, row, strict=True)} for row in zip(*rows, strict=True)]
    return found


def with_layer(
    lesson: Lesson, layer: tuple[Tensor, Tensor | None], distribution: TokenDistribution, device: torch.device
) -> Lesson:
    """The lesson with the teacher's output layer (weight, bias), for distributions like the student's own."""
    weight, bias = layer
    own = OutputLayer(
        weight=weight.to(device),
        bias=None if bias is None else bias.to(device),
        temperature=distribution.temperature,
        vocab=lesson.vocab,
        suppressed=distribution.suppressed,
    )
    return replace(lesson, layer=own)
