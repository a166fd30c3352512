"""Heads: what the states of a model become. Log-probs of tokens (`TokenHead`, `LogitsHead`) or a number (`ScalarHead`).

Whether a language model's logits are exactly its output layer's, so that log-probs can be taken in tiles without them,
is decided by the model's class and configuration, which are the same on every rank. A comparison of numbers only checks
the decision: a cap of 30 moves logits around 1 by less than any tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openrlhf.core.config import NO_TRUNCATION, Truncation
from openrlhf.core.logprobs import (
    entropy_from_logits,
    kept_from_logits,
    kept_tokens,
    logprobs_from_logits,
    token_logprobs,
)
from openrlhf.core.truncation import KeptTokens

NEUTRAL: dict[str, float | None] = {
    "final_logit_softcapping": None,  # Gemma 2 to 4, NanoChat
    "logits_soft_cap": None,  # RecurrentGemma
    "output_logit_soft_cap": None,  # xLSTM
    "logit_scale": 1.0,  # Cohere
    "logits_scaling": 1.0,  # Granite, MiniCPM 3, HyperCLOVA X
    "lm_head_multiplier": 1.0,  # Falcon H1
    "output_multiplier": 1.0,
    "logits_mup_width_multiplier": 1.0,
    "unpadded_vocab_size": None,
}
"""Settings of transformers 5 between the last hidden state and the logits, and the value that does nothing."""
OWN_FORWARD = ("chameleon", "electra", "modernbert-decoder")
"""Model types that do something there without a setting."""
TOLERANCE = 0.05
"""Share of the largest logit by which two forward passes in bf16 may differ; a forgotten scale is far more."""


@dataclass(frozen=True)
class TokenDistribution:
    """The distribution over tokens of which log-probs and entropy are: softmax(logits / temperature).

    suppressed: token ids without probability. truncation: what is left of the rest.
    """

    temperature: float = 1.0
    suppressed: tuple[int, ...] = ()
    truncation: Truncation = NO_TRUNCATION


class TokenReadings(NamedTuple):
    """Of N tokens: log-probs and entropy [N] float32, and with truncation the sets that they are over.

    outside [N] bool: where a token was outside of its set and was added to it (`core.truncation.collect_kept`); None
    where the sets were given.
    """

    logprobs: Tensor
    entropy: Tensor | None
    kept: KeptTokens | None = None
    outside: Tensor | None = None


class ScalarHead(nn.Linear):
    """The head of a critic or reward model: computes in float32, whatever the weights are stored in.

    bf16 has 8 bits: values near 1 would come in steps of 1/128.
    """

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias)


class TokenHead(nn.Module):
    """Log-probs from hidden states through a model's output layer, in tiles: there are no logits of the whole batch.

    It has no parameters of its own. Under ZeRO-3 those of the layer have to be gathered for its calls, since the layer
    itself is not called: the backend registers `borrowed` with it.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self._layer = (layer,)  # in a tuple torch does not see it: its parameters belong to the model alone

    @property
    def borrowed(self) -> list[nn.Parameter]:
        """The output layer's parameters."""
        return list(self._layer[0].parameters())

    @property
    def output(self) -> tuple[Tensor, Tensor | None]:
        """The output layer's weight [V, H] and bias [V]."""
        return self._layer[0].weight, self._layer[0].bias

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        distribution: TokenDistribution,
        with_entropy: bool = False,
        entropy_gradient: bool = True,
        kept: KeptTokens | None = None,
    ) -> TokenReadings:
        """Readings of the targets [N]; hidden [N, H].

        kept: the sets that the log-probs are over, where the distribution is truncated; None: those of these states.
        Tensors come by position: DeepSpeed's hooks look for them there.
        """
        (layer,), bias = self._layer, self._layer[0].bias
        if distribution.suppressed:  # a bias of minus infinity takes a token out of the distribution
            bias = layer.weight.new_zeros(len(layer.weight)) if bias is None else bias
            bias = bias.index_fill(0, _index(distribution.suppressed, bias), float("-inf"))
        temperature, outside = distribution.temperature, None
        if not distribution.truncation.active:
            kept = None
        elif kept is None:
            kept, outside = kept_tokens(hidden, layer.weight, targets, distribution.truncation, temperature, bias)
        logprobs, entropy = token_logprobs(
            hidden, layer.weight, targets, temperature=temperature, bias=bias, with_entropy=with_entropy, kept=kept
        )
        entropy = entropy if entropy is None or entropy_gradient else entropy.detach()
        return TokenReadings(logprobs, entropy, kept, outside)


