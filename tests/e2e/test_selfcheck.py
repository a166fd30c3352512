"""`openrlhf-launch selfcheck` with its real rows: those of a CPU are ok, and a fault fails the right one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.selfcheck.table import ROWS

FAULTS = Path(__file__).parents[1] / "support" / "selfcheck_faults"


def check(*words: str, cache: Path, **environ: str) -> dict[str, Any]:
    """`openrlhf-launch selfcheck --json` as a program: its exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "openrlhf.launcher.main", "selfcheck", "--json", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "CUDA_VISIBLE_DEVICES": "", **environ},
        timeout=1000,
    )
    assert not done.stderr
    return {"status": done.returncode, **json.loads(done.stdout)}


@pytest.mark.stack
@pytest.mark.xdist_group("stack")
@pytest.mark.timeout(1000)
def test_every_row_of_a_cpu_is_ok(tmp_path: Path) -> None:
    found = check(cache=tmp_path)
    rows = {r["name"]: r for r in found["rows"]}
    assert list(rows) == [r.name for r in ROWS]
    assert not [r for r in rows.values() if r["result"] == "failed"]
    of_gpus = {r.name for r in ROWS if any(need.startswith("gpu") for need in r.needs)}
    assert {name for name, r in rows.items() if r["result"] == "skipped"} == of_gpus
    assert found["status"] == 0
    pushed = rows["push-gloo"]["numbers"]
    assert pushed["tied"] < 1e-4
    assert 1e-4 < pushed["untied_bf16"] < pushed["bf16_tolerance"]
    assert 0 < pushed["push_bytes_per_s"] < pushed["copy_bytes_per_s"]
    assert rows["push-shared"]["numbers"]["difference"] < pushed["bf16_tolerance"]
    assert rows["engine-lost"]["numbers"]["noticed_s"] < 15
    assert rows["engine-lost"]["numbers"]["difference"] < pushed["bf16_tolerance"]
    assert 0.1 < rows["generation"]["numbers"]["share"] < 2
    assert rows["attention"]["numbers"]["packed-fp32-sdpa"] < 1e-5
    assert rows["learner-step"]["numbers"]["tokens_per_s"] > 0


FAULTS_OF_LEARNERS = {
    "versions": ("torch>=99", "install the pinned set again"),
    "attention": ("relative error of the gradient", "without --ds.packing_samples"),
    "learner-step": ("the loss on one batch does not fall", "install the pinned set again"),
    "zero3": ("--ds.zero_stage 3: losses", "train with --ds.zero_stage 2"),
    "determinism": ("tensors differ after two steps", "--train.full_determinism_enable does not hold here"),
}
FAULTS_OF_ENGINES = {
    "push-gloo": ("the engine does not compute what the trainer computes", "do not train here with this"),
    "push-shared": ("the engine does not compute what the trainer computes", "do not train here with this"),
    "engine-lost": ("although its engine was killed", "one that loses an engine hangs here"),
    "generation": ("of the bare engine's", "look at what else uses the cores"),
}


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "faults",
    [
        FAULTS_OF_LEARNERS,
        pytest.param(FAULTS_OF_ENGINES, marks=[pytest.mark.stack, pytest.mark.proof]),
    ],
    ids=["learners", "engines"],
)
def test_faults_fail_their_rows_and_name_the_fix(faults: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    names = list(faults)
    found = check("--only", *names, cache=tmp_path, PYTHONPATH=str(FAULTS), SELFCHECK_TEST_FAULT=",".join(names))
    assert found["status"] == 1
    assert [(row["name"], row["result"]) for row in found["rows"]] == [(name, "failed") for name in names]
    for row in found["rows"]:
        detail, fix = faults[row["name"]]
        assert detail in row["detail"]
        assert fix in row["fix"]


def test_every_row_of_a_cpu_has_a_fault() -> None:
    assert [*FAULTS_OF_LEARNERS, *FAULTS_OF_ENGINES] == [r.name for r in ROWS if not r.needs]
