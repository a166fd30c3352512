"""A teacher behind OpenAI-compatible servers that return the log-probs of a prompt's tokens, as vLLM's do.

Request:  POST {url}/v1/completions {"model", "prompt": [token ids], "max_tokens": 1, "prompt_logprobs": k}
Answer:   {"choices": [{"prompt_logprobs": [null, {"<token id>": {"logprob": number, "rank": number}, ...}, ...]}]}
          The token itself is always among the k most probable ones that are given for its place.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from openrlhf.launcher.json_servers import JsonServers
from openrlhf.launcher.ranks.batches import PerSample, ToldPerSample
from openrlhf.launcher.ranks.config import RankConfig
from openrlhf.launcher.samples import SampleRef, cut
from openrlhf.launcher.teacher_check import TeacherServerError, TeacherServers


class RemoteReference:
    """What a `ReferenceRank` does for the policy, by asking servers."""

    def __init__(
        self, servers: TeacherServers, config: RankConfig, resolve: Callable[[str, Sequence[Any]], list[Any]]
    ) -> None:
        self.servers = servers
        self.config = config
        self._resolve = resolve

    def logprobs(self, shares: Sequence[Sequence[SampleRef]], kept: None = None) -> PerSample:
        """Log-probs of the trainable tokens of every sample of the share."""
        assert kept is None, "truncated sampling is refused with a teacher behind a server"
        return {index: told["own"] for index, told in self._ask(shares, 1).items()}

    def tell(self, shares: Sequence[Sequence[SampleRef]]) -> ToldPerSample:
        """The most probable tokens at the trainable ones of every sample of the share."""
        lesson = self.config.lesson
        assert lesson is not None, "a teacher tells distributions where a divergence is trained"
        assert lesson.top_k, "a server does not tell the states of its model"
        found = self._ask(shares, lesson.top_k)
        return {index: {name: told[name] for name in ("ids", "logprobs", "rest")} for index, told in found.items()}

    def _ask(self, shares: Sequence[Sequence[SampleRef]], k: int) -> dict[int, dict[str, torch.Tensor]]:
        samples = [sample for share in shares for sample in share]
        keys = list({id(s.handle): s.handle for s in samples}.values())
        groups = dict(zip(map(id, keys), self._resolve("samples", keys), strict=True))
        rows = [cut(groups[id(s.handle)][s.position], self.config.max_len) for s in samples]

        async def ask_all() -> list[dict[str, torch.Tensor]]:
            client = self.servers.completions()
            asked = (self._ask_one(client, r.token_ids, r.trainable, k) for r in rows)
            # An error is raised when all requests have ended: one that is still connecting would leave its socket open.
            try:
                answers = await asyncio.gather(*asked, return_exceptions=True)
            finally:
                await client.close()
            if failed := next((a for a in answers if isinstance(a, BaseException)), None):
                raise failed
            return [a for a in answers if not isinstance(a, BaseException)]

        return dict(zip([s.index for s in samples], asyncio.run(ask_all()), strict=True))

    async def _ask_one(
        self, client: JsonServers, tokens: Sequence[int], trainable: Sequence[int], k: int
    ) -> dict[str, torch.Tensor]:
        question = {"model": self.servers.model, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": k}
        answer, url = await client.ask(json.dumps(question).encode())
        try:
            places = answer["choices"][0]["prompt_logprobs"]
            asked = [(tokens[t], places[t]) for t in range(len(tokens)) if trainable[t]]
            return read_places(asked, k)
        except (KeyError, IndexError, TypeError) as error:
            raise TeacherServerError(
                f"teacher {url}: its answer has no log-probs of the prompt's tokens ({type(error).__name__}: {error}). "
                "It must return prompt_logprobs, as vLLM's server does (vllm serve MODEL), for prompts of "
                f"--data.max_len + 1 = {self.config.max_len + 1} tokens"
            ) from None


def read_places(places: Sequence[tuple[int, Any]], k: int) -> dict[str, torch.Tensor]:
    """(token, what a server says of its place) -> own [n], ids and logprobs [n, k] and rest [n].

    A place with fewer than k tokens (a small vocabulary) repeats its last one without probability.
    """
    own, ids, logprobs, rest = [], [], [], []
    for token, place in places:
        own.append(float(place[str(token)]["logprob"]))
        best = sorted((int(v["rank"]), int(i), float(v["logprob"])) for i, v in place.items())[:k]
        best += [(0, best[-1][1], -math.inf)] * (k - len(best))
        ids.append([i for _, i, _ in best])
        logprobs.append([p for _, _, p in best])
        left = 1.0 - math.fsum(math.exp(p) for _, _, p in best)
        rest.append(math.log(left) if left > 0 else -math.inf)
    return {
        "own": torch.tensor(own, dtype=torch.float32),
        "ids": torch.tensor(ids, dtype=torch.int32).reshape(-1, k),
        "logprobs": torch.tensor(logprobs, dtype=torch.float32).reshape(-1, k),
        "rest": torch.tensor(rest, dtype=torch.float32),
    }
