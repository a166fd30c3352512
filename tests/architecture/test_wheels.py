"""What the built distributions hold: the package, its licence and nothing that belongs to a sibling."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("wheels")  # build them once
ROOT = Path(__file__).resolve().parents[2]
# Distribution -> second-level packages that its wheel holds.
OWNED = {
    "agents": {"agents", "utils"},
    "core": {"core"},
    "rollout": {"rollout"},
    "learner": {"learner"},
    "launcher": {"cli", "launcher"},
}
# What lies beside the namespace: what torch calls when it is imported.
TOP = {"rollout": {"_openrlhf_torchvision.py"}}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, zipfile.ZipFile]:
    """Built by hatchling through uv, one after another; the root distribution is called `root`."""
    target = tmp_path_factory.mktemp("wheels")
    uv = Path(sys.executable).with_name("uv")
    for folder in (".", *(f"packages/{name}" for name in OWNED)):
        command = [uv, "build", "--quiet", "--wheel", "--out-dir", target, folder]
        subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
    found = {
        path.name.partition("-")[0].removeprefix("openrlhf_"): zipfile.ZipFile(path) for path in target.glob("*.whl")
    }
    return {("root" if name == "openrlhf" else name): wheel for name, wheel in found.items()}


def module_files(wheel: zipfile.ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if ".dist-info/" not in name]


@pytest.mark.parametrize("name", sorted(OWNED))
def test_wheel_holds_its_own_packages(wheels, name):
    files = module_files(wheels[name])
    top = TOP.get(name, set())
    assert {path.split("/")[0] for path in files} == {"openrlhf"} | top
    assert {path.split("/")[1] for path in files if path not in top} == OWNED[name]
    assert "openrlhf/__init__.py" not in files
    assert {f"openrlhf/{package}/py.typed" for package in OWNED[name]} <= set(files)


@pytest.mark.parametrize("name", sorted(OWNED))
def test_wheel_holds_every_source_file(wheels, name):
    source = ROOT / "packages" / name / "src"
    tracked = subprocess.run(["git", "ls-files", "."], cwd=source, capture_output=True, text=True, check=True)
    assert set(tracked.stdout.splitlines()) <= set(module_files(wheels[name]))


def test_root_wheel_holds_no_module(wheels):
    assert module_files(wheels["root"]) == []


@pytest.mark.parametrize("name", ["root", *sorted(OWNED)])
def test_wheel_carries_the_licence(wheels, name):
    assert [path for path in wheels[name].namelist() if path.endswith("licenses/LICENSE")]
