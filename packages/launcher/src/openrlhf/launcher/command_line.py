"""What every trainer's main does before its work: parse, resolve, check, say what is surprising."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from openrlhf.launcher.commands import SERVE_RM, TRAIN_PPO_RAY, Command, unsupported
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import values_of
from openrlhf.launcher.help_text import help_text
from openrlhf.launcher.machine import Machine, detect_machine, running_ray
from openrlhf.launcher.parsing import Parsed, UsageError, parse, wants_help
from openrlhf.launcher.redaction import find_secrets, redact, redact_uncaught, remember, remember_variables
from openrlhf.launcher.saved import config_toml, keep_run_name
from openrlhf.launcher.secret_flags import take_secret_flags
from openrlhf.launcher.subcommand_parser import SubcommandParser, split_at_dashes

if TYPE_CHECKING:
    from openrlhf.launcher.rules.violation import Violation

USAGE_EXIT = 2
WARNING = "warning: "
"""What lines to print before the work start with where something is probably not meant."""


def prepare(command: Command, argv: Sequence[str], machine: Machine) -> tuple[Any, list[str]]:
    """The configuration that runs and the lines to print before it does; UsageError lists everything wrong."""
    return finish(command, parse(command, argv).config, machine)


def finish(command: Command, asked: Any, machine: Machine) -> tuple[Any, list[str]]:
    """Resolve and check a parsed configuration; UsageError lists everything wrong, unsupported flags too."""
    config, violations, notes = check_config(command, asked, machine)
    remember(secret for name, value in values_of(asked).items() for secret in find_secrets(name, value))
    if problems := [*unsupported(command, asked, config), *(str(v) for v in violations)]:
        raise UsageError(problems)
    return config, notes


def check_config(command: Command, asked: Any, machine: Machine) -> tuple[Any, list[Violation], list[str]]:
    """The resolved configuration, the rules that it breaks, and the lines to print before the work."""
    # the rules ask the code that they speak of, which help texts and misspelt flags need not wait for
    from openrlhf.launcher.resolve import resolve, resolve_serve_rm, resolve_supervised
    from openrlhf.launcher.rules.check import (
        check_ranges,
        check_rules,
        check_serve_rules,
        check_supervised_rules,
        warnings_of,
    )

    if command is TRAIN_PPO_RAY:
        config, notes = resolve(asked, machine)
        warnings = [f"{WARNING}{text}" for text in warnings_of(config, machine)]
        return config, check_rules(config, machine), [*notes, *warnings]
    if command.prefix:
        config, notes = resolve_supervised(asked, machine, prefix=command.prefix)
        return config, check_supervised_rules(config, machine), notes
    if command is SERVE_RM:
        config, notes = resolve_serve_rm(asked, machine)
        return config, check_serve_rules(config, machine), notes
    return asked, check_ranges(asked, machine), []


def run_command(
    command: Command,
    argv: Sequence[str] | None,
    start: Callable[[Any], int],
    *,
    read_as: Callable[[Any], Any] | None = None,
) -> int:
    """The main of a trainer: exit status 2 with every mistake listed, else what `start(config)` returns.

    read_as: from the command's configuration to another one, where the same flags start something else.
    """
    argv = [*(sys.argv[1:] if argv is None else argv), *take_secret_flags(os.environ)]
    remember_variables(os.environ)
    redact_uncaught()
    if wants_help(argv):
        sys.stdout.write(help_text(command) + "\n")
        return 0
    try:
        parsed = parse(command, argv)
        machine = _machine_of(command, parsed)
        asked = keep_run_name(parsed.config) if command is TRAIN_PPO_RAY or command.prefix else parsed.config
        config, notes = finish(command, asked if read_as is None else read_as(asked), machine)
    except UsageError as error:
        sys.stderr.write(usage_message(command, error) + "\n")
        return USAGE_EXIT
    if parsed.print_config:
        sys.stdout.write(config_toml(command, config))
        return 0
    for note in notes if os.environ.get("RANK", "0") == "0" else ():  # once, not by every rank of a launcher
        sys.stderr.write(redact(note) + "\n")
    return start(config)


def train_ppo_ray(argv: Sequence[str] | None = None) -> int:
    """The main of RL training: parse the command line and train; returns the exit status."""
    return run_command(TRAIN_PPO_RAY, argv, _train_ppo)


def local(argv: Sequence[str]) -> int:
    """`openrlhf-launch local [--address HOST:PORT] -- <flags of train_ppo_ray>`: the run of `slurm`, here.

    On the Ray of --address, a running one on this machine, or an own one. Returns the exit status.
    """
    own, flags = split_at_dashes(argv)
    parser = SubcommandParser(
        "local",
        "Train on this machine, or on a Ray cluster that is already there.",
        "%(prog)s [options] -- <flags of train_ppo_ray>",
    )
    parser.add_argument("--address", help="address of a running Ray, HOST:PORT")
    options = parser.parse_args(own)
    if options.address:
        os.environ["RAY_ADDRESS"] = options.address
    return train_ppo_ray(flags)


def _train_ppo(config: TrainPPOConfig) -> int:
    from openrlhf.launcher.run import train_ppo  # imports torch: --help must not

    return train_ppo(config)


def train_supervised(config: Any) -> int:
    """Supervised or preference training with a resolved configuration; returns the exit status."""
    from openrlhf.launcher.supervised.run import train_supervised as train  # imports torch: --help must not

    return train(config)


def _machine_of(command: Command, parsed: Parsed[Any]) -> Machine:
    """What the run will use: the GPUs of the Ray that it joins, else those of this machine.

    A run that starts its own Ray has this one node; how many it will have is open where nothing runs.
    """
    if command is not TRAIN_PPO_RAY:
        return detect_machine()
    if os.environ.get("RAY_ADDRESS") or running_ray():
        from openrlhf.launcher.ray.cluster import running_machine  # takes seconds: only where there is a Ray

        return running_machine() or detect_machine()
    return detect_machine() if parsed.print_config else replace(detect_machine(), nodes=1)


def usage_message(command: Command, error: UsageError) -> str:
    """All mistakes of a command line, one paragraph each."""
    count = len(error.problems)
    head = f"{command.name}: {count} mistakes in the command line" if count > 1 else f"{command.name}:"
    return "\n".join([head, *(f"  {problem}" for problem in error.problems), f"Flags: {command.program} --help"])
