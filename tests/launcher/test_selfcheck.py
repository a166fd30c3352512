"""`openrlhf-launch selfcheck`: the table, rows that end in every way, the record, what `doctor` says of it."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.launcher.doctor.checks import Finding
from openrlhf.launcher.doctor.command import selfchecked
from openrlhf.launcher.selfcheck import record
from openrlhf.launcher.selfcheck.command import main
from openrlhf.launcher.selfcheck.process import Report, run, run_all
from openrlhf.launcher.selfcheck.table import ROWS, Allowance, Row, chosen, lacking
from openrlhf.launcher.selfcheck.worker import environment

TESTS = Path(__file__).parents[1]
AROUND: dict[str, Any] = {
    "devices": ["NVIDIA H200"],
    "versions": {"torch": "2.13.0", "vllm": "0.32.0", "driver": "580.1"},
}


def row(name: str, **changes: Any) -> Row:
    base = Row(name=name, shows="something", function=f"support.selfcheck_rows:{name}", fix=f"mend {name}")
    return replace(base, **changes)


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows find this folder's functions; nothing is written into the user's own cache."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_every_row_is_whole() -> None:
    assert len({r.name for r in ROWS}) == len(ROWS)
    for each in ROWS:
        assert each.shows
        assert each.fix
        module, _, name = each.function.partition(":")
        source = Path(importlib.util.find_spec(module).origin).read_text()  # type: ignore[union-attr, arg-type]
        assert f"def {name}(folder: Path) -> Outcome:" in source


def test_what_a_cpu_can_run() -> None:
    cpu = [r.name for r in ROWS if not lacking(r, gpus=0, packages=())]
    learner = ["versions", "attention", "learner-step", "zero3", "determinism"]
    assert cpu == [*learner, "push-gloo", "push-shared", "engine-lost", "generation"]
    packages = {"liger-kernel", "bitsandbytes", "peft"}
    two = [r.name for r in ROWS if lacking(r, gpus=1, packages=packages)]
    assert two == ["push-nccl", "ranks", "tensor-parallel", "sequence-parallel"]
    assert not [r for r in ROWS if lacking(r, gpus=2, packages=packages)]


@pytest.mark.parametrize(("gpus", "minutes"), [(1, 5), (2, 8)])
def test_all_rows_of_a_machine_end_in_time(gpus: int, minutes: int) -> None:
    packages = {"liger-kernel", "bitsandbytes", "peft"}
    rows = [r for r in ROWS if not lacking(r, gpus=gpus, packages=packages)]
    assert sum(r.bound_s for r in rows) <= 60 * minutes
    allowance, now = Allowance(gpus=gpus), 0.0
    for number, each in enumerate(rows):
        bound = allowance.of(each)
        assert bound >= each.bound_s
        took = bound if number % 2 else bound / 3  # every other row hangs, and all others are quick
        allowance.spent(each, took)
        now += took
    assert now <= 60 * minutes


def test_a_row_may_use_what_those_before_it_left_over() -> None:
    allowance, first, second = Allowance(gpus=1), row("fine", bound_s=30.0), row("finds", bound_s=20.0)
    assert allowance.of(first) == 30
    allowance.spent(first, 10.0)
    assert allowance.of(second) == 40
    allowance.spent(second, 45.0)
    assert allowance.of(first) == 30
    assert Allowance(gpus=0).of(first) == 600


@pytest.mark.parametrize(
    ("needs", "gpus", "why"),
    [
        (("gpu",), 0, "needs 1 GPU, this machine has none"),
        (("gpus=2",), 1, "needs 2 GPUs, this machine has 1"),
        (("gpu", "package:bitsandbytes"), 1, "bitsandbytes is not installed"),
        (("gpu",), 1, ""),
        ((), 0, ""),
    ],
)
def test_why_a_row_is_skipped(needs: tuple[str, ...], gpus: int, why: str) -> None:
    assert lacking(row("fine", needs=needs), gpus=gpus, packages=()) == why


def test_rows_are_chosen_by_name() -> None:
    assert [r.name for r in chosen(["push-gloo", "versions"])] == ["versions", "push-gloo"]
    assert chosen([]) == list(ROWS)
    with pytest.raises(ValueError, match=r"--only 'push': there is no such row; choose from versions, "):
        chosen(["push"])


def test_a_row_that_is_fine() -> None:
    report = run(row("fine"))
    assert (report.result, report.detail, report.numbers) == ("ok", "rank 0 of 1", {"tokens_per_s": 2.5})
    assert (report.fix, report.log) == ("", "")


@pytest.mark.parametrize(
    ("name", "detail", "log"),
    [
        ("finds", "the two differ by 3", ""),
        ("raises", "KeyError: 'down_proj'", 'raise KeyError("down_proj")'),
        ("leaves", "its process ended with status 3 without a result", ""),
        ("crashes", "its process was ended by SIGSEGV without a result", "Segmentation fault"),
        ("absent", "AttributeError: module 'support.selfcheck_rows' has no attribute 'absent'", "AttributeError"),
    ],
)
def test_a_row_that_fails(name: str, detail: str, log: str) -> None:
    report = run(row(name))
    assert (report.result, report.detail, report.fix) == ("failed", detail, f"mend {name}")
    assert log in report.log


def test_a_row_that_hangs_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("SELFCHECK_TEST_PIDS", str(pids))
    report = run(row("hangs", bound_s=8.0))
    assert (report.result, report.detail) == ("failed", "it did not end within 8 s")
    assert "in hangs" in report.log  # where it was
    end = time.monotonic() + 20  # a killed process takes a moment
    while any(running(pid) for pid in pids.read_text().split()):
        assert time.monotonic() < end
        time.sleep(0.05)


def running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def test_a_row_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 20)))  # too long for sockets
    seen: list[Path] = []
    remove = shutil.rmtree

    def removing(folder: Path, **options: Any) -> None:
        assert (folder / "fine" / "left behind").is_file()
        seen.append(folder)
        remove(folder, **options)

    monkeypatch.setattr("openrlhf.launcher.selfcheck.process.shutil.rmtree", removing)
    assert run(row("fine")).result == "ok"
    (folder,) = seen
    assert folder.parent == Path("/tmp")
    assert not folder.exists()


def test_neighbours_share_a_process_until_it_ends() -> None:
    what = [("pid", "a"), ("pid", "a"), ("finds", "a"), ("pid", "a"), ("leaves", "a"), ("pid", "a"), ("pid", "")]
    rows = [replace(row(function, shares=shares), name=f"{i}") for i, (function, shares) in enumerate(what)]
    found = list(run_all(rows, lambda _: 60.0))
    assert [r.result for r in found] == ["ok", "ok", "failed", "ok", "failed", "ok", "ok"]
    pids = [r.detail for r in found]
    assert pids[0] == pids[1] == pids[3]  # a row that finds something leaves the process as it was
    assert len({pids[0], pids[5], pids[6]}) == 3
    assert found[2].log == "says much"  # the log of a row is its own


def test_a_row_is_a_process_group_of_one() -> None:
    found = environment()
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    assert 0 < int(found["MASTER_PORT"]) < 65536


def test_exit_status_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("fine"), row("finds"), row("raises", needs=("gpu",))]
    assert main([], rows) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok      fine            rank 0 of 1 (")
    assert lines[1].startswith("failed  finds           the two differ by 3 (")
    assert lines[2] == "        fix: mend finds"
    assert lines[-2:] == ["skipped raises          needs 1 GPU, this machine has none", "1 ok, 1 failed, 1 skipped"]
    assert main(["--only", "fine"], rows) == 0
    assert main(["--only", "fin"], rows) == 2
    assert "--only 'fin': there is no such row; choose from fine, finds, raises" in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("fine"), row("finds")]
    assert main(["--json"], rows) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(r["name"], r["result"], r["fix"]) for r in found["rows"]] == [
        ("fine", "ok", ""),
        ("finds", "failed", "mend finds"),
    ]
    assert found["rows"][0]["numbers"] == {"tokens_per_s": 2.5}
    assert found["versions"]["openrlhf-launcher"] == metadata.version("openrlhf-launcher")
    kept = record.load(record.path())
    assert kept == found


def test_listing_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "push-nccl"]) == 0
    assert capsys.readouterr().out == (
        "push-nccl       the same over nccl, engine and learner on a GPU each [gpus=2]\n"
    )
    assert main(["--list", "--json"]) == 0
    assert [r["name"] for r in json.loads(capsys.readouterr().out)] == [r.name for r in ROWS]
    assert not record.path().exists()


def test_help_loads_no_library() -> None:
    code = (
        "import sys; from openrlhf.launcher.main import main\n"
        "try: main(['selfcheck', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "print(sorted({'torch', 'ray', 'vllm', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--only NAME" in done.stdout


# -- the record


def reports(**results: str) -> list[Report]:
    return [
        Report(name=name, result=result, detail="", fix=f"mend {name}" if result == "failed" else "", time="2026-05-01")  # type: ignore[arg-type]
        for name, result in results.items()
    ]


def test_where_the_record_lies(tmp_path: Path) -> None:
    assert record.path({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/openrlhf/selfcheck.json")
    assert record.path({"XDG_CACHE_HOME": "", "HOME": "/h"}) == Path("/h/.cache/openrlhf/selfcheck.json")
    assert record.path({"XDG_CACHE_HOME": "not/absolute", "HOME": "/h"}) == Path("/h/.cache/openrlhf/selfcheck.json")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"machines": []}', '{"machines": {"here": {"rows": 1}}}', "{"])
def test_a_record_that_is_none(tmp_path: Path, content: str) -> None:
    file = tmp_path / "selfcheck.json"
    assert record.load(file, "here") is None
    file.write_text(content)
    assert record.load(file, "here") is None
    outcome = record.merged(None, reports(a="ok"), AROUND, ["a"])
    record.save(file, outcome)
    assert record.load(file) == outcome


def test_machines_that_share_a_folder_keep_their_own(tmp_path: Path) -> None:
    file = tmp_path / "openrlhf" / "selfcheck.json"
    outcome = record.merged(None, reports(a="ok"), AROUND, ["a"])
    for host in ("node-1", "node-2"):
        record.save(file, outcome | {"host": host})
    assert [record.load(file, host)["host"] for host in ("node-1", "node-2")] == ["node-1", "node-2"]  # type: ignore[index]
    assert record.load(file, "node-3") is None


def test_rows_that_were_not_run_again_stay() -> None:
    first = record.merged(None, reports(a="ok", b="failed"), AROUND, ["a", "b"])
    again = record.merged(first, reports(b="ok"), AROUND, ["a", "b"])
    assert [(r["name"], r["result"]) for r in again["rows"]] == [("a", "ok"), ("b", "ok")]
    other = AROUND | {"versions": {"torch": "2.14.0"}}
    assert [r["name"] for r in record.merged(first, reports(b="ok"), other, ["a", "b"])["rows"]] == ["b"]


def test_a_record_that_cannot_be_written_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["--only", "fine"], [row("fine")]) == 0
    assert "could not be kept for `openrlhf-launch doctor`" in capsys.readouterr().err


def test_driver_and_devices(tmp_path: Path) -> None:
    assert (record.driver(tmp_path), record.device_names(tmp_path)) == ("", [])
    gpu = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   42\n")
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:12:33 UTC 2025\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert (record.driver(tmp_path), record.device_names(tmp_path)) == ("580.65.06", ["NVIDIA H200"])


# -- what doctor says


def everything(result: str = "ok") -> dict[str, Any]:
    order = [r.name for r in ROWS]
    return record.merged(None, reports(**dict.fromkeys(order, result)), AROUND, order)


def test_l08_doctor_never_run() -> None:
    (found,) = selfchecked(None, AROUND, 8)
    assert found == Finding(
        level="warning", what="the GPU half was never checked on this machine", fix="openrlhf-launch selfcheck"
    )
    (found,) = selfchecked(None, AROUND, 0)
    assert found.level == "ok"
    assert "openrlhf-launch selfcheck" in found.what


def test_l08_doctor_all_ok() -> None:
    (found,) = selfchecked(everything(), AROUND, 1)
    what = f"selfcheck of 2026-05-01 (vllm 0.32.0, torch 2.13.0, driver 580.1): all {len(ROWS)} rows ok"
    assert found == Finding(level="ok", what=what)


def test_l08_doctor_failed_rows_with_their_fixes() -> None:
    order = [r.name for r in ROWS]
    outcome = record.merged(everything(), reports(**{"push-ipc": "failed", "liger": "failed"}), AROUND, order)
    (found,) = selfchecked(outcome, AROUND, 1)
    assert found.level == "error"
    assert found.what.endswith("): failed: liger, push-ipc")
    assert found.fix == (
        "liger: mend liger; push-ipc: mend push-ipc; then openrlhf-launch selfcheck --only liger push-ipc"
    )


def test_l08_doctor_versions_or_devices_have_changed() -> None:
    today = {"devices": [], "versions": {"torch": "2.14.0", "vllm": "0.32.0", "flash-attn": "2.8"}}
    (found,) = selfchecked(everything("failed"), today, 1)
    assert (found.level, found.fix) == ("warning", "openrlhf-launch selfcheck")
    assert found.what == (
        "selfcheck of 2026-05-01 holds no more: driver was 580.1, is gone, flash-attn was not there, is 2.8, "
        "torch was 2.13.0, is 2.14.0, devices were ['NVIDIA H200'], are none"
    )


def test_l08_doctor_rows_skipped_or_never_run() -> None:
    order = [r.name for r in ROWS]
    gpu_rows = {r.name: "skipped" for r in ROWS if r.needs}
    outcome = record.merged(everything(), reports(**gpu_rows), AROUND, order)
    (found,) = selfchecked(outcome, AROUND, 0)
    assert found.level == "ok"
    assert found.what.endswith(f"rows ok, skipped: {', '.join(gpu_rows)}")
    (found,) = selfchecked(outcome, AROUND, 1)
    assert found.level == "warning"
    assert found.what.endswith("; nothing of the GPU half was run")
    part = record.merged(None, reports(versions="ok"), AROUND, order)
    (found,) = selfchecked(part, AROUND, 0)
    assert found.fix == f"openrlhf-launch selfcheck --only {' '.join(order[1:])}"


def test_senders_over_nccl_and_ipc_reach_the_engine() -> None:
    from openrlhf.launcher.selfcheck.push import OneEngine
    from openrlhf.rollout.engine import EngineControl

    calls: list[tuple[Any, ...]] = []
    engine = OneEngine(SimpleNamespace(call=lambda *words: calls.append(words)))  # type: ignore[arg-type]
    engine.init_weight_transfer_engine({"rank_offset": 1})
    engine.start_weight_update()
    engine.update_weights({"names": ["a"]})
    engine.finish_weight_update("3")
    assert calls == [
        (EngineControl.init_weight_transfer, {"rank_offset": 1}),
        (EngineControl.start_weight_update,),
        (EngineControl.update_weights, {"names": ["a"]}),
        (EngineControl.finish_weight_update, 3),
    ]
