"""Checkpoints of the trainer on fakes: what is written when, what a resumed run does."""

from __future__ import annotations

import asyncio
import copyreg
import errno
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.agents.types import PromptItem, Turn
from openrlhf.launcher.samples import Group
from openrlhf.launcher.signals import StoppedAfterSave
from openrlhf.launcher.trainer.checkpoints import find_metric
from openrlhf.launcher.trainer.untrained import FILE, Collected, read_untrained
from openrlhf.learner import checkpoint_dir
from openrlhf.learner.folders.shared import missing
from support.toy_ranks import sampled
from support.trainer_fakes import FAILED, GOOD, FakeLearner, FakeRollout, FakeRun, fake_run


def run_in(folder: Path, prompts: int = 8, **flags) -> FakeRun:
    return fake_run(prompts, ckpt__path=str(folder), train__num_episodes=2, **flags)


def steps_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("global_step*"))


def positions(run: FakeRun) -> list[int]:
    return [position for position, _ in run.rollout.calls]


def test_nothing_is_written_by_default(tmp_path: Path) -> None:
    run_in(tmp_path / "c").run()
    assert not (tmp_path / "c").exists()


def test_folders_hold_actor_state_and_configuration(tmp_path: Path) -> None:
    run_in(tmp_path, ckpt__save_steps=4).run()
    assert steps_in(tmp_path) == ["global_step4", "global_step8"]
    newest = tmp_path / "global_step8"
    assert sorted(p.name for p in newest.iterdir()) == [".openrlhf-files.json", "actor", "metric.json", "state"]
    assert sorted(p.name for p in (newest / "state").iterdir()) == ["config.toml", "trainer.json"]
    assert (tmp_path / "latest").read_text() == "global_step8\n"


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 7])  # B114, B115: mid-episode and at the episode's edge
def test_resumed_run_goes_on_where_it_was(tmp_path: Path, stop: int) -> None:
    whole = run_in(tmp_path / "whole")
    whole.run()
    first = run_in(tmp_path / "c", ckpt__save_steps=stop, train__max_steps=stop)
    first.run()
    second = run_in(tmp_path / "c", ckpt__save_steps=100, ckpt__load_enable=True)
    second.sink.first = stop + 1
    summary = second.run()
    assert positions(first) + positions(second) == positions(whole)
    assert summary.optimizer_steps == 8
    assert second.learner.updates == whole.learner.updates
    assert second.learner.log[:3] == ["load", "push", "generate"]  # B063
    assert second.learner.pushed[0] == stop


def test_adaptive_kl_and_normaliser_are_state(tmp_path: Path) -> None:
    flags = {"algo.kl.init_coef": 0.1, "algo.kl.target": 0.1, "reward.normalize_enable": True}
    whole = run_in(tmp_path / "whole", **flags)
    whole.run()
    run_in(tmp_path / "c", ckpt__save_steps=3, train__max_steps=3, **flags).run()
    resumed = run_in(tmp_path / "c", ckpt__load_enable=True, **flags)
    resumed.sink.first = 4
    resumed.run()
    assert resumed.sink.steps[-1]["kl_coef_seen"] == whole.sink.steps[-1]["kl_coef_seen"]
    assert resumed.trainer.norm is not None
    assert whole.trainer.norm is not None
    assert resumed.trainer.norm.state_dict() == whole.trainer.norm.state_dict()


class FullDisk(FakeLearner):
    """Runs out of space in its save number `at`, before, within or after the learner's part."""

    at, part, saves = 2, "", 0

    async def save(self, folder: str) -> dict[str, int]:
        self.saves += 1
        if self.saves == self.at and self.part == "before the actor":
            raise OSError(errno.ENOSPC, "No space left on device")
        written = await super().save(folder)
        if self.saves == self.at and self.part == "after the actor":
            (Path(folder) / "critic").mkdir()
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.saves == self.at:
            (Path(folder) / "state").write_text("in the way of the data state")
        return written


