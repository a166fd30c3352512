"""`openrlhf-launch`: one program, a subcommand per task. A subcommand's module is imported when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches

SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("plan.command:main", "what a training command would do: placement, batches, memory"),
    "slurm": ("slurm.submit:main", "submit a training run to a Slurm cluster, or run in an allocation"),
    "local": ("command_line:local", "the same run on this machine or on a Ray that is already there"),
    "replay": ("replay.command:main", "train on the recorded batches of a run, without engines"),
    "sweep": ("slurm.sweep:main", "a Slurm job array over values of flags"),
    "scale": ("scaling.command:main", "more or fewer engines for a run that goes on"),
    "join": ("scaling.join:main", "make this machine a node of a running run, with engines"),
    "eval": ("evaluate:main", "a model on the evaluation data, without training"),
    "report": ("report.command:main", "what a run did, as one page for a browser"),
    "status": ("slurm.watch:status", "states of Slurm jobs"),
    "logs": ("slurm.watch:logs", "the log of a Slurm job"),
    "doctor": ("doctor.command:main", "what is wrong with this machine, and the fix"),
    "selfcheck": ("selfcheck.command:main", "try out what a run relies on, on this machine"),
}
"""Name -> (module:function below openrlhf.launcher that takes argv and returns the exit status, one line of help)."""

USAGE_EXIT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the words after a subcommand's name to it; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_usage() + "\n")
        return 0 if words else USAGE_EXIT
    if words[0] not in SUBCOMMANDS:
        near = get_close_matches(words[0], SUBCOMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?\n" if near else ""
        sys.stderr.write(f"openrlhf-launch: there is no subcommand {words[0]!r}; {hint}\n{_usage()}\n")
        return USAGE_EXIT
    module, function = SUBCOMMANDS[words[0]][0].split(":")
    return getattr(importlib.import_module(f"openrlhf.launcher.{module}"), function)(words[1:])


def _usage() -> str:
    rows = [f"  {name:<10} {text}" for name, (_, text) in SUBCOMMANDS.items()]
    return "\n".join(["usage: openrlhf-launch SUBCOMMAND [options]", "", *rows])


if __name__ == "__main__":
    sys.exit(main())
