"""Check what only GPU runs use, on a machine without one, against the GPU builds in a folder of their own.

Run by `nox -s gpu-set`: `check_gpu_set.py SITE`, with SITE first on PYTHONPATH. Imports every module of ours with those
builds in the place of their CPU builds, then lets pyright read the modules that speak to them. What can't be checked
without CUDA is named.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from check_install import below, importable
from pin import ROOT, parse

LIBRARIES = ("vllm", "bitsandbytes", "liger-kernel")
"""Wheels of the GPU set that install without CUDA, and of which modules of ours use more than torch does."""
IMPORT_NAMES = {"vllm", "bitsandbytes", "liger_kernel", "flash_attn"}
EXTRAS = {"verifiers", "pytest"}
"""Packages of extras, which neither set installs."""
NOT_CHECKED = (
    "flash-attn: there is no wheel, it is built from source on the machine with the GPU",
    "Liger's kernels: types only, running them needs triton and a GPU",
    "CUDA kernels of vllm and bitsandbytes: loading them needs CUDA's libraries",
)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("site", type=Path)
    site: Path = parser.parse_args().site.resolve()
    faults = [*wrong_versions(site), *import_all()]
    speakers = speaking_modules()
    faults += wrong_types(site, speakers)
    for fault in faults:
        print(fault, file=sys.stderr)
    for line in NOT_CHECKED:
        print(f"not checked: {line}")
    return 1 if faults else 0


def wrong_versions(site: Path) -> list[str]:
    """The folder holds the pinned builds, and they are what Python imports."""
    pins = parse((ROOT / "constraints" / "gpu.txt").read_text())
    faults = []
    for name in LIBRARIES:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            faults.append(f"{name} is not installed")
            continue
        if found != pins[name]:
            faults.append(f"{name} {found} is installed, constraints/gpu.txt says {pins[name]}")
        spec = importlib.util.find_spec(name.replace("-", "_"))
        if spec is None or site not in Path(spec.origin or "").resolve().parents:
            faults.append(f"{name} is imported from {spec and spec.origin}, not from {site}")
    return faults


def import_all() -> list[str]:
    """What is wrong with the modules of ours that don't import."""
    faults, count = [], 0
    for package in ("agents", "core", "rollout", "learner", "launcher", "utils", "cli"):
        for module in below(f"openrlhf.{package}"):
            try:
                count += importable(module, EXTRAS)
            except Exception as error:
                faults.append(f"{module} does not import: {type(error).__name__}: {error}")
    print(f"imported {count} modules with vllm {importlib.metadata.version('vllm')}")
    return faults


def speaking_modules() -> list[Path]:
    """Source files that import one of the libraries, at the top or in a function."""
    sources = sorted((ROOT / "packages").glob("*/src/openrlhf/**/*.py"))
    return [path for path in sources if imported_roots(path.read_text()) & IMPORT_NAMES]


def imported_roots(source: str) -> set[str]:
    """First parts of the names of all modules that a source imports."""
    roots = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.partition(".")[0])
    return roots


def wrong_types(site: Path, files: list[Path]) -> list[str]:
    """Pyright's errors in these files with the folder's builds."""
    config = {
        "include": [str(path.relative_to(ROOT)) for path in files],
        "extraPaths": [str(site.relative_to(ROOT))],
        "pythonVersion": "3.11",
        "typeCheckingMode": "standard",
        "venvPath": ".",
        "venv": ".venv",
    }
    written = ROOT / ".gpu-set-pyright.json"  # at the root, to which its paths are relative
    written.write_text(json.dumps(config))
    try:
        done = subprocess.run(
            ["pyright", "--project", str(written), "--outputjson"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        written.unlink()
    report = json.loads(done.stdout)
    errors = [entry for entry in report["generalDiagnostics"] if entry["severity"] == "error"]
    print(f"types: {report['summary']['filesAnalyzed']} files, {len(errors)} errors")
    return [f"{e['file']}:{e['range']['start']['line'] + 1}: {e['message']}" for e in errors]


if __name__ == "__main__":
    sys.exit(main())
