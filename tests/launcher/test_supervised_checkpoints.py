"""Ranks of a supervised run on disks of their own, and who decides where they go on. The ranks are threads here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.supervised import checkpoints
from openrlhf.launcher.supervised.checkpoints import Progress, SupervisedCheckpoints
from openrlhf.launcher.supervised_config import SupervisedCkptConfig
from openrlhf.learner import checkpoint_dir
from openrlhf.learner.folders.shared import missing, sees, sizes_below

RANKS = 2
FINGERPRINT = {"units": 8, "seed": 1, "batch_size": 4}


@dataclass
class Together:
    """`Collective` for threads."""

    rank: int
    barriers: list[threading.Barrier]
    values: list[Any]

    def everyone(self, value: Any) -> list[Any]:
        self.values[self.rank] = value
        self.barriers[0].wait(20)
        found = list(self.values)
        self.barriers[1].wait(20)
        return found

    def barrier(self) -> None:
        self.everyone(None)


@dataclass
class OneRank:
    """What a rank's learner does with a checkpoint."""

    collective: Together
    loaded: list[str] = field(default_factory=list)

    def save_checkpoint(self, folder: str) -> dict[str, int]:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"rank{self.collective.rank}.pt").write_bytes(b"state")
        self.collective.barrier()
        return sizes_below(Path(folder))

    def load_checkpoint(self, folder: str) -> None:
        self.loaded.append(folder)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Runs a function (checkpoints of the rank, its learner) on all ranks; what they return, or raise."""
    own = threading.local()
    monkeypatch.setattr(checkpoints, "is_first", lambda: own.rank == 0)
    monkeypatch.setattr(checkpoints, "sees", lambda path: sees(path, patience=0.0))
    monkeypatch.setattr(checkpoint_dir, "missing", lambda *args: missing(*args, patience=0.0))

    def run(work: Callable[..., Any], roots: list[Path], **options: Any) -> list[Any]:
        barriers, values = [threading.Barrier(RANKS) for _ in range(2)], [None] * RANKS

        def one(rank: int) -> Any:
            own.rank = rank
            learner: Any = OneRank(Together(rank, barriers, values))
            config = SupervisedCkptConfig(path=str(roots[rank]), **options)
            own_checkpoints = SupervisedCheckpoints(
                config, learner, None, config_toml="", run_id="r", fingerprint=FINGERPRINT
            )
            try:
                return work(own_checkpoints, learner)
            except ValueError as error:
                return str(error)

        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(one, range(RANKS)))

    return run


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"disk{rank}" for rank in range(RANKS)]
    for disk in found:
        disk.mkdir()
    return found


def look(own: SupervisedCheckpoints, learner: OneRank) -> None:
    own.check_shared()


def test_a_shared_folder_is_fine(ranks: Callable[..., list[Any]], disks: list[Path]) -> None:
    assert ranks(look, [disks[0]] * RANKS, save_steps=1) == [None, None]
    assert list(disks[0].iterdir()) == []


@pytest.mark.parametrize("options", [{"save_steps": 1}, {"load_enable": True}])
def test_disks_of_their_own_end_the_run_on_every_rank(
    ranks: Callable[..., list[Any]], disks: list[Path], options: dict[str, Any]
) -> None:
    first, second = ranks(look, disks, **options)
    assert first == second
    assert first.startswith(f"--ckpt.path {str(disks[0])!r} of the first rank is another folder on ")
    assert str(disks[1]) in first
    assert "all nodes share" in first


def test_a_run_that_saves_at_a_warning_alone_goes_on(
    ranks: Callable[..., list[Any]], disks: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert ranks(look, disks) == [None, None]
    assert "could not be saved at a warning" in caplog.text


def test_a_checkpoint_in_pieces_is_refused_on_every_rank(ranks: Callable[..., list[Any]], disks: list[Path]) -> None:
    def save(own: SupervisedCheckpoints, learner: OneRank) -> None:
        own.save(Progress(step=3), None)

    first, second = ranks(save, disks, save_steps=1)
    assert first == second
    assert "step 3 is not whole: ranks wrote model/rank1.pt" in first
    assert not list(disks[0].glob("global_step*"))


def test_the_first_rank_decides_where_all_go_on(ranks: Callable[..., list[Any]], disks: list[Path]) -> None:
    """A second rank whose file system still shows the checkpoint before."""

    def save(own: SupervisedCheckpoints, learner: OneRank) -> None:
        own.save(Progress(step=3), None)

    def restore(own: SupervisedCheckpoints, learner: OneRank) -> Any:
        return own.restore(), learner.loaded

    assert ranks(save, [disks[0]] * RANKS, save_steps=1) == [None, None]
    found = ranks(restore, disks, load_enable=True)
    assert found == [(Progress(step=3), [str(disks[0] / "global_step3" / "model")])] * RANKS
    assert ranks(restore, disks[::-1], load_enable=True) == [(Progress(), [])] * RANKS
