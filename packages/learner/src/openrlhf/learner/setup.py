"""The process of a learner rank: its device, torch.distributed, random seeds.

The caller sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
from datetime import timedelta

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Numbers of glibc's mallopt(3)."""


def training_device() -> torch.device:
    """The device of this rank: its GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def prepare_environment(env: dict[str, str] | os._Environ[str], device_type: str) -> None:
    """What the libraries read from the environment when they are imported. Values already set are kept."""
    env.setdefault("LOCAL_RANK", "0")
    env.setdefault("LOCAL_WORLD_SIZE", "1")
    env.setdefault("LOCAL_SIZE", env["LOCAL_WORLD_SIZE"])
    if device_type == "cpu":
        env.setdefault("DS_ACCELERATOR", "cpu")  # transformers may import DeepSpeed, which warns that it found no other
        # Importing DeepSpeed's Muon compiles its kernels with a C++ compiler: 35 s per shape on a CPU, for nothing.
        env.setdefault("TORCHDYNAMO_DISABLE", "1")


def reuse_freed_memory() -> None:
    """Let glibc's malloc keep what is freed for what is allocated next.

    By itself it maps every large block anew and unmaps it when it is freed, so that every large tensor of every layer
    costs a fault per page: a tenth of the time in which a small model trains on a CPU. Other C libraries, and settings
    of the user's (MALLOC_..., GLIBC_TUNABLES), stay as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, -1)


def init_distributed(backend: str | None = None) -> None:
    """Join the process group of this role; does nothing when this process already has.

    backend: gloo or nccl; None takes nccl on GPUs and gloo on a CPU.
    """
    device = training_device()
    prepare_environment(os.environ, device.type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        reuse_freed_memory()
    if not dist.is_initialized():
        alone = os.environ.get("WORLD_SIZE") == "1"
        dist.init_process_group(
            backend or ("nccl" if device.type == "cuda" else "gloo"),
            timeout=COLLECTIVE_TIMEOUT,
            # bound to a device, torch splits later groups off this one, which a single rank has no use for
            device_id=device if device.type == "cuda" and not alone else None,
        )


def leave_distributed() -> None:
    """Leave the process group, so that the process ends without a warning."""
    if dist.is_initialized():
        dist.destroy_process_group()


def give_back(device: torch.device) -> None:
    """Let other processes on this device have what this one does not use."""
    if device.type == "cpu":
        return
    gc.collect()
    torch.cuda.empty_cache()


def seed_everything(seed: int, *, full_determinism: bool) -> None:
    """Seed python and torch; with full determinism also ask torch for deterministic kernels."""
    random.seed(seed)
    torch.manual_seed(seed)
    if full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # torch's switch does not reach flash attention's backward pass; transformers reads this at every call
        os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
