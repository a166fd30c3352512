"""Sampling parameters as authors give them: our dataclass, a dict, an object such as vLLM's. And the seeds of calls."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from openrlhf.agents.engine import SamplingParams

SEED_BITS = 63  # engines take a signed 64-bit integer
FIELDS = tuple(field.name for field in fields(SamplingParams))
# Settings of vllm.SamplingParams that would change a sample or its log-probs and that the engine border does not carry.
UNSUPPORTED = (
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
    "guided_decoding",
    "logits_processors",
    "thinking_token_budget",
    "repetition_detection",
    "watermarking",
    "extra_args",
    "prompt_logprobs",
    "logprob_token_ids",
    "truncate_prompt_tokens",
)


def as_sampling(value: Any) -> SamplingParams:
    """A new `SamplingParams` from any accepted form.

    Raises ValueError for unknown keys, several samples or log-probs of other tokens, and unsupported settings.
    """
    if isinstance(value, SamplingParams):
        return value.with_(**_clean({name: getattr(value, name) for name in FIELDS}))
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if hasattr(value, "temperature"):
        return _from_object(value)
    raise ValueError(
        f"sampling_params must be openrlhf.agents.engine.SamplingParams, a dict or vllm.SamplingParams, got {value!r}"
    )


def _from_mapping(value: Mapping[str, Any]) -> SamplingParams:
    known = dict(value)
    _check_counts(known.pop("n", 1), known.pop("logprobs", 1))
    unknown = sorted(set(known) - set(FIELDS))
    if unknown:
        raise ValueError(f"sampling_params: unknown keys {unknown}; known keys are {list(FIELDS)}")
    return SamplingParams(**_clean(known))


def _from_object(value: Any) -> SamplingParams:
    _check_counts(getattr(value, "n", 1), getattr(value, "logprobs", 1))
    changed = [name for name in UNSUPPORTED if getattr(value, name, None)]
    if changed:
        raise ValueError(f"sampling_params: {changed} cannot be changed by an agent; leave them unset")
    return SamplingParams(**_clean({name: getattr(value, name) for name in FIELDS if hasattr(value, name)}))


def _check_counts(n: Any, logprobs: Any) -> None:
    if n not in (1, None):
        raise ValueError(f"sampling_params: n must be 1 (every sample is its own request), got {n!r}")
    if logprobs not in (1, 0, None):
        raise ValueError(f"sampling_params: logprobs must be 1 (those of the sampled tokens), got {logprobs!r}")


def _clean(values: dict[str, Any]) -> dict[str, Any]:
    stop = values.get("stop")
    values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    values["stop_token_ids"] = tuple(values.get("stop_token_ids") or ())
    if values.get("top_k") == 0:  # vllm's other spelling of "all tokens"
        values["top_k"] = -1
    return values


def sample_seed(train_seed: int, evaluation: bool, episode: int, position: int, sample: int, turn: int) -> int:
    """A 63-bit hash of everything that identifies one generation call.

    Neighbouring integers would not do: an engine that adds the child index to the seed shares samples between them.
    """
    kind = "eval" if evaluation else "train"
    key = f"{train_seed}/{kind}/{episode}/{position}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> (64 - SEED_BITS)
