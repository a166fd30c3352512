"""Who may import whom, beyond the layers that `lint-imports` checks (pyproject.toml, `tool.importlinter`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]

# Third-party packages of each of ours, all modules together. The standard library is always allowed.
ALLOWED = {
    "agents": {"starlette", "uvicorn", "transformers", "math_verify"},  # extras: [server], [hf], [math]
    "utils": set(),
    "core": {"torch"},
    "rollout": {"torch", "vllm"},
    "learner": {"torch", "deepspeed", "transformers", "accelerate", "safetensors"},
    "launcher": {"torch", "transformers", "ray", "tyro", "httpx", "datasets", "tensorboard", "wandb", "submitit"},
    "cli": set(),
}

# Packages with one home: the modules that may import them.
HOMES = {
    "vllm": {"openrlhf.rollout.engine", "openrlhf.rollout.weights.receiver", "openrlhf.rollout.weights.sender_cuda"},
    "deepspeed": {"openrlhf.learner"},
    "ray": {"openrlhf.launcher.ray"},
    "submitit": {"openrlhf.launcher.slurm"},
    "tyro": {"openrlhf.launcher.parsing"},
    "httpx": {"openrlhf.launcher"},
}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("openrlhf", include_external_packages=True)


def test_contracts_hold():
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "pyproject.toml", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_graph_covers_every_source_file(graph):
    files = set((ROOT / "packages").glob("*/src/openrlhf/**/*.py"))
    ours = {module for module in graph.modules if module.startswith("openrlhf.")}
    assert len(ours) == len(files), "grimp misses a part of the namespace: is every package installed?"


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_third_party_imports(graph, package):
    offenders = {
        importer: sorted(strangers)
        for importer in below(graph, f"openrlhf.{package}")
        if (strangers := third_party(graph, importer) - ALLOWED[package])
    }
    assert not offenders


@pytest.mark.parametrize("library", sorted(HOMES))
def test_library_has_one_home(graph, library):
    importers = graph.find_modules_that_directly_import(library) if library in graph.modules else set()
    assert not {name for name in importers if not any(is_below(name, home) for home in HOMES[library])}


def third_party(graph: grimp.ImportGraph, importer: str) -> set[str]:
    roots = {module.partition(".")[0] for module in graph.find_modules_directly_imported_by(importer)}
    return roots - {"openrlhf"} - sys.stdlib_module_names


def below(graph: grimp.ImportGraph, package: str) -> list[str]:
    return sorted(module for module in graph.modules if is_below(module, package))


def is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
