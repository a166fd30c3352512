"""Every command of the documentation and of the example scripts, as it stands, on the devices it is said to need."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from openrlhf.launcher.command_line import finish, prepare
from openrlhf.launcher.commands import COMMANDS, TRAIN_PPO_RAY
from openrlhf.launcher.config import EvaluationConfig
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.main import SUBCOMMANDS, main
from openrlhf.launcher.parsing import parse
from openrlhf.launcher.saved import config_toml
from openrlhf.launcher.subcommand_parser import split_at_dashes
from support.example_scripts import SCRIPTS, script_calls

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("packages/*/README.md")])
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELLS = ("bash", "sh", "shell", "console")
SAID = re.compile(r"\b(\d+) GPUs?\b")
NODES = re.compile(r"\b[Tt]wo nodes\b|--nodes[= ]2\b")
MODELS = (
    "--actor.model_name_or_path",
    "--critic.model_name_or_path",
    "--reward.model_name_or_path",
    "--ref.model_name_or_path",
)
TINY = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "vocab_size": 261,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Line:
    """One line of a shell block. said: the text before it, back to the last block."""

    words: list[str]
    said: str

    @property
    def module(self) -> str | None:
        return next((w.removeprefix("openrlhf.cli.") for w in self.words if w.startswith("openrlhf.cli.")), None)

    @property
    def machine(self) -> Machine:
        """The devices that the text, or the line itself, says."""
        own = [self.words[i + 1] for i, w in enumerate(self.words) if w in ("--gpus", "--gpus-per-node")]
        said = [*SAID.findall(self.said), *own]
        assert said, f"the text before this command says no `N GPUs` (`1 GPU`): {shlex.join(self.words)}"
        return Machine(gpus=int(said[-1]), nodes=2 if NODES.search(f"{self.said} {' '.join(self.words)}") else 1)


def lines_of(text: str) -> list[Line]:
    found, end = [], 0
    for block in BLOCK.finditer(text):
        said, end = text[end : block.start()], block.end()
        if block[1] in SHELLS:
            joined = block[2].replace("\\\n", " ").splitlines()
            found += [Line(shlex.split(line, comments=True), said) for line in joined if is_whole(line)]
    return [line for line in found if line.words]


def is_whole(line: str) -> bool:
    """Whether the line is a command by itself: no part of a quotation over several lines, no remark."""
    return line.count("'") % 2 == 0 and line.count('"') % 2 == 0


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A local model in place of those of the hub, and a folder in which `run.toml` and the examples lie."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENRLHF_SLURM_CONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return str(tmp_path / "tiny")


def with_model(flags: list[str], tiny: str) -> list[str]:
    return [tiny if i and flags[i - 1] in MODELS else word for i, word in enumerate(flags)]


def plan(flags: list[str], machine: Machine, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan of a run on exactly this machine: accepted, and without a word of warning."""
    options = ["--gpus", str(machine.gpus), "--nodes", str(machine.nodes), "--json"]
    status = main(["plan", *options, "--", *with_model(flags, tiny)])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    found = json.loads(printed.out)
    assert found["gpus"]["needed"] <= machine.nodes
    expected = ("upper bounds", "are estimated")
    assert [text for text in found["warnings"] if not any(words in text for words in expected)] == []


def rl_flags(line: Line) -> list[str] | None:
    """The trainer's flags of a line that starts, plans or submits an RL run with a model."""
    if line.module == "train_ppo_ray":
        flags = line.words[line.words.index("openrlhf.cli.train_ppo_ray") + 1 :]
    elif line.words[0] == "openrlhf-launch" and "--" in line.words:
        flags = split_at_dashes(line.words)[1]
    else:
        return None
    return flags if {"--actor.model_name_or_path", "--config"} & set(flags) else None


WHOLE = [
    (page, number, line)
    for page in PAGES
    for number, line in enumerate(lines_of(page.read_text(encoding="utf-8")))
    if rl_flags(line)
]


