"""`openrlhf-launch doctor`."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from openrlhf.launcher.doctor import checks
from openrlhf.launcher.doctor.checks import Finding
from openrlhf.launcher.doctor.selfchecked import selfchecked

MARKS = {"ok": "ok     ", "warning": "warning", "error": "ERROR  "}


def main(argv: Sequence[str]) -> int:
    """Print what was found. Returns 1 if something is an error, else 0."""
    parser = argparse.ArgumentParser(
        prog="openrlhf-launch doctor", description="What is wrong with this machine, and the fix."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    findings = examine()
    sys.stdout.write((json.dumps([asdict(f) for f in findings], indent=1) if options.json else text(findings)) + "\n")
    return int(any(f.level == "error" for f in findings))


def text(findings: Sequence[Finding]) -> str:
    """A line per finding, its fix below."""
    lines = []
    for finding in findings:
        lines.append(f"{MARKS[finding.level]} {finding.what}")
        if finding.fix:
            lines.append(f"        fix: {finding.fix}")
    return "\n".join(lines)


def examine() -> list[Finding]:
    """All checks on this machine."""
    from openrlhf.launcher.machine import detect_machine
    from openrlhf.launcher.selfcheck import record

    installed, broken = checks.distributions(metadata.distributions())
    root = (installed["openrlhf"], metadata.requires("openrlhf") or []) if "openrlhf" in installed else None
    requirements = {name: metadata.requires(name) or [] for name in checks.OURS if name in installed}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gpus = detect_machine({}).gpus
    amd = gpus if Path("/dev/kfd").exists() and not Path("/dev/nvidia0").exists() else 0
    shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return [
        Finding(level="ok", what=f"Python {sys.version.split()[0]}"),
        *checks.packages(installed),
        *broken,
        *checks.versions(installed, requirements),
        *checks.foreign_openrlhf(root, sys.path, Path.cwd()),
        *checks.accelerators(gpus - amd, amd, os.environ),
        *checks.set_on_machine([name for name in checks.SETS if name in installed], gpus),
        *selfchecked(record.load(record.path()), record.surroundings(), gpus),
        *checks.limits(soft, hard, shm),
        *checks.ray_surroundings(os.environ, Path.home(), checks.port_taken(checks.AGENT_PORT)),
        *checks.slurm_programs({name: shutil.which(name) for name in checks.SLURM}),
    ]
