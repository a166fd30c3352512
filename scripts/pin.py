"""Write `constraints/cpu.txt` and `constraints/gpu.txt` anew: the newest versions that all packages agree on.

Run with `make constraints`. The files name versions only, no address of a registry, so they hold on any mirror.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from set_up import ROOT, VENV, uv_environment

PLATFORM = "x86_64-manylinux_2_28"
HEADER = "# Versions of the {name} set for Python 3.11, written by `make constraints`.\n"


def main() -> None:
    for name in ("cpu", "gpu"):
        target = ROOT / "constraints" / f"{name}.txt"
        target.write_text(HEADER.format(name=name) + "\n".join(versions(name)) + "\n")
        print(f"wrote {target.relative_to(ROOT)}")


def versions(name: str) -> list[str]:
    """One `package==version` a line, without local version labels such as `+cpu`."""
    command = [str(VENV / "bin" / "uv"), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--upgrade"]
    command += ["--python-version", "3.11", "--python-platform", PLATFORM, f"constraints/{name}.in", "--group", "dev"]
    overrides = Path("constraints") / f"{name}-overrides.txt"
    if (ROOT / overrides).exists():
        command += ["--override", str(overrides)]
    compiled = subprocess.run(command, cwd=ROOT, env=uv_environment(), stdout=subprocess.PIPE, text=True, check=True)
    lines = [line.partition(" ;")[0].partition("+")[0] for line in compiled.stdout.splitlines()]
    return [line for line in lines if "==" in line and not line.startswith(("-e", "./", "openrlhf"))]


if __name__ == "__main__":
    main()
