"""`--sbatch-arg` and `--srun-arg`: options of Slurm without an option of our own, and which of them contradict."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence

from openrlhf.launcher.slurm.names import count_gpus, expand_nodes, gpus_of_gres


class OptionError(ValueError):
    """A mistake in the options of a subcommand; the message is for the user."""


SHORT = {
    "A": "account",
    "a": "array",
    "B": "extra-node-info",
    "b": "begin",
    "C": "constraint",
    "c": "cpus-per-task",
    "D": "chdir",
    "d": "dependency",
    "e": "error",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "h": "help",
    "i": "input",
    "J": "job-name",
    "k": "no-kill",
    "L": "licenses",
    "M": "clusters",
    "m": "distribution",
    "N": "nodes",
    "n": "ntasks",
    "O": "overcommit",
    "o": "output",
    "p": "partition",
    "Q": "quiet",
    "q": "qos",
    "S": "core-spec",
    "s": "oversubscribe",
    "t": "time",
    "V": "version",
    "v": "verbose",
    "W": "wait",
    "w": "nodelist",
    "x": "exclude",
}
"""sbatch's short options; a batch script is written with the long ones."""
SHORT_OF_SRUN = {
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "K": "kill-on-bad-exit",
    "W": "wait",
    "o": "output",
}
SWITCHES = frozenset(
    [
        "contiguous",
        "exclusive",
        "get-user-env",
        "help",
        "hold",
        "ignore-pbs",
        "kill-on-invalid-dep",
        "no-kill",
        "no-requeue",
        "overcommit",
        "oversubscribe",
        "parsable",
        "quiet",
        "reboot",
        "requeue",
        "spread-job",
        "test-only",
        "use-min-nodes",
        "verbose",
        "version",
        "wait",
    ]
)
"""Options that stand without a value."""
OWN = {
    **{name: f"--{name}" for name in ("nodes", "time", "cpus-per-task", "job-name", "exclusive")},
    "ntasks": "nothing: one task runs on each node",
    "ntasks-per-node": "nothing: one task runs on each node",
    "output": "--log-dir",
    "error": "--log-dir",
    "open-mode": "nothing: logs are appended to",
    "signal": "--signal-delay",
    "requeue": "--max-restarts",
    "no-requeue": "--max-restarts 0",
    "array": "`openrlhf-launch sweep`, with a folder for every run: one training in one folder is no array",
    "wait": "--wait",
    "test-only": "--test-only",
    "parsable": "--parsable",
    "wrap": "nothing: the script is written by this program",
    "help": "--help",
    "version": "`sbatch --version`",
}
"""Options of sbatch that this program sets itself -> what to use instead."""
OWN_OF_SRUN = {
    **{name: f"--{name}" for name in ("nodes", "cpus-per-task")},
    "ntasks": "nothing: one task runs on each node",
    "ntasks-per-node": "nothing: one task runs on each node",
    "kill-on-bad-exit": "nothing: the nodes end each other in order",
    "wait": "nothing: the nodes end each other in order",
    "output": "--log-dir",
    "container-image": "--container",
    "container-mounts": "--container-mount",
}
EXCLUSIVE = (
    (("mem", "mem-per-gpu", "mem-per-cpu"), "memory is given in one way"),
    (("gpus-per-node", "gpus-per-task", "gres"), "the GPUs of a node are given in one way"),
    (("cpus-per-task", "cpus-per-gpu"), "CPUs are given in one way"),
    (("exclusive", "oversubscribe"), "nodes are shared or they are not"),
)
"""Options of which a job has one at most."""


def sbatch_arguments(words: Iterable[str]) -> dict[str, str | bool]:
    """Long name -> value, True for a switch. Takes `--name=value`, `--name value`, `-X value`, `-Xvalue`.

    Raises OptionError for what is no option of sbatch, or has no value.
    """
    found: dict[str, str | bool] = {}
    for word in words:
        name, value = _name_and_value("--sbatch-arg", word.strip(), SHORT)
        if not name:
            raise OptionError(f"--sbatch-arg {word!r}: {word[:2]!r} is no option of sbatch: give its long name")
        if name in SWITCHES and not (value and name in ("exclusive", "oversubscribe", "no-kill", "get-user-env")):
            if value:
                raise OptionError(f"--sbatch-arg {word!r}: --{name} is a switch and takes no value")
            found[name] = True
        elif value is None or not value:
            raise OptionError(f"--sbatch-arg {word!r}: --{name} needs a value, as --sbatch-arg=--{name}=VALUE")
        else:
            found[name] = value
    return found


