"""The process of a learner rank."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.learner import setup
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


FAULTS = """
import resource, torch
from openrlhf.learner.setup import reuse_freed_memory
reuse_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    tensor = torch.empty(1 << 24).fill_(1)  # 64 MiB, 16,384 pages
    del tensor
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 16384)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are those of glibc's malloc")
def test_freed_memory_is_used_again() -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))}
    done = subprocess.run([sys.executable, "-c", FAULTS], env=clean, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10  # how often its pages were new; 20 times by malloc's own rule


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", None])
def test_malloc_stays_as_the_user_has_set_it(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in [n for n in os.environ if n.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(other)
    if name is not None:
        monkeypatch.setenv(name, "1")
    asked: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *args: asked.append(args))
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    setup.reuse_freed_memory()
    assert asked == ([] if name else [(setup.MMAP_MAX, 0), (setup.TRIM_THRESHOLD, -1)])
