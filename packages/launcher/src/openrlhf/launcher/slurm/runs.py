"""What a job can run: the words after the two dashes, checked before anything waits in a queue.

A trainer, `serve_rm`, `eval`, `selfcheck` or `join` with its own words; flags alone are those of RL training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from openrlhf.launcher.command_line import finish
from openrlhf.launcher.commands import SERVE_RM, TRAIN_DPO, TRAIN_PPO_RAY, TRAIN_RM, TRAIN_SFT, Command
from openrlhf.launcher.config import EvaluationConfig, TrainPPOConfig
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import parse
from openrlhf.launcher.secret_flags import split_secret_flags
from openrlhf.launcher.slurm.het import check_groups, gpus_of, members_of, read_groups
from openrlhf.launcher.slurm.options import runtime
from openrlhf.launcher.slurm.sbatch_arguments import OptionError
from openrlhf.launcher.slurm.spec import NodeCheck, NodeSpec, PartKind
from openrlhf.launcher.subcommand_parser import split_at_dashes

RESUME = "--ckpt.load_enable"
EVAL, SELFCHECK, JOIN = "eval", "selfcheck", "join"

PARTS: dict[str, tuple[Command, PartKind]] = {
    TRAIN_PPO_RAY.name: (TRAIN_PPO_RAY, "ray"),
    TRAIN_SFT.name: (TRAIN_SFT, "ranks"),
    TRAIN_RM.name: (TRAIN_RM, "ranks"),
    TRAIN_DPO.name: (TRAIN_DPO, "ranks"),
    EVAL: (TRAIN_PPO_RAY, "ray"),
    SERVE_RM.name: (SERVE_RM, "program"),
}
"""Name -> whose flags it takes, and how its processes lie on the nodes."""


@dataclass(frozen=True)
class Run:
    """What a job runs. own: words before the flags, of `eval`; flags: of `command`."""

    name: str
    command: Command
    own: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def trains(self) -> bool:
        return self.name == self.command.name and bool(self.command.prefix)


def read_run(words: Sequence[str]) -> Run:
    """The run that stands after the two dashes. Raises OptionError for a name that is none."""
    if not words or words[0].startswith("-"):
        return Run(TRAIN_PPO_RAY.name, TRAIN_PPO_RAY, (), tuple(words))
    name, *rest = words
    if name in (SELFCHECK, JOIN):
        return Run(name, TRAIN_PPO_RAY, tuple(rest), ())
    if name not in PARTS:
        near = get_close_matches(name, known := [*PARTS, SELFCHECK, JOIN], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it may be {', '.join(known)}"
        raise OptionError(f"-- {name}: this is nothing to run; {hint}")
    own, flags = split_at_dashes(rest) if name == EVAL else ((), rest)
    return Run(name, PARTS[name][0], tuple(own), tuple(flags))


def make_part(options: argparse.Namespace, run: Run) -> NodeSpec | NodeCheck:
    """What each node does. Raises UsageError with all mistakes in the flags, OptionError for other words."""
    if run.name == JOIN:
        from openrlhf.launcher.scaling.join import read_options as read_join

        read_join(run.own)
        return NodeCheck(python_of(options), run.own, JOIN)
    return make_check(options, run.own) if run.name == SELFCHECK else make_spec(options, run)


def make_spec(options: argparse.Namespace, run: Run) -> NodeSpec:
    """The run of each node; UsageError lists the mistakes in its flags.

    Where the options say how many GPUs a node has, the rules between flags are checked too, before the job waits.
    """
    config = parse(run.command, run.flags).config
    if run.name == EVAL:
        assert isinstance(config, TrainPPOConfig)
        config = EvaluationConfig.of(config)
        if wrong := [word for word in run.own if word != "--json"]:
            raise OptionError(f"-- eval {wrong[0]}: write `-- eval -- <flags>`, or `-- eval --json -- <flags>`")
    found = read_groups(options)
    if found and PARTS[run.name][1] != "ray":
        raise OptionError(f"--het: {run.name} has one kind of node; RL training and eval can have more")
    if gpus := gpus_of(options):
        most = max([gpus, *map(gpus_of, found)])
        config, _ = finish(run.command, config, Machine(gpus=most, nodes=None if found else options.nodes))
    if found:
        assert isinstance(config, TrainPPOConfig)
        check_groups(config, options, found, gpus)
    if PARTS[run.name][1] == "program" and options.nodes != 1:
        raise OptionError(f"--nodes {options.nodes}: {run.name} is one process on one node; submit it so often")
    flags = split_secret_flags(run.flags)[0]
    module = ("openrlhf.launcher.main", EVAL, *run.own, "--") if run.name == EVAL else (f"openrlhf.cli.{run.name}",)
    return NodeSpec(
        command=(python_of(options), "-m", *module, *flags),
        part=PARTS[run.name][1],
        resume=(RESUME,) if run.trains and not config.ckpt.load_enable else (),
        checkpoints=str(Path(config.ckpt.path).expanduser().absolute()) if run.trains else "",
        max_restarts=options.max_restarts,
        port_base=options.port_base,
        temp_dir=options.temp_dir,
        interface=options.interface,
        apart=members_of(found),
        start_seconds=options.start_timeout,
    )


def make_check(options: argparse.Namespace, words: Sequence[str]) -> NodeCheck:
    """The check of each node, in a job that is never requeued. Raises OptionError for words that it does not know."""
    from openrlhf.launcher.selfcheck.command import read_options as read_check

    try:
        read_check(words)
    except ValueError as error:
        raise OptionError(f"-- selfcheck: {error}") from None
    if options.het:
        raise OptionError("--het: selfcheck has one kind of node; RL training and eval can have more")
    options.max_restarts = 0
    return NodeCheck(python_of(options), tuple(words))


def python_of(options: argparse.Namespace) -> str:
    """The interpreter on the nodes."""
    return options.python or (sys.executable if runtime(options) == "none" else "python3")
