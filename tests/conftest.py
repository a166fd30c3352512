"""Shared by all tests: environment of the processes they start, test groups, ignored warnings of other packages.

Imported in every package's own environment, so it needs the test group only.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Before any import of torch, vLLM or Ray. Two cores are shared by test workers, learner ranks and engines.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "TORCHDYNAMO_DISABLE": "1",  # DeepSpeed's Muon would call a C++ compiler
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; vLLM would take half of the machine's memory
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_worker_niceness": "0",  # Ray's 15 starves workers on a busy machine
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "WANDB_MODE": "offline",
}.items():
    os.environ.setdefault(name, value)

settings.register_profile("any machine", deadline=None)  # W01: a slow or busy one is no failure
settings.load_profile("any machine")

# Warnings of third-party code that we can't mend: (package and version that were seen, filter). Ours stay errors.
THIRD_PARTY_WARNINGS: tuple[tuple[str, str], ...] = (
    ("torch 2.13.0, in an environment without numpy", "ignore:Failed to initialize NumPy:UserWarning"),
)


def pytest_configure(config: pytest.Config) -> None:
    for _, line in THIRD_PARTY_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep each costly group on one worker, and leave the long sweeps to `nox -s proof`."""
    for item in items:
        for group in ("stack", "ranks"):
            if item.get_closest_marker(group) and not item.get_closest_marker("xdist_group"):
                item.add_marker(pytest.mark.xdist_group(group))
    if config.option.markexpr:
        return
    proofs = [item for item in items if item.get_closest_marker("proof")]
    if proofs:
        config.hook.pytest_deselected(items=proofs)
        items[:] = [item for item in items if not item.get_closest_marker("proof")]
