"""Options of `openrlhf-launch slurm` and `sweep`: the command line, on top of a site's defaults in a TOML file."""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from openrlhf.agents.files import decode_text
from openrlhf.launcher.redaction import find_secrets
from openrlhf.launcher.slurm.names import minutes
from openrlhf.launcher.slurm.ports import BASE
from openrlhf.launcher.slurm.sbatch_arguments import (
    OptionError,
    check_arguments,
    names_of,
    replaced_by,
)

SITE_VARIABLE = "OPENRLHF_SLURM_CONFIG"
SITE_FILE = "~/.config/openrlhf/slurm.toml"
RUNTIMES = ("pyxis", "apptainer", "singularity", "none")
GPU_FORM = "gpus-per-node={}"

# Options that go to sbatch as they are: name -> help.
PASSED_ON = {
    "partition": "partition(s) to run in",
    "account": "account to charge",
    "qos": "quality of service",
    "reservation": "reservation to use",
    "constraint": "features the nodes must have",
    "nodelist": "nodes to use",
    "exclude": "nodes not to use",
    "dependency": "jobs to wait for, as afterok:123 or singleton",
    "mail-type": "events to send mail about, as END,FAIL",
    "mail-user": "address of that mail",
    "comment": "free text kept with the job",
    "gres": "generic resources per node, as gpu:h100:8",
    "gpus-per-node": "GPUs per node, as 8 or h100:8",
    "mem": "memory per node, as 200G; 0 is all of it",
    "mem-per-gpu": "memory per GPU, instead of --mem",
    "mem-per-cpu": "memory per CPU, instead of --mem",
}
REPEATED = {
    "module": "an environment module to load, as cuda/13.0, before the lines of --setup",
    "setup": "a shell line run before the launcher, as 'module load cuda'",
    "env": "a variable of the run, as NAME=VALUE; a secret one is handed on unseen",
    "sbatch-arg": "a further option of sbatch, as --sbatch-arg=--licenses=a:1 or --sbatch-arg='-L a:1'",
    "srun-arg": "a further option of srun, as --srun-arg=--mpi=none",
    "container-mount": "a mount of the container, SOURCE:TARGET[:FLAGS]",
}


def add_slurm_options(parser: argparse.ArgumentParser) -> None:
    """Everything that describes a job."""
    parser.add_argument("--site", metavar="FILE", help=f"site defaults (default: ${SITE_VARIABLE}, then {SITE_FILE})")
    parser.add_argument("--job-name", default="openrlhf", help="name of the job")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes")
    parser.add_argument("--cpus-per-task", type=int, help="CPUs per node (one task runs on each)")
    parser.add_argument("--time", default="60", help="time limit: minutes, H:M:S or D-H:M:S")
    parser.add_argument("--exclusive", action="store_true", help="share the nodes with no other job")
    parser.add_argument("--signal-delay", type=int, default=300, metavar="S", help="warn so long before the end")
    parser.add_argument("--max-restarts", type=int, default=3, help="requeues of one job; 0 turns them off")
    parser.add_argument("--container", "--container-image", dest="container", metavar="IMAGE", help="image to run in")
    parser.add_argument(
        "--container-runtime",
        choices=RUNTIMES,
        help="default: apptainer for an image that ends in .sif, else pyxis, which has its images by enroot",
    )
    parser.add_argument("--interface", default="", help="network interface that nodes reach each other by, as ib0")
    parser.add_argument(
        "--gpu-form",
        default=GPU_FORM,
        metavar="OPTION={}",
        help="how sbatch is asked for the GPUs of --gpus-per-node here, as gres=gpu:h100:{}",
    )
    parser.add_argument("--python", help="interpreter on the nodes (default: this one; in a container: python3)")
    parser.add_argument("--log-dir", default="slurm_logs", help="folder of the jobs' logs, on a shared disk")
    parser.add_argument("--temp-dir", default="", help="parent of Ray's folder on each node, 40 characters at most")
    parser.add_argument("--port-base", type=int, default=BASE, help="lowest port that jobs use")
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="S", help="for all nodes to be there")
    parser.set_defaults(het=[])
    for name, text in PASSED_ON.items():
        parser.add_argument(f"--{name}", help=text)
    for name, text in REPEATED.items():
        parser.add_argument(f"--{name}", action="append", default=[], metavar="X", help=f"{text} (may be repeated)")


