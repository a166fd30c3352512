"""`openrlhf-launch doctor`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from openrlhf.launcher.doctor.checks import Finding, examine

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
