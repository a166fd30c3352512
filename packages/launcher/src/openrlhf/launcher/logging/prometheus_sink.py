"""Metrics for Prometheus: `http://host:port/metrics` has the newest of each, as gauges with the name of the run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from openrlhf.launcher.logging.sinks import GeneratedSample, Metrics, UnusableSinkError

_NO_NAME = re.compile(r"[^a-zA-Z0-9_]+")
_TAKEN = ("_total", "_count", "_sum", "_bucket", "_info")
"""Endings that have a meaning for Prometheus, which no gauge has."""


def gauge_name(metric: str) -> str:
    """What Prometheus calls a metric: `timing/generation` is `openrlhf_timing_generation_seconds`."""
    name = f"openrlhf_{_NO_NAME.sub('_', metric).strip('_').lower()}"
    if metric.startswith("timing/"):
        name += "_seconds"
    return f"{name}_value" if name.endswith(_TAKEN) else name


class PrometheusSink:
    """Serves until `close`. run: the run's name. port 0: one that is free, see `port`.

    Raises UnusableSinkError where the port is taken.
    """

    name = "Prometheus"

    def __init__(self, host: str, port: int, run: str) -> None:
        self._run = run
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            raise UnusableSinkError(
                f"--logger.prometheus_port {port}: {error}; give another port, or 0 for one that is free"
            ) from error
        self.port = int(self._server.server_port)

    def resume(self, step: int) -> None:
        """There is only what is newest."""

    def log_step(self, step: int, metrics: Metrics) -> None:
        self._set("step", step)
        for name, value in metrics.items():
            self._set(name, value)

    def log_evaluation(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._set(name, value)

    def log_samples(self, step: int, samples: Sequence[GeneratedSample]) -> None:
        """Texts are no numbers."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)

    def _set(self, metric: str, value: Any) -> None:
        name = gauge_name(metric)
        if name not in self._gauges:
            help_text = f"{metric} of the newest step" if metric != "step" else "the newest step"
            self._gauges[name] = Gauge(name, help_text, ["run"], registry=self._registry)
        self._gauges[name].labels(self._run).set(value)
