"""How a run went, in words: for the end of the log and the top of the report."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

FIRST_AND_LAST = 10
"""The first and the last tenth of the steps are compared, one step at least."""
CLEAR = 2.0
"""A change is one where it is larger than so many standard errors of the two means."""


class Row(Protocol):
    """Metrics of a step or of an evaluation."""

    @property
    def step(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


def in_words(steps: Sequence[Row], evaluations: Sequence[Row], alarms: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """A sentence each about reward, evaluation, what went wrong and time; nothing about what was not measured."""
    sentences = [
        _reward(steps),
        *_evaluations(evaluations),
        _failures(steps),
        _skipped(steps),
        _alarms(alarms),
        _time(steps),
    ]
    return [sentence for sentence in sentences if sentence]


def _reward(steps: Sequence[Row]) -> str:
    name = next((n for n in ("train/reward", "train/acc", "train/loss") if any(n in s.metrics for s in steps)), None)
    values = [s.metrics[name] for s in steps if name in s.metrics] if name else []
    if not values:
        return ""
    what = (name or "").removeprefix("train/")
    count = max(1, len(values) // FIRST_AND_LAST)
    first, last = values[:count], values[-count:]
    over = "in the first and the last step" if count == 1 else f"over the first and the last {count} steps"
    if len(values) == 1:
        return f"The {what} was {values[0]:.3g} in the only step."
    word = _change(first, last)
    return f"The {what} {word}: {statistics.mean(first):.3g} and {statistics.mean(last):.3g} {over} of {len(values)}."


def _change(first: Sequence[float], last: Sequence[float]) -> str:
    moved = statistics.mean(last) - statistics.mean(first)
    if len(first) > 1:
        noise = (statistics.variance(first) / len(first) + statistics.variance(last) / len(last)) ** 0.5
        if abs(moved) <= CLEAR * noise:
            return "did not change beyond its noise"
    return "stayed" if moved == 0 else "rose" if moved > 0 else "fell"


def _evaluations(evaluations: Sequence[Row]) -> list[str]:
    names = sorted({name for row in evaluations for name in row.metrics if name.endswith("_pass1")})
    sentences = []
    for name in names:
        rows = [row for row in evaluations if name in row.metrics]
        dataset = name.removeprefix("eval/eval_").removesuffix("_pass1")
        best = max(rows, key=lambda row: row.metrics[name])
        told = f"Evaluation on {dataset!r}: pass@1 {rows[-1].metrics[name]:.3g} at step {rows[-1].step}"
        if len(rows) > 1:
            told += f", {rows[0].metrics[name]:.3g} at step {rows[0].step}"
        if best.metrics[name] > rows[-1].metrics[name]:
            told += f"; the best was {best.metrics[name]:.3g} at step {best.step}"
        sentences.append(told + ".")
    return sentences


def _failures(steps: Sequence[Row]) -> str:
    failed = sum(s.metrics.get("rollout/failed_samples", 0) for s in steps)
    kinds = {
        kind: sum(s.metrics.get(f"rollout/failed_samples_{kind}", 0) for s in steps)
        for kind in ("agent", "reward", "engine", "timeout")
    }
    named = ", ".join(f"{kind} {count:g}" for kind, count in kinds.items() if count)
    return f"{failed:g} samples failed ({named})." if failed else ""


def _skipped(steps: Sequence[Row]) -> str:
    skipped = sum(s.metrics.get("train/skipped_steps", 0) for s in steps)
    return f"{skipped:g} optimiser steps were skipped: their gradients were not finite." if skipped else ""


def _alarms(alarms: Sequence[Mapping[str, Any]]) -> str:
    raised = [a for a in alarms if a.get("state") == "raised"]
    if not raised:
        return ""
    names = list(dict.fromkeys(str(a.get("name")).replace("_", " ") for a in raised))
    first = min(int(a.get("step", 0)) for a in raised)
    return f"Alarms: {', '.join(names)}; the first at step {first}."


def _time(steps: Sequence[Row]) -> str:
    totals = [s.metrics["timing/step_total"] for s in steps if "timing/step_total" in s.metrics]
    if not totals:
        return ""
    phases = {
        word: statistics.mean(s.metrics.get(f"timing/{name}", 0.0) for s in steps)
        for name, word in (("generation", "sampling"), ("ppo_train", "training"), ("broadcast", "the weight push"))
    }
    longest = max(phases, key=lambda word: phases[word])
    share = phases[longest] / statistics.mean(totals)
    told = f"A step took {statistics.median(totals):.3g} s"
    return f"{told}, {share:.0%} of it {longest}." if share else f"{told}."
