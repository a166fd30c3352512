"""How vLLM is told to sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf.agents.engine import SamplingParams

SUPPRESSED = -100.0
"""Added to a logit that must not be sampled: the most that vLLM takes. exp(-100) is nothing beside 1 in float32."""


def to_vllm_sampling(sampling: SamplingParams, suppressed: Sequence[int] = ()) -> Any:
    """vLLM's own sampling parameters, every one set explicitly, for one sample (n = 1).

    Text is only decoded where stop strings need it. The stop string's tokens are part of the sample.
    suppressed: token ids that are never sampled.
    """
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VllmSamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        logit_bias=dict.fromkeys(suppressed, SUPPRESSED) or None,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
