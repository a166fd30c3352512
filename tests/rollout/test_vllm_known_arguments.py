"""Engine arguments are checked against the installed vLLM's own list, without importing it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf.rollout.vllm import arguments as module
from openrlhf.rollout.vllm.arguments import RESERVED_ENGINE_ARGS, engine_arguments, unknown_argument, wrong_type

SOURCE = """
class Base:
    first: int
    second: float | None = 1.0

class Other(Base):
    kinds: ClassVar[int] = 3
    _hidden: int = 0
    third: "Config" = None
    fourth: str = ""

    def f(self): ...
"""


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `vllm` of our own, in the place of the installed one."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)  # of other tests
    monkeypatch.setattr(module, "CLASS", "Other")
    engine_arguments.cache_clear()
    yield tmp_path / "vllm" / "engine" / "arg_utils.py"
    engine_arguments.cache_clear()


def test_l07_fields_are_read_from_the_source(layout: Path) -> None:
    layout.write_text(SOURCE, encoding="utf-8")
    assert dict(engine_arguments()) == {
        "first": frozenset({"int"}),
        "second": frozenset({"float", "None"}),
        "third": frozenset(),
        "fourth": frozenset({"str"}),
    }
    assert unknown_argument("frst") == "vLLM has no engine argument 'frst'; did you mean 'first' or 'fourth'?"
    assert unknown_argument("xyz") == "vLLM has no engine argument 'xyz'"
    assert unknown_argument("third") == ""
    assert wrong_type("first", "8") == "'first' takes int, got '8'"
    assert wrong_type("first", True) == "'first' takes int, got True"
    assert [wrong_type("second", value) for value in (1, 0.5, None)] == ["", "", ""]
    assert wrong_type("third", object()) == ""


@pytest.mark.parametrize("text", [None, "class Another: pass"])
def test_l07_another_layout_leaves_the_say_to_the_engine(text: str | None, layout: Path) -> None:
    if text is not None:
        layout.write_text(text, encoding="utf-8")
    assert engine_arguments() == {}
    assert unknown_argument("anything") == ""
    assert wrong_type("anything", 1) == ""


@pytest.mark.proof
def test_l07_the_list_is_that_of_the_installed_vllm() -> None:
    pytest.importorskip("vllm")
    program = "import dataclasses, vllm.engine.arg_utils as a; "
    program += "print(*[f.name for f in dataclasses.fields(a.AsyncEngineArgs) if f.init], sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert set(engine_arguments()) == {name for name in done.stdout.split() if not name.startswith("_")}
    assert {name for name in RESERVED_ENGINE_ARGS if name not in engine_arguments()} == set()


def test_l07_vllm_is_not_imported() -> None:
    program = (
        "import sys; from openrlhf.rollout.vllm.arguments import unknown_argument; unknown_argument('max_num_seq');"
    )
    program += "sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
