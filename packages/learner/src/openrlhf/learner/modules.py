"""`LearnerModule`: a Hugging Face model and the head of its role, called the one right way.

It is the module DeepSpeed wraps, so a call goes through DeepSpeed's hooks. The head is only applied at the positions
asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrlhf.core.losses.distill import Teacher
from openrlhf.core.truncation import KeptTokens
from openrlhf.learner.heads import (
    Head,
    LogitsHead,
    ScalarHead,
    TokenDistribution,
    TokenHead,
    at_temperatures,
    check_plain_head,
)
from openrlhf.learner.layers import num_experts
from openrlhf.learner.packing import ModelInputs, cut_over
from openrlhf.learner.sequence_parallel.attention import SequenceAttention, SequenceParallel
from openrlhf.learner.sequence_parallel.slicing import Shares
from openrlhf.learner.shared_attention import SharedAttention
from openrlhf.learner.teaching import NO_STATES, Lesson, TeachingHead

LEAK = 1e-3
"""Share of the largest hidden state by which a packed neighbour may move one; without a leak nothing moves."""


class Readings(NamedTuple):
    """What a forward pass reads, all [N] float32 (a tuple, so that DeepSpeed's backward hooks find the tensors).

    primary: log-probs of the targets (policy, reference) or values (critic, reward).
    entropy: only for language models and on request. aux_loss: scalar, only with a balance loss.
    kept, outside: see `heads.TokenReadings`.
    divergence: from a teacher, where one is given. told: what a teacher tells of N tokens (`teaching.TeachingHead`).
    """

    primary: Tensor
    entropy: Tensor | None
    aux_loss: Tensor | None
    kept: KeptTokens | None = None
    outside: Tensor | None = None
    divergence: Tensor | None = None
    told: tuple[Tensor, ...] = ()

    def anchor(self) -> Tensor:
        """A scalar 0 that depends on everything with a gradient.

        Its backward pass visits the same modules as that of a loss: ZeRO-3 communicates in each of them, so all ranks
        have to make the same visits.
        """
        read = (self.primary, self.entropy, self.aux_loss, self.divergence)
        outputs = [t for t in read if t is not None and t.requires_grad]
        return torch.stack([t.sum() for t in outputs]).sum() * 0.0

    def of_all(self, shares: Shares) -> Readings:
        """Those of all ranks of a sequence group, from those of this one."""
        if self.entropy is None:
            return self._replace(primary=shares.join(self.primary))
        primary, entropy = shares.join(torch.stack([self.primary, self.entropy], dim=-1)).unbind(-1)
        return self._replace(primary=primary, entropy=entropy if self.entropy.requires_grad else entropy.detach())


class LearnerModule(nn.Module):
    """A model with its head: a language model, or a backbone with a scalar head.

    head_name: what a scalar head is called in checkpoints. distribution: what log-probs are of, unless a call says
    otherwise. aux_loss: whether the balance loss of a mixture of experts is computed. flex: whether shared rows go
    through flex attention. sequence: how rows are cut over ranks, which then all call it with the same inputs and get
    the same readings; None: they are not.
    """

    def __init__(
        self, model: Any, head: Head, *, head_name: str, distribution: TokenDistribution, aux_loss: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.teaching = None if isinstance(head, ScalarHead) else TeachingHead(head)
        self.head_name = head_name
        self.distribution = distribution
        self.aux_loss = aux_loss
        self.flex = False
        self.sequence: SequenceParallel | None = None

    @property
    def scalar(self) -> bool:
        """Whether it gives a number per position (critic, reward model) instead of log-probs."""
        return isinstance(self.head, ScalarHead)

    @property
    def backbone(self) -> Any:
        """The model without the output layer of a language model."""
        return self.model if self.scalar else self.model.base_model

    @property
    def output_parameters(self) -> list[nn.Parameter]:
        """Those of the output layer. ValueError where a model's logits are not this layer's alone."""
        found = [] if self.teaching is None else self.teaching.borrowed
        if not found:
            raise ValueError(NO_STATES)
        return found

    def forward(
        self,
        inputs: ModelInputs,
        *,
        distribution: TokenDistribution | None = None,
        with_entropy: bool = False,
        entropy_gradient: bool = True,
        lesson: Lesson | None = None,
        teacher: Teacher | None = None,
    ) -> Readings:
        """Readings at `inputs.select`. Without entropy_gradient the entropy is a plain number.

        lesson with a teacher: also the divergence from it. lesson alone: what this model tells, and no log-probs.
        """
        how: dict[str, Any] = {"distribution": distribution, "with_entropy": with_entropy}
        how |= {"entropy_gradient": entropy_gradient, "lesson": lesson, "teacher": teacher}
        if self.sequence is None:
            return self._read(inputs, **how)
        assert lesson is None, "what a teacher tells is of whole rows"
        part, shares = cut_over(inputs, self.sequence.group)
        return self._read(part, **how).of_all(shares)

    def _read(
        self,
        inputs: ModelInputs,
        *,
        distribution: TokenDistribution | None,
        with_entropy: bool,
        entropy_gradient: bool,
        lesson: Lesson | None,
        teacher: Teacher | None,
    ) -> Readings:
        by_logits = isinstance(self.head, LogitsHead)
        outputs = self._call(self.model if by_logits else self.backbone, inputs)
        states = (outputs.logits if by_logits else outputs.last_hidden_state).flatten(0, 1)[inputs.select]
        aux = self._balance_loss(outputs, inputs)
        if isinstance(self.head, ScalarHead):
            return Readings(self.head(states).squeeze(-1), None, aux)
        taught = None
        if lesson is not None:
            assert self.teaching is not None, "a language model teaches and learns"
            taught = self.teaching(states, lesson, teacher, self.distribution)
            if teacher is None:
                return Readings(states.new_zeros(0), None, aux, told=taught)
        distribution = distribution or self.distribution
        if inputs.temperatures is not None:
            states = at_temperatures(self.head, states, inputs.temperatures, distribution.temperature)
        read = self.head(
            states,
            inputs.targets,
            distribution=distribution,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
            kept=inputs.kept,
        )
        return Readings(read.logprobs, read.entropy, aux, read.kept, read.outside, divergence=taught)

    def states(self, inputs: ModelInputs) -> Tensor:
        """The last hidden states at `inputs.select`, [N, H]."""
        return self._call(self.backbone, inputs).last_hidden_state.flatten(0, 1)[inputs.select]

    def hf_name(self, name: str) -> str:
        """A parameter's name here -> its name in a Hugging Face checkpoint."""
        owner, _, rest = name.partition(".")
        if owner == "head":
            return f"{self.head_name}.{rest}"
        return f"{self.model.base_model_prefix}.{rest}" if self.scalar else rest

    @torch.no_grad()
    def check_head(self, device: torch.device) -> None:
        """Try out on a few tokens that the output layer of a `TokenHead` gives the model's own logits. Collective.

        Raises:
            ValueError: on all ranks, when on one of them it does not.
        """
        if not isinstance(self.head, TokenHead):
            return
        probe = torch.arange(1, 5, device=device)[None]
        inputs = {"input_ids": probe, "position_ids": torch.arange(4, device=device)[None], "use_cache": False}
        with evaluating(self):
            expected = self.model(**inputs).logits
            hidden = self.backbone(**inputs).last_hidden_state
        check_plain_head(self.model, hidden, expected)

    @torch.no_grad()
    def check_packing(self, device: torch.device) -> None:
        """ValueError if a sample depends on the one before it in a packed row. Collective under ZeRO-3.

        `layers.check_packing` knows the layers that do; this catches a model with an attention of its own. Not for
        mixtures, where a neighbour's choice of experts moves the rounding.
        """
        if num_experts(self.model.config.get_text_config()):
            return
        positions = torch.arange(4, device=device).repeat(2)[None]
        states = []
        with evaluating(self):
            for first in (1, 5):
                tokens = torch.tensor([[*range(first, first + 4), 9, 10, 11, 12]], device=device)
                outputs = self.backbone(input_ids=tokens, position_ids=positions, attention_mask=None, use_cache=False)
                states.append(outputs.last_hidden_state[0, 4:].float())
        if float((states[0] - states[1]).abs().max()) > LEAK * float(states[0].abs().max()):
            raise ValueError(
                f"{self.model.config.model_type!r} models mix the samples of a packed row: leave `ds.packing_samples` "
                "and `batch.dynamic_batch_enable` out"
            )

    def _call(self, model: Any, inputs: ModelInputs) -> Any:
        """The only place where a model is called for training or scoring.

        attention_mask stays None: padding is on the right, where a causal model never looks, and in a packed row a
        mask would switch off the separation of the samples. So would a cache. In a shared row `SharedAttention` sees to
        it, and no mask is read; in a row that is cut over ranks, `SequenceAttention`.
        """
        extra: dict[str, Any] = {"output_router_logits": True} if self.aux_loss else {}
        positions: Tensor | None = inputs.position_ids
        mask: Tensor | None = None
        if inputs.shared is not None:
            extra["attend"] = SharedAttention(inputs.shared, flex=self.flex)
        if inputs.slices is not None:
            assert self.sequence is not None
            extra["attend"] = SequenceAttention(inputs.slices, self.sequence)
        if "attend" in extra:
            mask = torch.zeros(1, 1, 1, 1, device=inputs.input_ids.device)  # as it is ready, none of [L, L] is made
        if inputs.images is not None:
            extra |= self._image_inputs(inputs.input_ids, inputs.images)
            positions = None  # many such models number the places of an image in rows and columns, each in its way
        outputs = model(
            input_ids=inputs.input_ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=False,
            **extra,
        )
        assert getattr(outputs, "past_key_values", None) is None, "a key-value cache would let packed samples mix"
        return outputs

    def _image_inputs(self, input_ids: Tensor, images: dict[str, Tensor]) -> dict[str, Tensor]:
        """The images, with the kind of every token (1: image, 0: text) for models that ask for it."""
        if "mm_token_type_ids" not in inspect.signature(self.model.forward).parameters:
            return images
        return {**images, "mm_token_type_ids": (input_ids == self.model.config.image_token_id).long()}

    def _balance_loss(self, outputs: Any, inputs: ModelInputs) -> Tensor | None:
        if not self.aux_loss:
            return None
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        config = self.model.config.get_text_config()
        logits: Any = outputs.router_logits
        if inputs.slices is not None:  # no mean over tokens: it has to see all of them
            logits = inputs.slices.tokens(inputs.input_ids.device).join(torch.stack(logits, dim=1)).unbind(1)
        loss = load_balancing_loss_func(logits, num_experts(config), config.num_experts_per_tok, inputs.token_weights)
        assert isinstance(loss, Tensor), "a mixture of experts returns its router logits"
        return loss


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, nothing is random (adapters may have dropout) and nothing is checkpointed."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


@contextmanager
def rounded(module: nn.Module, bits: int) -> Iterator[None]:
    """Inside, the output of every layer of `module` is rounded to `bits` significant bits, to the nearest.

    One bit less than the number format has disturbs a model as another order of its sums would. A forward pass that
    was compiled as a whole goes on as before.
    """

    def hook(layer: nn.Module, args: Any, output: Any) -> Tensor | None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        exact = output.float()
        shifted = exact * (2.0 ** (24 - bits) + 1)  # Veltkamp's splitting
        return (shifted - (shifted - exact)).to(output.dtype)

    layers = [layer for layer in module.modules() if next(layer.children(), None) is None]
    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def disable_dropout(model: nn.Module) -> None:
    """Make training mode deterministic: the ratio to the old policy must be 1 before the first update."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "resid_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
