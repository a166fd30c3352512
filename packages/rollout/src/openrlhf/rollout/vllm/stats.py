"""What vLLM measures of its caches and queues, added up since the engine started: differences of two readings tell what
was between them.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class EngineTotals(StatLoggerBase):
    """Every iteration of the engine adds to `totals`.

    iterations; kv_cache_usage: shares of the KV cache that were in use; running, waiting: requests; prefix_queries,
    prefix_hits: prompt tokens that were looked up, and found, among cached prefixes; generated: tokens; preempted:
    requests that had to give up their room.
    """

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        names = ("iterations", "kv_cache_usage", "running", "waiting", "prefix_queries", "prefix_hits", "generated")
        self.totals = dict.fromkeys([*names, "preempted"], 0.0)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            cache = scheduler_stats.prefix_cache_stats
            self._add("iterations", 1)
            self._add("kv_cache_usage", scheduler_stats.kv_cache_usage)
            self._add("running", scheduler_stats.num_running_reqs)
            self._add("waiting", scheduler_stats.num_waiting_reqs)
            self._add("prefix_queries", cache.queries)
            self._add("prefix_hits", cache.hits)
        if iteration_stats is not None:
            self._add("generated", iteration_stats.num_generation_tokens)
            self._add("preempted", iteration_stats.num_preempted_reqs)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def _add(self, name: str, value: float) -> None:
        self.totals[name] += float(value)


def stat_loggers(enabled: bool) -> tuple[list[Any] | None, dict[str, float]]:
    """What `AsyncLLM` is given as such, and the totals of its one engine; without, vLLM measures nothing."""
    if not enabled:
        return None, {}
    collected = EngineTotals()
    return [lambda config, number: collected], collected.totals