def read_options(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv` over the site's defaults and check the result. Raises OptionError."""
    given, _ = parser.parse_known_args(argv)
    replaced = {name.replace("-", "_") for name in replaced_by(_given_names(given))}
    defaults = site_defaults(parser, given.site)
    parser.set_defaults(**{name: value for name, value in defaults.items() if name not in replaced})
    options = parser.parse_args(argv)
    check(options, defaults)
    return options


def _given_names(given: argparse.Namespace) -> set[str]:
    """The options of a job that stand on the command line."""
    own = {name for name in PASSED_ON if getattr(given, name.replace("-", "_")) is not None}
    return own | names_of(given.sbatch_arg) | ({"exclusive"} if given.exclusive else set())


def site_defaults(parser: argparse.ArgumentParser, given: str | None) -> dict[str, object]:
    """The values of the site's file, keyed like the options with `_`; none where there is no file."""
    path = Path(given or os.environ.get(SITE_VARIABLE) or SITE_FILE).expanduser()
    if not path.is_file():
        if given or os.environ.get(SITE_VARIABLE):
            raise OptionError(f"there is no file {str(path)!r} (--site or ${SITE_VARIABLE})")
        return {}
    try:
        values = tomllib.loads(decode_text(path.read_bytes()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{str(path)!r} is no TOML file: {error}") from None
    actions = {action.dest: action for action in parser._actions if action.dest not in ("site", "help")}
    return {_known(key, actions, path): _typed(key, value, actions, path) for key, value in values.items()}


def _known(key: str, actions: Mapping[str, argparse.Action], path: Path) -> str:
    """The option's name with `_`. Raises OptionError with the nearest one."""
    name = key.replace("-", "_")
    if name not in actions:
        near = get_close_matches(name, actions, n=1)
        hint = f"did you mean {near[0].replace('_', '-')!r}?" if near else f"it may set {', '.join(sorted(actions))}"
        raise OptionError(f"{str(path)!r} has no option {key!r} to set; {hint}")
    return name


def _typed(key: str, value: object, actions: Mapping[str, argparse.Action], path: Path) -> object:
    """The value. Raises OptionError where it is of another type than the option's, or none of its choices."""
    action = actions[key.replace("-", "_")]
    default = action.default
    wanted = list if isinstance(default, list) else bool if isinstance(default, bool) else action.type or str
    fits = type(value) in ((int, float) if wanted is float else (wanted,))
    if not fits:
        raise OptionError(f"{str(path)!r}: {key} = {value!r} must be of type {getattr(wanted, '__name__', wanted)}")
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        raise OptionError(f"{str(path)!r}: {key} = {value!r} must be a list of texts")
    if action.choices is not None and value not in action.choices:
        raise OptionError(f"{str(path)!r}: {key} = {value!r} must be one of {', '.join(action.choices)}")
    return value


def runtime(options: argparse.Namespace) -> str:
    """Which container runtime the run uses; `none` without an image."""
    if not options.container:
        return "none"
    return options.container_runtime or ("apptainer" if options.container.endswith(".sif") else "pyxis")


def check(options: argparse.Namespace, defaults: Collection[str] = ()) -> None:
    """Raises OptionError for values that Slurm would misread or accept silently.

    defaults: what a site's file sets; a mount there is for those jobs that run in a container.
    """
    for name, value in vars(options).items():
        for text in value if isinstance(value, list) else [value]:
            option = f"--{name.replace('_', '-')}"
            if isinstance(text, str) and name not in ("env", "set") and any(find_secrets(name, text)):
                way = "give it as --env NAME=VALUE, which hands it on unseen"
                raise OptionError(f"{option}: this secret would stand in the batch script; {way}")
            if isinstance(text, str) and name != "setup" and ("\n" in text or "\0" in text):
                raise OptionError(f"{option} {text!r} holds a line break: give one line")
    if options.nodes < 1:
        raise OptionError(f"--nodes {options.nodes!r} must be at least 1")
    try:
        limit = minutes(options.time)
    except ValueError as error:
        raise OptionError(f"--time: {error}") from None
    if options.signal_delay >= limit * 60:
        raise OptionError(f"--signal-delay {options.signal_delay!r} s is not shorter than --time {options.time!r}")
    for item in options.env:
        name, equals, _ = item.partition("=")
        if not equals or not name.isidentifier():  # the value may be secret
            raise OptionError(f"--env {' '.join(name.split()[:1])}...: this is no NAME=VALUE")
    if options.container_mount and not options.container and "container_mount" not in defaults:
        raise OptionError("--container-mount needs --container IMAGE")
    if not re.fullmatch(r"(gpus-per-node|gpus-per-task|gres)=[^{}]*\{\}", options.gpu_form):
        raise OptionError(f"--gpu-form {options.gpu_form!r}: write gpus-per-node={{}} or gres=gpu:TYPE:{{}}")
    if options.interface and not re.fullmatch(r"[\w.:@-]{1,15}", options.interface):
        raise OptionError(f"--interface {options.interface!r} is no name of a network interface, such as ib0 or eth0")
    check_arguments(options, PASSED_ON)
