from __future__ import annotations

import json
import math

import pytest

from openrlhf.launcher.logging.values import finite, nan_mean


def test_b146_mean_skips_nan() -> None:
    assert nan_mean([0.5, math.nan, math.nan, 0.8, 0.6, 0.7]) == pytest.approx(0.65)
    assert nan_mean([None, 1, True, math.inf]) == 1.0
    assert math.isnan(nan_mean([math.nan]))
    assert math.isnan(nan_mean([]))


def test_b145_metrics_on_some_samples_only() -> None:
    rows = [{"a": 1.0}, {}, {"a": 3.0, "b/ü": 2.0}, {"c": math.nan, "d": None}]
    assert [nan_mean([row.get(key) for row in rows]) for key in ("a", "b/ü")] == [2.0, 2.0]
    assert math.isnan(nan_mean([row.get("c") for row in rows]))


def test_b065_finite_metrics_are_valid_json() -> None:
    metrics = finite({"a": math.nan, "b": -math.inf, "c": 1, "d": True, "e": None, "f": "text"})
    assert json.dumps(metrics, allow_nan=False) == '{"c": 1.0, "d": 1.0}'
