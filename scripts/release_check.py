"""A package whose code changed needs a new version and a changelog entry for it.

The comparison is with the merge base of origin's default branch, or, where there is none (a fresh clone,
a release build), with the package's last tag `<distribution>-v<version>`. Without either only the entry for the present
version and the ranges between siblings are checked.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agents", "core", "rollout", "learner", "launcher")
SIBLING = re.compile(r"^(openrlhf-\w+)(?:\[[\w,-]+\])?>=(\d+)\.(\d+),<(\d+)\.(\d+)$")


def main(arguments: list[str]) -> int:
    """`release_check.py [REVISION]`: compare with REVISION instead. Returns 1 and prints each fault if there is one."""
    forced = arguments[0] if arguments else None
    projects = {name: load((ROOT / "packages" / name / "pyproject.toml").read_text()) for name in PACKAGES}
    versions = {project["name"]: project["version"] for project in projects.values()}
    faults = []
    for name, project in projects.items():
        faults += range_faults(project, versions)
        if not has_entry(changelog(name), project["version"]):
            faults.append(f"packages/{name}/CHANGELOG.md has no entry '## {project['version']}'")
        base = forced or merge_base() or last_tag(project["name"])
        if base is None:
            print(f"{project['name']} {project['version']}: no earlier state to compare with")
        else:
            faults += change_faults(name, project, base)
    for fault in faults:
        print(f"release-check: {fault}", file=sys.stderr)
    return 1 if faults else 0


def change_faults(name: str, project: dict, base: str) -> list[str]:
    """What is missing for a package whose code differs from `base`; a package that is new there is fine as it is."""
    folder = f"packages/{name}"
    before = git("show", f"{base}:{folder}/pyproject.toml")
    changed = git("diff", "--name-only", base, "--", f"{folder}/src", f"{folder}/pyproject.toml")
    print(f"{project['name']} {project['version']}: {len((changed or '').split())} files differ from {base[:12]}")
    if not before or not changed:
        return []
    version = load(before)["version"]
    if as_numbers(project["version"]) > as_numbers(version):
        return []
    first = changed.split()[0]
    return [
        f"{folder} changed since {base[:12]} ({first}, ...) but its version is still {version}: raise it in "
        f"{folder}/pyproject.toml and describe the change under a new heading in {folder}/CHANGELOG.md"
    ]


def range_faults(project: dict, versions: dict[str, str]) -> list[str]:
    """Every requirement on a sibling has the form `>=X.Y,<X.Z` and allows the version in this checkout."""
    faults = []
    for requirement in project.get("dependencies", []):
        if not requirement.startswith("openrlhf-"):
            continue
        match = SIBLING.match(requirement.replace(" ", ""))
        if match is None:
            faults.append(f"{project['name']}: {requirement!r} is not of the form openrlhf-name>=X.Y,<X.Z")
            continue
        sibling, *bounds = match.groups()
        low, high = tuple(map(int, bounds[:2])), tuple(map(int, bounds[2:]))
        if not low <= as_numbers(versions[sibling])[:2] < high:
            faults.append(f"{project['name']}: {requirement!r} excludes {sibling} {versions[sibling]} of this checkout")
    return faults


def merge_base() -> str | None:
    """Where this work left origin's default branch; None where HEAD is that branch or there is no origin."""
    head, dirty = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    for upstream in ("origin/HEAD", "origin/main"):
        base = git("merge-base", "HEAD", upstream)
        if base:
            return base if base != head or dirty else None
    return None


def last_tag(distribution: str) -> str | None:
    return git("describe", "--tags", "--abbrev=0", "--match", f"{distribution}-v*")


def git(*arguments: str) -> str | None:
    """What git prints, stripped; None when it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def load(pyproject: str) -> dict:
    return tomllib.loads(pyproject)["project"]


def changelog(name: str) -> str:
    return (ROOT / "packages" / name / "CHANGELOG.md").read_text()


def has_entry(text: str, version: str) -> bool:
    """Whether there is a heading for this version with at least one line of text below it."""
    match = re.search(rf"^## \[?{re.escape(version)}\b.*\n(?P<body>(?:(?!## ).*\n?)*)", text, re.MULTILINE)
    return bool(match and match["body"].strip())


def as_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
