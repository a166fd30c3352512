"""Liger's kernels need a GPU; here the call is checked against a stand-in for the package."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from openrlhf.learner.models import apply_liger


def model(kind: str) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(model_type=kind))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    seen: list[dict] = []
    package, patch = ModuleType("liger_kernel.transformers"), ModuleType("liger_kernel.transformers.monkey_patch")
    package._apply_liger_kernel_to_instance = lambda **kwargs: seen.append(kwargs)  # type: ignore[attr-defined]
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patch)
    return seen


def test_kernels_are_applied_without_the_head(calls: list[dict]) -> None:
    qwen = model("qwen3")
    apply_liger(qwen)
    assert calls == [{"model": qwen, "fused_linear_cross_entropy": False, "cross_entropy": False}]


def test_unknown_architecture(calls: list[dict]) -> None:
    with pytest.raises(ValueError, match="does not know 'gpt2'"):
        apply_liger(model("gpt2"))
    assert calls == []


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ValueError, match="pip install liger-kernel"):
        apply_liger(model("qwen3"))
