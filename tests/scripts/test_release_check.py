"""The release check on small repositories made for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import release_check

PROJECT = '[project]\nname = "openrlhf-{name}"\nversion = "{version}"\ndependencies = [{dependencies}]\n'


def write_package(root: Path, name: str, *, version: str = "0.1.0", dependencies: str = "", code: str = "") -> None:
    folder = root / "packages" / name
    (folder / "src").mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(PROJECT.format(name=name, version=version, dependencies=dependencies))
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0\n\n## 0.1.0\n\n- First.\n")
    (folder / "src" / "module.py").write_text(code)


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-qm", "State")


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A clone with five packages at 0.1.0, equal to its origin."""
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    origin.mkdir()
    git(origin, "init", "-q", "-b", "main")
    for name in release_check.PACKAGES:
        write_package(origin, name)
    commit(origin)
    git(tmp_path, "clone", "-q", "--single-branch", str(origin), str(clone))
    monkeypatch.setattr(release_check, "ROOT", clone)
    return clone


def test_untouched_clone_passes(root):
    assert release_check.main([]) == 0


def test_changed_code_needs_a_version(root, capsys):
    write_package(root, "core", code="x = 1\n")
    commit(root)
    assert release_check.main([]) == 1
    assert "packages/core changed" in capsys.readouterr().err


def test_uncommitted_change_counts(root):
    write_package(root, "core", code="x = 1\n")
    assert release_check.main([]) == 1


def test_new_version_needs_an_entry(root, capsys):
    write_package(root, "core", code="x = 1\n", version="0.2.0")
    assert release_check.main([]) == 1
    assert "no entry '## 0.2.0'" in capsys.readouterr().err


def test_new_version_with_entry_passes(root):
    write_package(root, "core", code="x = 1\n", version="0.1.1")
    changelog = root / "packages" / "core" / "CHANGELOG.md"
    changelog.write_text("## 0.1.1 (today)\n\n- x.\n\n" + changelog.read_text())
    commit(root)
    assert release_check.main([]) == 0


def test_lower_version_fails(root):
    write_package(root, "core", code="x = 1\n", version="0.0.9")
    assert release_check.main([]) == 1


def test_tag_is_the_base_where_origin_is_not(root):
    git(root, "tag", "openrlhf-core-v0.1.0")
    write_package(root, "core", code="x = 1\n")
    commit(root)
    git(root, "remote", "remove", "origin")
    assert release_check.main([]) == 1


def test_sibling_range_must_allow_the_checkout(root, capsys):
    write_package(root, "learner", dependencies='"openrlhf-core>=0.2,<0.3"')
    assert release_check.main([]) == 1
    assert "excludes openrlhf-core 0.1.0" in capsys.readouterr().err


@pytest.mark.parametrize("requirement", ["openrlhf-core", "openrlhf-core==0.1.0", "openrlhf-core>=0.1"])
def test_sibling_range_has_two_bounds(requirement):
    project = {"name": "openrlhf-learner", "dependencies": [requirement]}
    assert len(release_check.range_faults(project, {"openrlhf-core": "0.1.0"})) == 1
