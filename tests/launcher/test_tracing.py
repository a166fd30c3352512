"""The spans of a step form one tree, over processes; without a tracer there are none."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from openrlhf.agents.context import EpisodeSettings
from openrlhf.agents.executor import SingleTurnExecutor
from openrlhf.agents.rewards import RewardResult
from openrlhf.agents.spans import is_traced, span
from openrlhf.agents.testing.engine import ScriptedEngine
from openrlhf.agents.testing.tokenizer import ByteTokenizer
from openrlhf.agents.types import PromptItem
from openrlhf.agents.worker import AgentWorker
from openrlhf.launcher.samples import EvalRequest, Group, sample_info
from openrlhf.launcher.tracing import TraceTarget, child_of, start_tracing, trace_with, traceparent
from support.trainer_fakes import FakeRollout, FakeRun, fake_run

SAMPLES = 2


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    stop = trace_with(provider)
    yield exporter
    stop()


class Half:
    """Rewards every second sample."""

    async def score(self, queries: Any, prompts: Any, labels: Any, **further: Any) -> RewardResult:
        values = [float(i % 2) for i in range(len(queries))]
        return RewardResult(
            rewards=values, scores=values, extra_logs=[{}] * len(queries), failures=[None] * len(queries)
        )


@dataclass
class WorkerRollout(FakeRollout):
    """Groups of a real agent worker, which knows of the trainer's spans what a message says."""

    async def run_group(self, item: PromptItem, *, evaluation: EvalRequest | None = None) -> Group:
        parent = traceparent()

        async def elsewhere() -> Any:
            worker = AgentWorker(
                SingleTurnExecutor(Half()),
                ScriptedEngine(["ab"]),
                ByteTokenizer(),
                EpisodeSettings(n_samples=SAMPLES, max_length=64),
            )
            with child_of(parent):
                return await worker.run_group(item)

        rows = await asyncio.create_task(elsewhere(), context=Context())
        return Group(prompt=item, samples=[sample_info(row, max_len=64) for row in rows], handle=f"h{item.position}")


def traced_run(**flags: Any) -> FakeRun:
    run = fake_run(4, **flags)
    rollout = WorkerRollout(n=SAMPLES, weights=run.learner)
    run.trainer.pipeline._rollout = rollout
    run.trainer.parts = replace(run.trainer.parts, rollout=rollout)
    return run


def tree(spans: tuple[ReadableSpan, ...]) -> dict[int, tuple[str, int | None]]:
    """Span -> its name and its parent."""
    found = {}
    for own in spans:
        assert own.context is not None
        found[own.context.span_id] = (own.name, None if own.parent is None else own.parent.span_id)
    return found


def test_the_spans_of_a_step_are_one_tree(exported: InMemorySpanExporter) -> None:
    traced_run().run()
    spans = exported.get_finished_spans()
    found = tree(spans)
    roots = [name for name, parent in found.values() if parent is None]
    assert roots == ["step", "step", "step"]  # two steps, and the one that finds no prompt any more
    assert {parent for _, parent in found.values()} - {None} <= set(found)
    edges = Counter((found[parent][0], name) for name, parent in found.values() if parent is not None)
    assert edges == {
        ("step", "generation"): 3,
        ("step", "make_experience"): 2,
        ("step", "ppo_train"): 2,
        ("step", "broadcast"): 2,
        ("generation", "group"): 4,
        ("group", "sample"): 4 * SAMPLES,
        ("group", "reward"): 4,
        ("sample", "turn"): 4 * SAMPLES,
        ("turn", "engine request"): 4 * SAMPLES,
    }
    assert len({own.context.trace_id for own in spans if own.context is not None}) == 3


def test_beside_training_every_group_is_a_tree_of_its_own(exported: InMemorySpanExporter) -> None:
    traced_run(train__async_enable=True).run()
    found = tree(exported.get_finished_spans())
    roots = Counter(name for name, parent in found.values() if parent is None)
    assert roots == {"step": 3, "group": 4}


def test_nobody_traces_unasked() -> None:
    stop = start_tracing(None, "trainer")
    assert not is_traced()
    assert traceparent() is None
    with span("nothing"):
        pass
    stop()


def test_a_missing_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match=r"--logger.otlp_endpoint needs .*: pip install 'openrlhf-launcher\[otel\]'"):
        start_tracing(TraceTarget(endpoint="http://127.0.0.1:9/v1/traces", run="r"), "trainer")
