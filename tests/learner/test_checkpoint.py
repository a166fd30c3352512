"""Resumed is the same as never stopped; what does not fit is refused; other world sizes by universal checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.learner.universal import learner_folders
from support.learner_ranks import RankResults, result
from support.learner_state_cases import UNIVERSAL_LOADS

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]

RANK_CASES = {2: ["resume", "refusals", "weights_only", "save_for_other_world"], 1: ["load_at_other_world"]}


@pytest.mark.parametrize("case", ["adam-2-policy", "muon-3-policy", "adam-3-critic"])
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(ranks: RankResults, case: str) -> None:
    for outcome in (of_rank[case] for of_rank in result(ranks, "resume", 2)):
        assert outcome["metrics"]
        assert outcome["weights"]
        assert outcome["ema"]
        assert outcome["steps"] == 4
        assert outcome["lr"][0] > outcome["lr"][1] > 0  # the schedule went on, it did not start again


def test_an_export_is_weights_only(ranks: RankResults) -> None:
    # B116
    for outcome in result(ranks, "weights_only", 2):
        assert outcome["weights"]
        assert outcome["steps"] == outcome["moments"] == 0
        assert outcome["before"] == outcome["after"]
        assert outcome["after"][0] == 0.0  # the start of the warm-up


def test_refusals_name_what_differs_and_the_way_out(ranks: RankResults) -> None:
    for messages in result(ranks, "refusals", 2):
        assert "no learner checkpoint" in messages["nothing"]
        assert "`ds.zero_stage` 1, this run has 2" in messages["stage"]
        assert "python -m openrlhf.learner.universal" in messages["universal"]
        assert "`batch.enable_ema`" in messages["ema"]


@pytest.mark.parametrize(("written", "stage"), UNIVERSAL_LOADS)
def test_two_ranks_resume_on_one(ranks: RankResults, written: int, stage: int) -> None:
    # B112
    want = result(ranks, "save_for_other_world", 2)[0][f"stage{written}"]
    got = result(ranks, "load_at_other_world", 1)[0][f"{written}-{stage}"]
    assert got["steps"] == 4
    for ours, theirs in zip(got["metrics"], want, strict=True):
        for name in ("policy_loss", "grad_norm", "ppo_kl"):
            assert ours[name][0] == pytest.approx(theirs[name][0], abs=2e-5)


def test_stage_0_fits_any_world_size_as_it_is(ranks: RankResults) -> None:
    assert result(ranks, "load_at_other_world", 1)[0]["unconverted"] == 2


def test_other_world_size_without_conversion_is_refused_with_the_command(ranks: RankResults) -> None:
    message = result(ranks, "load_at_other_world", 1)[0]["refused"][3, 3]
    assert "written by 2 ranks, this run has 1" in message
    assert "python -m openrlhf.learner.universal" in message
    assert "`ds.use_universal_ckpt`" in message


@pytest.mark.parametrize(("written", "stage"), [(2, 3), (3, 2), (2, 0), (0, 2)])
def test_universal_checkpoints_of_another_kind_of_stage_are_refused(
    ranks: RankResults, written: int, stage: int
) -> None:
    message = result(ranks, "load_at_other_world", 1)[0]["refused"][written, stage]
    assert f"`ds.zero_stage` {written}, this run has {stage}: stages 1 and 2 load" in message
    assert "0 and 3 only their own" in message


def test_learner_folders_are_found_in_a_whole_checkpoint(tmp_path: Path) -> None:
    for name in ("actor", "critic"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "learner.json").write_text("{}")
    assert learner_folders(tmp_path) == [tmp_path / "actor", tmp_path / "critic"]
    assert learner_folders(tmp_path / "actor") == [tmp_path / "actor"]
    with pytest.raises(ValueError, match="not a checkpoint"):
        learner_folders(tmp_path / "nothing")