@pytest.mark.parametrize("part", ["before the actor", "after the actor", "before the data state"])
def test_a_save_that_breaks_off_leaves_the_previous_one(
    tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    # B117
    learner = FullDisk()
    learner.part = part
    broken = run_in(tmp_path, ckpt__save_steps=2, learner=learner)
    with pytest.raises(OSError, match=r"No space left|File exists"):
        broken.run()
    assert steps_in(tmp_path) == ["global_step2"]
    assert (tmp_path / "latest").read_text() == "global_step2\n"
    resumed = run_in(tmp_path, ckpt__load_enable=True, ckpt__save_steps=2)
    resumed.sink.first = 3
    assert resumed.run().steps == 8
    assert f"skipped the unfinished checkpoint {tmp_path}/.openrlhf-new-global_step4" in caplog.text
    assert not list(tmp_path.glob(".tmp*"))


def test_a_full_disk_is_named_whatever_the_writer_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Writer(FakeLearner):
        async def save(self, folder: str) -> dict[str, int]:
            raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")

    broken = run_in(tmp_path, ckpt__save_steps=2, learner=Writer())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(ValueError, match=r"--ckpt.path '.*': No space left on device, the checkpoint of step 2 .*room"):
        broken.run()


def test_no_checkpoint_is_a_fresh_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run_in(tmp_path, ckpt__load_enable=True).run().steps == 8
    assert "the run starts anew" in caplog.text


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    run_in(tmp_path, ckpt__save_steps=2).run()
    other = run_in(tmp_path, ckpt__load_enable=True)
    other.trainer.parts.prompts.load_state_dict = _refuse
    with pytest.raises(ValueError, match=r"data.prompt_dataset"):
        other.run()


def _refuse(state: dict) -> None:
    raise ValueError("the checkpoint was written with size 9 (--data.prompt_dataset), this run has 8")


def test_best_is_kept_across_resume(tmp_path: Path) -> None:  # B108, B118
    def evaluated(values: list[float], **flags) -> FakeRun:
        run = run_in(tmp_path, ckpt__save_steps=1, ckpt__max_num=1, eval_prompts=1, eval__steps=1, **flags)
        given = iter(values)

        async def evaluate() -> None:
            run.trainer.evaluation = {"eval/eval_default_pass1": next(given)}
            run.trainer.evaluated_at = run.trainer.state.step

        run.trainer._evaluate = evaluate  # type: ignore[method-assign]
        return run

    evaluated([0.2, 0.1, 0.1], train__max_steps=3).run()
    assert steps_in(tmp_path) == ["global_step1", "global_step3"]
    second = evaluated([0.1], train__max_steps=4, ckpt__load_enable=True)
    second.sink.first = 4
    second.run()
    assert steps_in(tmp_path) == ["global_step1", "global_step4"]
    third = evaluated([0.3, 0.1], train__max_steps=6, ckpt__load_enable=True)
    third.sink.first = 5
    third.run()
    assert steps_in(tmp_path) == ["global_step5", "global_step6"]


def test_number_and_size_of_checkpoints_are_limited(tmp_path: Path) -> None:
    run_in(tmp_path / "some", ckpt__save_steps=1, ckpt__max_num=2).run()
    assert steps_in(tmp_path / "some") == ["global_step7", "global_step8"]
    run_in(tmp_path / "small", ckpt__save_steps=1, ckpt__max_num=9, ckpt__max_mem=1 / 2**30).run()  # one byte
    assert steps_in(tmp_path / "small") == ["global_step8"]


def test_best_metric_key() -> None:
    metrics = {"eval/eval_b_pass1": 0.3, "eval/eval_a_pass1": 0.2, "eval/eval_a_pass4": 0.9}
    assert find_metric(metrics, "") == 0.2
    assert find_metric(metrics, "eval_a_pass4") == 0.9
    with pytest.raises(ValueError, match=r"eval_c_pass1.*eval/eval_a_pass1"):
        find_metric(metrics, "eval_c_pass1")


def test_hf_export_only(tmp_path: Path) -> None:
    run = run_in(tmp_path, ckpt__save_steps=4, ckpt__save_hf=True, ckpt__disable_ds=True)
    run.run()
    assert run.learner.exported == [f"{tmp_path}/global_step4_hf", f"{tmp_path}/global_step8_hf", "/exported"]
    assert "save" not in run.learner.log


def test_warning_saves_after_the_step(tmp_path: Path) -> None:
    run = run_in(tmp_path)

    async def warned() -> None:
        task = asyncio.ensure_future(run.trainer.run())
        await asyncio.sleep(0)
        run.trainer.stop_after_step()
        await task

    with pytest.raises(StoppedAfterSave, match="after step 1"):
        asyncio.run(warned())
    assert steps_in(tmp_path) == ["global_step1"]
    assert run.learner.exported == []


def test_samples_of_checkpoints_of_0_2_are_read(tmp_path: Path) -> None:
    """There `SampleInfo` lay beside the trainer's protocols."""
    item = PromptItem(group_id="e0-p0", prompt="p", position=0, episode=0)
    saved = {"prompt": item, "samples": [GOOD, FAILED], "trajectories": "t"}
    content = {"batches": [([saved], {"m": 1.0})], "groups": [saved], "deadlines": [3], "prompts": [item]}
    written = pickle.dumps(content, protocol=2)  # which names modules without their lengths
    old = written.replace(b"openrlhf.launcher.samples", b"openrlhf.launcher.trainer.protocols")
    assert old != written
    (tmp_path / FILE).write_bytes(old)
    read = asyncio.run(read_untrained(FakeRollout(n=2, weights=FakeLearner()), tmp_path))
    group = Group(prompt=item, samples=[GOOD, FAILED], handle="t")
    assert read.batches == [Collected(groups=[group], metrics={"m": 1.0})]
    assert (read.groups, read.deadlines, read.prompts) == ([group], [3], [item])


def own_disk(folder: Path) -> Callable[[str], Path]:
    """Paths on another node, whose disks are all its own."""
    return lambda path: folder / path.lstrip("/")


def test_ranks_on_disks_of_their_own_are_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    run = run_in(tmp_path / "c", ckpt__save_steps=4)
    run.learner.disk = own_disk(tmp_path / "node2")
    with pytest.raises(ValueError, match=r"^--ckpt.path '.*/c' is another folder on node2 than on .*all nodes share"):
        run.run()
    assert run.learner.log == []
    assert list((tmp_path / "c").iterdir()) == []


def test_a_run_that_saves_at_a_warning_alone_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "c").mkdir()
    run = run_in(tmp_path / "c")
    run.learner.disk = own_disk(tmp_path / "node2")
    assert run.run().steps == 8
    assert "could not be saved at a warning" in caplog.text


