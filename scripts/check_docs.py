"""Check the Markdown files: links, anchors and named modules lead somewhere, Python blocks compile, flags exist.

Nothing is fetched: links to other sites are not followed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

from openrlhf.launcher.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# A hierarchical flag in a command or a sentence; `--x.y` inside a word or a placeholder like `--ds.*` is none.
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+)(?![\w.*{])")

# A module or folder of ours in backquotes, from the second-level package on: `learner/weights.py`.
MODULE = re.compile(r"`((?:agents|core|rollout|learner|launcher)/[\w/]*(?:\.py|/))`")


def main() -> int:
    files = markdown_files()
    known = known_flags()
    faults = [fault for file in files for fault in check(file, known)]
    for fault in faults:
        print(f"docs: {fault}", file=sys.stderr)
    print(f"docs: {len(files)} files, {len(known)} flags known, {len(faults)} faults")
    return 1 if faults else 0


def check(file: Path, known: set[str]) -> list[str]:
    text = file.read_text()
    prose = BLOCK.sub("", text)
    where = file.relative_to(ROOT)
    faults = [f"{where}: {target!r} leads nowhere" for target in LINK.findall(prose) if not leads(file, target)]
    for _, language, code in BLOCK.findall(text):
        if language in ("python", "py") and (error := compile_error(textwrap.dedent(code))):
            faults.append(f"{where}: a Python block does not compile: {error}")
    if file.name != "CHANGELOG.md":  # speaks of the past
        faults += [f"{where}: there is no {module}" for module in MODULE.findall(prose) if not is_module(module)]
    return faults + [f"{where}: --{flag} is no flag" for flag in sorted(set(FLAG.findall(text)) - known)]


def leads(file: Path, target: str) -> bool:
    """Whether a link within the repository names an existing file, folder and heading."""
    if re.match(r"[a-z]+:", target):
        return True
    path, _, anchor = target.partition("#")
    destination = (file.parent / path).resolve() if path else file
    if not destination.exists() or ROOT not in (destination, *destination.parents):
        return False
    return not anchor or destination.is_dir() or anchor in anchors(destination.read_text())


def is_module(path: str) -> bool:
    return any((source / path).exists() for source in ROOT.glob("packages/*/src/openrlhf"))


def anchors(text: str) -> set[str]:
    """The anchors that a Markdown viewer makes of the headings."""
    plain = [re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in HEADING.findall(BLOCK.sub("", text))]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def compile_error(code: str) -> str | None:
    """Why a block is no Python, top-level `await` allowed; None when it is."""
    try:
        compile(code, "<block>", "exec", flags=0x2000)  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    except SyntaxError as error:
        return str(error)
    return None


def markdown_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for line in listed.stdout.splitlines() if (path := ROOT / line).exists()]


def known_flags() -> set[str]:
    """The flags of every command, as the launcher knows them."""
    return {flag for command in COMMANDS.values() for flag in command.flags}


if __name__ == "__main__":
    sys.exit(main())
