"""The documentation: generated pages are fresh, every command in every page parses, the site lists every page."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.commands import COMMANDS, TRAIN_PPO_RAY, Command
from openrlhf.launcher.parsing import parse
from openrlhf.launcher.slurm.runs import SELFCHECK, read_run
from openrlhf.launcher.subcommand_parser import split_at_dashes

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("packages/*/README.md")])
BLOCK = re.compile(r"^ *```(?:bash|sh|shell|console)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)

OURS = re.compile(r"^--|openrlhf\.cli\.|openrlhf-launch |examples/scripts/")
"""Lines that are ours to parse; others may be parts of a quotation over several lines."""


def commands(text: str) -> list[tuple[Command, list[str]]]:
    """Every command line of ours in a page's shell blocks: a whole command, or a line of flags of train_ppo_ray."""
    found: list[tuple[Command, list[str]]] = []
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if not OURS.search(line):
                continue
            words = shlex.split(line, comments=True)
            modules = [w for w in words if w.startswith("openrlhf.cli.")]
            if words and words[0].startswith("--"):
                found.append((TRAIN_PPO_RAY, words))
            elif modules:
                found.append((COMMANDS[modules[0].removeprefix("openrlhf.cli.")], words[words.index(modules[0]) + 1 :]))
            elif words and words[0] == "openrlhf-launch" and "--" in words:
                run = read_run(split_at_dashes(words)[1])
                found += [(run.command, list(run.flags))] if run.name != SELFCHECK else []
            elif words and words[0] in ("bash", "sbatch"):
                found += [
                    (COMMANDS.get(Path(w).stem, TRAIN_PPO_RAY), words[i + 1 :])
                    for i, w in enumerate(words)
                    if w.startswith("examples/scripts/")
                ]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_parses(page: Path) -> None:
    for command, words in commands(page.read_text(encoding="utf-8")):
        flags = [word for word in words if word != "..."] if "--config" not in words else []
        assert parse(command, flags).given <= command.flags.keys()


def test_commands_are_found() -> None:
    text = (ROOT / "docs" / "rl_training.md").read_text(encoding="utf-8")
    assert [command.name for command, _ in commands(text)].count("train_ppo_ray") > 5
    assert "serve_rm" in [command.name for command, _ in commands(text)]


def test_generated_pages_are_fresh() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "flag_docs.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_site_lists_every_page() -> None:
    site = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(leaves(site["nav"])) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [leaf for item in (nav.values() if isinstance(nav, dict) else nav) for leaf in leaves(item)]


def test_toml_examples_are_configuration_files(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "rl_training.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "run.toml").write_text(example, encoding="utf-8")
    assert parse(TRAIN_PPO_RAY, ["--config", str(tmp_path / "run.toml")]).config.actor.adam.lr == 5e-7