def test_a_disk_that_comes_between_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_dir, "missing", lambda *args: missing(*args, patience=0.0))
    (tmp_path / "c").mkdir()
    run = run_in(tmp_path / "c", ckpt__save_steps=2, ckpt__max_num=1)
    elsewhere = own_disk(tmp_path / "node2")
    run.learner.disk = lambda path: Path(path) if len(run.learner.updates) < 4 else elsewhere(path)
    with pytest.raises(ValueError, match=r"step 4 is not whole: ranks wrote actor/updates.json"):
        run.run()
    assert steps_in(tmp_path / "c") == ["global_step2"]
    resumed = run_in(tmp_path / "c", ckpt__save_steps=2, ckpt__load_enable=True)
    resumed.sink.first = 3
    assert resumed.run().steps == 8


class OldPickler(pickle.Pickler):
    """Writes turns as a version did in which they had no rewards."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Turn):
            return copyreg.__newobj__, (Turn,), [obj.start, obj.end, obj.finish_reason]  # type: ignore[attr-defined]
        return NotImplemented


def test_turns_of_a_version_without_rewards_are_read(tmp_path: Path) -> None:
    row = sampled([0, 1])
    group = {"prompt": PromptItem(group_id="g", prompt="p"), "samples": [GOOD], "trajectories": [row]}
    with (tmp_path / FILE).open("wb") as file:
        OldPickler(file).dump({"batches": [], "groups": [group], "deadlines": [], "prompts": []})
    read = asyncio.run(read_untrained(FakeRollout(n=1, weights=FakeLearner()), tmp_path))
    assert read.groups[0].handle[0].turns == row.turns
