"""Numbers of metrics: means that skip what is missing, and values that any JSON reader takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat


def nan_mean(values: Iterable[float | None]) -> float:
    """The mean of the values that are there and finite; NaN when none is."""
    finite = [float(v) for v in values if v is not None and math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def sum_metrics(*parts: Mapping[str, float]) -> dict[str, float]:
    """All metrics of the parts; what several of them counted is added up."""
    total: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among the metrics, as plain floats: what a chart can show and JSON can hold."""
    return {
        key: float(value)
        for key, value in metrics.items()
        if isinstance(value, SupportsFloat) and math.isfinite(float(value))
    }
