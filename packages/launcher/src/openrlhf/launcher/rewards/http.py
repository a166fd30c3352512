"""Rewards from HTTP servers: one POST per prompt group.

Request:  {"query": [full text, ...], "prompts": [...], "labels": [...], "columns": {name: [...], ...}?}
Answer:   {"rewards": [number, ...], "scores": [...]?, "extra_logs": {name: [...]}?}, one value per query
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.agents.rewards import RewardError, RewardResult, RewardTimeoutError, normalize_rewards
from openrlhf.launcher.json_servers import JsonServers, RetryPolicy
from openrlhf.launcher.redaction import redact


class HttpRewardSource:
    """A `RewardSource` over HTTP; use it from one event loop. Arguments: of `JsonServers`."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None = None,
        retry: RetryPolicy | None = None,
        max_concurrency: int = 64,
    ) -> None:
        self._servers = JsonServers(
            urls,
            kind="reward server",
            flag="--reward.remote_url",
            timeout_flag="--reward.timeout",
            errors=(RewardError, RewardTimeoutError),
            api_key=api_key,
            retry=retry,
            max_concurrency=max_concurrency,
        )

    async def score(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        *,
        responses: Sequence[str] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> RewardResult:
        """Rewards of one group in one request.

        Raises RewardError (RewardTimeoutError where the last attempt timed out) when no server gave an answer, at once
        for an answer that a repetition will not change (4xx, no JSON); ValueError for wrong counts or types.
        """
        question: dict[str, Any] = {"query": list(queries), "prompts": list(prompts), "labels": list(labels)}
        if columns:
            question["columns"] = {name: list(values) for name, values in columns.items()}
        answer, url = await self._servers.ask(json.dumps(question).encode())
        return normalize_rewards(answer, len(queries), name=redact(url))

    async def close(self) -> None:
        """Close the connections."""
        await self._servers.close()
