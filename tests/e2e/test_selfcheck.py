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
    assert {name for name, r in rows.items() if r["result"] == "skipped"} == {r.name for r in ROWS if r.needs}
    assert found["status"] == 0
    assert rows["push-gloo"]["numbers"]["tied"] < 1e-4
    assert rows["push-gloo"]["numbers"]["untied"] < 1e-4
    assert rows["attention"]["numbers"]["packed-fp32-sdpa"] < 1e-5
    assert rows["learner-step"]["numbers"]["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("fault", "name", "detail", "fix"),
    [
        ("packing", "attention", "relative error of the gradient", "without --ds.packing_samples"),
        pytest.param(
            "push",
            "push-gloo",
            "the engine does not compute what the trainer computes",
            "do not train here with this --vllm.sync_backend",
            marks=[pytest.mark.stack, pytest.mark.proof, pytest.mark.timeout(1000)],
        ),
    ],
)
def test_a_fault_fails_its_row_and_names_the_fix(fault: str, name: str, detail: str, fix: str, tmp_path: Path) -> None:
    found = check("--only", name, cache=tmp_path, PYTHONPATH=str(FAULTS), SELFCHECK_TEST_FAULT=fault)
    (row,) = found["rows"]
    assert (found["status"], row["result"]) == (1, "failed")
    assert detail in row["detail"]
    assert fix in row["fix"]
