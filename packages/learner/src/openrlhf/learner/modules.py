"""`LearnerModule`: a Hugging Face model and the head of its role, called the one right way.

It is the module DeepSpeed wraps, so a call goes through DeepSpeed's hooks. The language-model head is only applied at
the positions asked for, in chunks, by calling the head module itself (ZeRO-3 gathers its weight for exactly that call).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrlhf.core.logprobs import entropy_from_logits, logprobs_from_logits, token_logprobs
from openrlhf.learner.head_path import check_plain_head, plain_head
from openrlhf.learner.layers import num_experts
from openrlhf.learner.packing import ModelInputs

LEAK = 1e-3
"""Share of the largest hidden state by which a packed neighbour may move one; without a leak nothing moves."""


class Readings(NamedTuple):
    """What a forward pass reads, all [N] float32 (a tuple, so that DeepSpeed's backward hooks find the tensors).

    primary: log-probs of the targets (policy, reference) or values (critic, reward).
    entropy: only for language models and on request. aux_loss: scalar, only with a balance loss.
    """

    primary: Tensor
    entropy: Tensor | None
    aux_loss: Tensor | None

    def anchor(self) -> Tensor:
        """A scalar 0 that depends on everything with a gradient.

        Its backward pass visits the same modules as that of a loss: ZeRO-3 communicates in each of them, so all ranks
        have to make the same visits.
        """
        outputs = [t for t in self if t is not None and t.requires_grad]
        return torch.stack([t.sum() for t in outputs]).sum() * 0.0


class ScalarHead(nn.Linear):
    """The head of a critic or reward model: computes in float32, whatever the weights are stored in.

    bf16 has 8 bits: values near 1 would come in steps of 1/128.
    """

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias)


class LearnerModule(nn.Module):
    """A model with its head: a language model (`head` None) or a backbone with a scalar head.

    suppressed: token ids without probability. They are part of the vocabulary again while it is empty.
    """

    def __init__(
        self,
        model: Any,
        head: nn.Linear | None,
        *,
        head_name: str,
        temperature: float,
        aux_loss: bool,
        suppressed: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.suppressed = tuple(suppressed)
        self.model = model
        self.head = head
        self.head_name = head_name
        self.temperature = temperature
        self.aux_loss = aux_loss
        self.chunked_head = False

    def forward(self, inputs: ModelInputs, *, with_entropy: bool = False, entropy_gradient: bool = True) -> Readings:
        """Readings at `inputs.select`. Without entropy_gradient the entropy is a plain number."""
        if self.head is None and not self.chunked_head:
            return self._from_logits(inputs, with_entropy, entropy_gradient)
        outputs = self._call(self.model if self.head is not None else self.model.base_model, inputs)
        hidden = outputs.last_hidden_state.flatten(0, 1)[inputs.select]
        aux = self._balance_loss(outputs, inputs)
        if self.head is not None:
            return Readings(self.head(hidden).squeeze(-1), None, aux)
        output_head = self.model.get_output_embeddings()
        logprobs, entropy = output_head(
            hidden, inputs.targets, self.temperature, with_entropy, entropy_gradient, self.suppressed
        )
        return Readings(logprobs, entropy, aux)

    def hf_name(self, name: str) -> str:
        """A parameter's name here -> its name in a Hugging Face checkpoint."""
        owner, _, rest = name.partition(".")
        if owner == "head":
            return f"{self.head_name}.{rest}"
        return f"{self.model.base_model_prefix}.{rest}" if self.head is not None else rest

    @torch.no_grad()
    def choose_head_path(self, device: torch.device) -> None:
        """Use the chunked head if this model's logits are its head's (see `head_path`); else keep to full logits.

        The same on every rank. Collective.

        Raises:
            ValueError: on all ranks, when on one of them the head does not give the model's own logits.
        """
        if self.head is not None or not plain_head(self.model):
            return
        output_head = self.model.get_output_embeddings()
        probe = torch.arange(1, 5, device=device)[None]
        inputs = {"input_ids": probe, "position_ids": torch.arange(4, device=device)[None], "use_cache": False}
        with evaluating(self):
            expected = self.model(**inputs).logits
            hidden = self.model.base_model(**inputs).last_hidden_state
        check_plain_head(self.model, hidden, expected)
        output_head.forward = types.MethodType(_chunked_head, output_head)
        self.chunked_head = True

    @torch.no_grad()
    def check_packing(self, device: torch.device) -> None:
        """ValueError if a sample depends on the one before it in a packed row. Collective under ZeRO-3.

        `layers.check_packing` knows the layers that do; this catches a model with an attention of its own. Not for
        mixtures, where a neighbour's choice of experts moves the rounding.
        """
        if num_experts(self.model.config.get_text_config()):
            return
        backbone = self.model if self.head is not None else self.model.base_model
        positions = torch.arange(4, device=device).repeat(2)[None]
        states = []
        with evaluating(self):
            for first in (1, 5):
                tokens = torch.tensor([[*range(first, first + 4), 9, 10, 11, 12]], device=device)
                outputs = backbone(input_ids=tokens, position_ids=positions, attention_mask=None, use_cache=False)
                states.append(outputs.last_hidden_state[0, 4:].float())
        if float((states[0] - states[1]).abs().max()) > LEAK * float(states[0].abs().max()):
            raise ValueError(
                f"{self.model.config.model_type!r} models mix the samples of a packed row: leave `ds.packing_samples` "
                "and `batch.dynamic_batch_enable` out"
            )

    def _call(self, model: Any, inputs: ModelInputs) -> Any:
        """The only place where a model is called for training or scoring.

        attention_mask stays None: padding is on the right, where a causal model never looks, and in a packed row a
        mask would switch off the separation of the samples. So would a cache.
        """
        extra: dict[str, Any] = {"output_router_logits": True} if self.aux_loss else {}
        positions: Tensor | None = inputs.position_ids
        if inputs.images is not None:
            extra |= self._image_inputs(inputs.input_ids, inputs.images)
            positions = None  # many such models number the places of an image in rows and columns, each in its way
        outputs = model(
            input_ids=inputs.input_ids,
            position_ids=positions,
            attention_mask=None,
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

    def _from_logits(self, inputs: ModelInputs, with_entropy: bool, entropy_gradient: bool) -> Readings:
        outputs = self._call(self.model, inputs)
        logits = outputs.logits.flatten(0, 1)[inputs.select]
        if self.suppressed:
            logits = logits.index_fill(-1, _index(self.suppressed, logits), float("-inf"))
        logprobs = logprobs_from_logits(logits, inputs.targets, self.temperature)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = entropy_from_logits(logits, self.temperature) if with_entropy else None
        return Readings(logprobs, entropy, self._balance_loss(outputs, inputs))

    def _balance_loss(self, outputs: Any, inputs: ModelInputs) -> Tensor | None:
        if not self.aux_loss:
            return None
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        config = self.model.config.get_text_config()
        loss = load_balancing_loss_func(
            outputs.router_logits, num_experts(config), config.num_experts_per_tok, inputs.token_mask
        )
        assert isinstance(loss, Tensor), "a mixture of experts returns its router logits"
        return loss


def _chunked_head(
    self: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    with_entropy: bool,
    entropy_gradient: bool,
    suppressed: Sequence[int] = (),
) -> tuple[Tensor, Tensor | None]:
    """Forward of a language-model head: log-probs [N] (and entropy [N]) instead of logits."""
    bias = self.bias
    if suppressed:  # a bias of minus infinity takes a token out of the distribution
        bias = self.weight.new_zeros(len(self.weight)) if bias is None else bias
        bias = bias.index_fill(0, _index(suppressed, bias), float("-inf"))
    logprobs, entropy = token_logprobs(
        hidden, self.weight, targets, temperature=temperature, bias=bias, with_entropy=with_entropy
    )
    return logprobs, entropy if entropy is None or entropy_gradient else entropy.detach()


def _index(ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.long, device=like.device)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, nothing is random (adapters may have dropout) and nothing is checkpointed."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


def disable_dropout(model: nn.Module) -> None:
    """Make training mode deterministic: the ratio to the old policy must be 1 before the first update."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "resid_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