def check_arguments(options: argparse.Namespace, passed_on: Iterable[str]) -> None:
    """Raises OptionError for options of Slurm that contradict each other, before Slurm is asked."""
    extra = sbatch_arguments(options.sbatch_arg)
    own = {name: getattr(options, name.replace("-", "_")) for name in passed_on}
    own = {name: value for name, value in own.items() if value is not None}
    for name, value in extra.items():
        if name in OWN:
            raise OptionError(f"--sbatch-arg {_spelled(name, value)}: use {OWN[name]}")
        if name in own and own[name] != value:
            raise OptionError(f"--{name} {own[name]!r} and --sbatch-arg {_spelled(name, value)} contradict: give one")
    for word in options.srun_arg:
        name, value = _name_and_value("--srun-arg", word.strip(), SHORT_OF_SRUN)
        if name in OWN_OF_SRUN:
            raise OptionError(f"--srun-arg {_spelled(name, value or True)}: use {OWN_OF_SRUN[name]}")
    asked: dict[str, str | bool] = {**own, **extra}
    if options.cpus_per_task:
        asked["cpus-per-task"] = str(options.cpus_per_task)
    if options.exclusive:
        asked["exclusive"] = True
    _check_exclusive(asked)
    _check_gpus(asked, options.nodes)
    _check_nodes(asked)


def _check_exclusive(asked: Mapping[str, str | bool]) -> None:
    for names, reason in EXCLUSIVE:
        given = [name for name in names if name in asked and (name != "gres" or gpus_of_gres(str(asked[name])))]
        if len(given) > 1:
            both = " and ".join(_spelled(name, asked[name]) for name in given)
            raise OptionError(f"{both} exclude each other ({reason}): give one of them")


def _check_gpus(asked: Mapping[str, str | bool], nodes: int) -> None:
    which = "gpus-per-node" if "gpus-per-node" in asked else "gres"
    per_node = gpus_of_gres(str(asked.get(which, ""))) if which == "gres" else count_gpus(str(asked[which]))
    if "gpus" in asked and per_node and count_gpus(str(asked["gpus"])) != per_node * nodes:
        both = f"{_spelled('gpus', asked['gpus'])} and {_spelled(which, asked[which])}"
        raise OptionError(f"{both} contradict on --nodes {nodes}: leave --gpus out")


def _check_nodes(asked: Mapping[str, str | bool]) -> None:
    lists = [asked.get(name) for name in ("nodelist", "exclude")]
    if not all(isinstance(text, str) and "/" not in text for text in lists):
        return  # one of them is absent, or a file
    try:
        wanted, refused = (set(expand_nodes(str(text))) for text in lists)
    except ValueError as error:
        raise OptionError(f"--nodelist or --exclude: {error}") from None
    if both := sorted(wanted & refused):
        raise OptionError(f"--nodelist and --exclude both name {', '.join(both)}")


def _name_and_value(option: str, word: str, short: Mapping[str, str]) -> tuple[str, str | None]:
    """The long name, empty where `short` does not know it, and the value."""
    if word.startswith("--") and len(word) > 2:
        return _cut(word[2:])
    if word.startswith("-") and len(word) > 1:
        return short.get(word[1], ""), word[2:].strip().removeprefix("=").strip() or None
    raise OptionError(f"{option} {word!r} is no option: write it with its dashes, as {option}=--licenses=a:1")


def _cut(text: str) -> tuple[str, str | None]:
    """`name=value` and `name value`."""
    for i, char in enumerate(text):
        if char in "= ":
            return text[:i], text[i + 1 :].strip()
    return text, None


def _spelled(name: str, value: str | bool) -> str:
    return f"--{name}" if value is True else f"--{name}={value}"


def replaced_by(given: Iterable[str]) -> set[str]:
    """The options of a site's file that these of the command line replace: of each kind a job has one."""
    names = set(given)
    return {other for group, _ in EXCLUSIVE if names & set(group) for other in group} - names


def names_of(words: Sequence[str]) -> set[str]:
    """The long names of a list of `--sbatch-arg`."""
    return set(sbatch_arguments(words))
