"""Spans to OpenTelemetry (the extra `otel`): a step of the trainer, its phases and groups, their samples, turns, engine
requests and rewards are one tree, over all processes. In the asynchronous pipeline sampling belongs to no step: there
every group is a tree of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.spans import is_traced, use_tracer
from openrlhf.launcher.config import TrainPPOConfig

DELAY_MS = 1000
"""How long spans wait to be sent together."""


@dataclass(frozen=True, kw_only=True)
class TraceTarget:
    """Where spans go. endpoint: URL of a collector that takes OTLP over HTTP. run: the run's name."""

    endpoint: str
    run: str


def trace_target(config: TrainPPOConfig) -> TraceTarget | None:
    """Where a run's spans go; None without --logger.otlp_endpoint."""
    endpoint = config.logger.otlp_endpoint
    return None if endpoint is None else TraceTarget(endpoint=endpoint, run=config.logger.wandb.run_name)


def start_tracing(target: TraceTarget | None, process: str) -> Callable[[], None]:
    """Trace this process; what it returns sends what is left and ends that. None: nothing is traced.

    Headers (a key, say) are read by OpenTelemetry from OTEL_EXPORTER_OTLP_HEADERS. Raises ValueError without the extra.
    """
    if target is None:
        return lambda: None
    try:
        resources = importlib.import_module("opentelemetry.sdk.resources")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--logger.otlp_endpoint needs {error.name}: pip install 'openrlhf-launcher[otel]', or drop the flag"
        ) from None
    about = {"service.name": "openrlhf", "service.instance.id": process, "openrlhf.run": target.run}
    provider = sdk.TracerProvider(resource=resources.Resource.create(about))
    exporter = otlp.OTLPSpanExporter(endpoint=target.endpoint)
    provider.add_span_processor(export.BatchSpanProcessor(exporter, schedule_delay_millis=DELAY_MS))
    return trace_with(provider)


def trace_with(provider: Any) -> Callable[[], None]:
    """Send this process' spans to a `TracerProvider`; what it returns ends that."""
    tracer = provider.get_tracer("openrlhf")

    def open_span(name: str, attributes: Mapping[str, str | int]) -> AbstractContextManager[Any]:
        return tracer.start_as_current_span(name, attributes=dict(attributes))

    def stop() -> None:
        use_tracer(None)
        provider.shutdown()

    use_tracer(open_span)
    return stop


def traceparent() -> str | None:
    """The span that this code runs in, as another process is told of it (W3C Trace Context); None: there is none."""
    if not is_traced():
        return None
    from opentelemetry.propagate import inject

    carrier: dict[str, str] = {}
    inject(carrier)
    return carrier.get("traceparent")


@contextmanager
def child_of(parent: str | None) -> Iterator[None]:
    """Spans inside are children of what `traceparent` gave in another process."""
    if parent is None:
        yield
        return
    from opentelemetry.context import attach, detach
    from opentelemetry.propagate import extract

    token = attach(extract({"traceparent": parent}))
    try:
        yield
    finally:
        detach(token)
