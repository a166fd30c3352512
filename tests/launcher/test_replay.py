"""A record replayed on fresh learner ranks gives the weights of the run, bit for bit; what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.launcher.record.files import SAMPLES
from openrlhf.launcher.record.reader import Record
from openrlhf.launcher.replay.batches import steps_of
from openrlhf.launcher.replay.command import main
from support.learner_ranks import RankResults, result
from support.recorded import write_record

LAUNCHER_CASES = {1: ["run_replays"], 2: ["run_replays"]}


@pytest.mark.ranks
@pytest.mark.xdist_group("ranks")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", ["adam", "muon", "images", "turns"])
def test_replayed_weights_are_those_of_the_run(launcher_ranks: RankResults, case: str, world: int) -> None:
    for outcome in (own[case] for own in result(launcher_ranks, "run_replays", world)):
        assert outcome["steps"] == [1, 2, 3]
        assert outcome["after"] != outcome["before"]
        assert outcome["replayed"] == outcome["after"]
        assert outcome["metrics"]
        assert outcome["trainer_logprobs"]
        assert outcome["images"] == (1 if case == "images" else 0)


def test_only_steps_that_are_there_without_a_gap(tmp_path: Path) -> None:
    record = Record.open(write_record(tmp_path / "run", steps=4))
    assert steps_of(record, None, None) == [1, 2, 3, 4]
    assert steps_of(record, 2, 3) == [2, 3]
    (record.folder / SAMPLES / "00000001.rank0.parquet").unlink()
    with pytest.raises(ValueError, match=r"holds the steps 2 to 4, and not 1: choose others by --steps FIRST-LAST"):
        steps_of(record, None, None)
    assert steps_of(record, 2, None) == [2, 3, 4]


def test_first_mistakes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_record(tmp_path / "run")
    out = ["--output_dir", str(tmp_path / "out")]
    assert main([str(tmp_path / "none"), *out]) == 1
    assert "holds no record of a run" in capsys.readouterr().err
    assert main([str(folder), "--steps", "two", *out]) == 1
    assert "--steps 'two': give a step or a span of steps" in capsys.readouterr().err
    assert main([str(folder), *out, "--", "--actor.adam.lrr", "1"]) == 2
    assert "--actor.adam.lrr" in capsys.readouterr().err
