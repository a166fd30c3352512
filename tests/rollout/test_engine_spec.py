"""What `--vllm.sync_backend` means on a machine."""

from __future__ import annotations

import pytest

from openrlhf.rollout.engine_spec import resolve_sync_backend


@pytest.mark.parametrize(
    ("requested", "has_gpu", "colocated", "expected"),
    [
        ("auto", False, False, "gloo"),
        ("nccl", False, True, "gloo"),
        ("ipc", False, False, "gloo"),
        ("auto", True, False, "nccl"),
        ("auto", True, True, "ipc"),
        ("nccl", True, True, "ipc"),
        ("nccl", True, False, "nccl"),
        ("ipc", True, True, "ipc"),
        ("gloo", True, False, "gloo"),
    ],
)
def test_sync_backend(requested: str, has_gpu: bool, colocated: bool, expected: str) -> None:
    assert resolve_sync_backend(requested, has_gpu=has_gpu, colocated=colocated) == expected


def test_impossible_sync_backends() -> None:
    with pytest.raises(ValueError, match=r"--vllm.sync_backend ipc needs .* --train.colocate_all"):
        resolve_sync_backend("ipc", has_gpu=True, colocated=False)
    with pytest.raises(ValueError, match="got 'mpi'"):
        resolve_sync_backend("mpi", has_gpu=True, colocated=False)