class LogitsHead(nn.Module):
    """Log-probs from a model's own logits, for models that do something between output layer and logits."""

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        distribution: TokenDistribution,
        with_entropy: bool = False,
        entropy_gradient: bool = True,
        kept: KeptTokens | None = None,
    ) -> TokenReadings:
        """The same as those of `TokenHead`; logits [N, V]."""
        if distribution.suppressed:
            logits = logits.index_fill(-1, _index(distribution.suppressed, logits), float("-inf"))
        temperature, outside = distribution.temperature, None
        if not distribution.truncation.active:
            kept = None
        elif kept is None:
            kept, outside = kept_from_logits(logits, targets, distribution.truncation, temperature)
        logprobs = logprobs_from_logits(logits, targets, temperature, kept)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = entropy_from_logits(logits, temperature, kept) if with_entropy else None
        return TokenReadings(logprobs, entropy, kept, outside)


Head = ScalarHead | TokenHead | LogitsHead


def at_temperatures(head: TokenHead | LogitsHead, states: Tensor, temperatures: Tensor, own: float) -> Tensor:
    """States (or logits) [N, .] such that a head at the temperature `own` reads each at its own of `temperatures` [N],
    where that is not 0. Logits are linear in both, so this is a scale per row.

    Raises ValueError for an output layer with a bias, which such a scale does not reach.
    """
    if isinstance(head, TokenHead) and head.output[1] is not None:
        raise ValueError(
            "samples at a temperature of their agent's client cannot be scored by an output layer with a bias: use "
            "`agent.client_sampling` run"
        )
    scale = torch.where(temperatures > 0, own / temperatures.clamp(min=1e-6), torch.ones_like(temperatures))
    return states * scale.to(device=states.device, dtype=states.dtype)[:, None]


def token_head(model: Any) -> TokenHead | LogitsHead:
    """The head of a language model."""
    return TokenHead(model.get_output_embeddings()) if plain_head(model) else LogitsHead()


def _index(ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.long, device=like.device)


def plain_head(model: Any) -> bool:
    """Whether the class and the configuration of `model` say that its logits are `head(last_hidden_state)`.

    Classes from elsewhere than transformers are not known, nor heads that lie inside another module (BERT).
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not any(child is head for child in model.children()):
        return False
    config = model.config
    if not type(model).__module__.startswith("transformers.models.") or config.model_type in OWN_FORWARD:
        return False
    configs = (config, config.get_text_config())
    return not any(_acts(getattr(c, name, None), neutral) for c in configs for name, neutral in NEUTRAL.items())


def _acts(value: float | None, neutral: float | None) -> bool:
    return value is not None and value != neutral


def check_plain_head(model: Any, hidden: Tensor, logits: Tensor) -> None:
    """ValueError on all ranks when on any of them the head does not give the model's own logits. Collective."""
    with torch.no_grad():
        got = model.get_output_embeddings()(hidden).float()
    expected = logits.float()
    differs = not bool((got - expected).abs().max() <= TOLERANCE * expected.abs().max())
    seen = torch.tensor(float(differs), device=hidden.device)
    if dist.is_initialized():
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    if float(seen):
        raise ValueError(
            f"{model.config.model_type!r} models change what their head gives before it becomes logits, in a way that "
            "is not known here: such a model cannot be trained; check that the model's files are complete"
        )
