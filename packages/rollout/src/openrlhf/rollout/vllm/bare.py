"""vLLM asked without anything of ours between: what the way of a run's samples is measured against."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from openrlhf.rollout.vllm.engine import VllmEngine


async def bare_seconds(engine: VllmEngine, rows: Sequence[list[int]], new_tokens: int, first_seed: int) -> float:
    """Seconds that vLLM takes to sample `new_tokens` after each row of token ids, all rows at once.

    first_seed: of the first row; row i has the seed first_seed + i. Call it on the loop on which the engine started.
    """
    llm = engine.running_llm()

    async def sample(number: int, ids: list[int]) -> None:
        params = SamplingParams(
            max_tokens=new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            seed=first_seed + number,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for _ in llm.generate({"prompt_token_ids": ids}, params, f"bare-{first_seed + number}"):
            pass

    began = time.perf_counter()
    await asyncio.gather(*(sample(number, ids) for number, ids in enumerate(rows)))
    return time.perf_counter() - began
