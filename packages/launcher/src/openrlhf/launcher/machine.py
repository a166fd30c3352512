"""What the machine offers, found without importing torch: starting a program takes no second."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FLASH_ATTENTION = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
"""Attention of transformers -> the distribution that has its kernels."""
FLASH_INSTALL = {
    "flash_attention_2": "pip install flash-attn --no-build-isolation",
    "flash_attention_3": "pip install flash-attn-3 --no-build-isolation",
    "flash_attention_4": "pip install flash-attn-4",
}


PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}
"""Part of a GPU's name -> dense bf16 TFLOP/s, as its maker states them."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware of a run. gpus: per node (0: the run uses CPUs). nodes: None if not known yet (a Ray cluster).

    flash_attention: which of `FLASH_ATTENTION` are installed; all of them where that is not known (another machine).
    """

    gpus: int
    nodes: int | None = 1
    flash_attention: frozenset[str] = frozenset(FLASH_ATTENTION)

    @property
    def total_gpus(self) -> int | None:
        """GPUs of all nodes, where known."""
        return None if self.nodes is None else self.nodes * self.gpus


def detect_machine(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Machine:
    """Count the GPUs here that the process may use; how many nodes a run gets is not known before Ray is asked."""
    for devices, variable in ((_nvidia(root), "CUDA_VISIBLE_DEVICES"), (_amd(root), "HIP_VISIBLE_DEVICES")):
        if devices:
            visible = environ.get(variable)
            gpus = devices if visible is None else min(devices, _count(visible))
            return Machine(gpus=gpus, nodes=None, flash_attention=installed_flash_attention())
    return Machine(gpus=0, nodes=None)


def peak_tflops(root: Path = Path("/")) -> float | None:
    """What one GPU of this machine can do in bf16, TFLOP/s; None where there is none, or one that is not known."""
    for about in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        model = about.read_text(encoding="utf-8", errors="replace").partition("Model:")[2].partition("\n")[0]
        return next((peak for name, peak in PEAK_TFLOPS.items() if name in model), None)
    return None


def installed_flash_attention() -> frozenset[str]:
    """The flash attention kernels of this environment, which is that of the workers too."""
    return frozenset(name for name, distribution in FLASH_ATTENTION.items() if _installed(distribution))


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def running_ray() -> str | None:
    """The address of a Ray that `ray start` left running on this machine, if it answers.

    Rays that other runs started for themselves are not found, on purpose: they write no address file in Ray's folder.
    """
    folder = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray"
    try:
        address = (folder / "ray_current_cluster").read_text().strip()
        host, port = address.rsplit(":", 1)
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except (OSError, ValueError):
        return None
    return address


def _nvidia(root: Path) -> int:
    return len([p for p in (root / "dev").glob("nvidia[0-9]*") if p.name.removeprefix("nvidia").isdigit()])


def _amd(root: Path) -> int:
    if not (root / "dev/kfd").exists():
        return 0
    return len(list((root / "dev/dri").glob("renderD*")))


def _count(visible: str) -> int:
    """Devices in a list such as `0,1`; the list ends at a negative index, as the CUDA driver reads it."""
    count = 0
    for item in visible.split(","):
        if not item.strip() or item.strip().startswith("-"):
            break
        count += 1
    return count
