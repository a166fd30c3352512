"""The process of a learner rank."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from openrlhf.learner.setup import seed_everything


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FLASH_ATTENTION_DETERMINISTIC", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")  # noted, so that it is put back
        monkeypatch.delenv(name)
    yield
    torch.use_deterministic_algorithms(False)


def test_full_determinism_reaches_flash_attention(clean: None) -> None:
    from transformers.modeling_flash_attention_utils import _process_flash_attention_kwargs

    def asked() -> object:
        arguments: dict[str, Any] = {"query_length": 4, "key_length": 4, "is_causal": True}
        known = defaultdict[str, bool](lambda: True)
        return _process_flash_attention_kwargs(**arguments, supports_mapping=known)["deterministic"]

    seed_everything(1, full_determinism=False)
    assert "FLASH_ATTENTION_DETERMINISTIC" not in os.environ
    assert asked() is False
    seed_everything(1, full_determinism=True)
    assert asked() is True  # what transformers hands to flash attention's kernels