@pytest.mark.parametrize(("page", "number", "line"), WHOLE, ids=lambda x: x.stem if isinstance(x, Path) else None)
def test_l01_an_rl_command_fits_the_devices_it_is_said_to_need(
    page: Path, number: int, line: Line, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = rl_flags(line)
    assert flags
    if line.words[1] == "eval":  # has no plan
        asked = EvaluationConfig.of(parse(TRAIN_PPO_RAY, with_model(flags, tiny)).config)
        finish(TRAIN_PPO_RAY, asked, Machine(gpus=0))
        return
    if "--config" in flags:  # a file that the reader has: here the README's command
        machine = Machine(gpus=8)
        config, _ = prepare(TRAIN_PPO_RAY, with_model(readme_flags(), tiny), machine)
        Path("run.toml").write_text(config_toml(TRAIN_PPO_RAY, config), encoding="utf-8")
    else:
        machine = line.machine
    plan(flags, machine, tiny, capsys)
    if line.words[:2] == ["openrlhf-launch", "plan"]:
        assert main(with_model(line.words[1:], tiny)) == 0
    if line.words[:2] in (["openrlhf-launch", "slurm"], ["openrlhf-launch", "sweep"]):
        pytest.importorskip("submitit")
        own, _ = split_at_dashes(line.words[1:])
        assert main([*own, "--dry-run", "--", *flags]) == 0


def readme_flags() -> list[str]:
    return next(flags for page, _, line in WHOLE if page.name == "README.md" if (flags := rl_flags(line)))


def test_l01_the_commands_are_found() -> None:
    found = [page.stem for page, _, _ in WHOLE]
    assert {"README", "rl_training", "hybrid_engine", "vision", "async_training", "slurm", "index"} <= set(found)
    readme = next(line for page, _, line in WHOLE if page.name == "README.md")
    assert readme.machine == Machine(gpus=8, nodes=1)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_l01_every_other_command_names_what_exists(page: Path) -> None:
    for line in lines_of(page.read_text(encoding="utf-8")):
        for path in [word for word in line.words if word.startswith("examples/")]:
            assert (ROOT / path).is_file(), path
        for i, word in enumerate(line.words[:-1]):
            if word in ("-m", "--module") and "python" in line.words[i - 1]:
                assert importlib.util.find_spec(line.words[i + 1]) is not None, line.words[i + 1]
        if line.words[0] == "openrlhf-launch":
            assert line.words[1] in (*SUBCOMMANDS, "--help")
        if line.words[:2] == ["openrlhf-launch", "slurm"] and not rl_flags(line):
            pytest.importorskip("submitit")
            assert main(["slurm", "--dry-run", *(w for w in line.words[2:] if w != "--wait")]) == 0, line.words
        if line.module and line.module != "train_ppo_ray":
            processes = [line.words[i + 1] for i, w in enumerate(line.words) if w == "--nproc-per-node"]
            machine = Machine(gpus=int(processes[0]) if processes else 8)
            prepare(COMMANDS[line.module], line.words[line.words.index(f"openrlhf.cli.{line.module}") + 1 :], machine)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return script_calls(tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("train_*.sh")), ids=lambda path: path.stem)
def test_l01_a_script_fits_the_devices_it_is_said_to_need(
    script: Path, calls: dict[str, list[str]], tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script.read_text(encoding="utf-8")
    said = Line([], "\n".join(line for line in text.splitlines() if line.startswith("#"))).machine
    words = calls[script.stem]
    if "openrlhf.cli.train_ppo_ray" in words:
        plan(words[words.index("openrlhf.cli.train_ppo_ray") + 1 :], said, tiny, capsys)
    elif words[0] == "slurm":
        plan(split_at_dashes(words)[1], said, tiny, capsys)
    else:
        assert words[words.index("--nproc-per-node") + 1] == str(said.gpus)
        name = next(word for word in words if word.startswith("openrlhf.cli."))
        prepare(COMMANDS[name.removeprefix("openrlhf.cli.")], words[words.index(name) + 1 :], said)
