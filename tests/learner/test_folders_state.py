"""Random sequences of runs, exports, resumes, kills and user files over a few folders: nobody's file is lost."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from openrlhf.learner.checkpoint_dir import CheckpointStore
from openrlhf.learner.folders.lock import hold
from support.folder_runs import EXPORTED, KILLED, PAYLOAD, REFUSED, Run, damaged, execute

FOLDERS = (".", "a", "a/ck", "b")
NAMES = (
    "notes.md",
    "config.toml",
    "config.json",
    "model.safetensors",
    "adapter_config.json",
    "ema/notes.md",
    "ema/config.json",
    "latest",
    ".openrlhf-new-notes",
    "global_step1/notes.md",
    "global_step2/state/notes.md",
    "global_step2/state/trainer.json",
    "global_step3/actor/w.bin",
    "global_step1/metric.json",
)
SHARED_MEMORY = Path("/dev/shm")
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@dataclass(frozen=True)
class UserWrites:
    """A new file, or another content for one that a run wrote."""

    folder: str
    name: str
    text: str


@dataclass(frozen=True)
class UserRemoves:
    """One of the user's files, by number."""

    number: int


@dataclass(frozen=True)
class Trains:
    """A run in these folders; the rest as in `Run`."""

    out: str
    ckpt: str
    saves: int
    shards: int
    resume: bool
    dies: int | None
    can_exchange: bool


@dataclass(frozen=True)
class SecondRun:
    """A run in a folder that another one has."""

    folder: str
    ckpt: str


folders = st.sampled_from(FOLDERS)


def trains(dies: st.SearchStrategy[int | None]) -> st.SearchStrategy[Trains]:
    return st.builds(
        Trains,
        out=folders,
        ckpt=folders,
        saves=st.integers(0, 4),
        shards=st.integers(0, 2),
        resume=st.booleans(),
        dies=dies,
        can_exchange=st.booleans(),
    )


writes = st.builds(UserWrites, folders, st.sampled_from(NAMES), st.sampled_from(("mine", "mine, too")))
seconds = st.builds(SecondRun, folders, folders)
runs = (trains(st.none()), trains(st.integers(0, 200)), trains(st.integers(30, 110)), trains(st.none()))
users = (writes, st.builds(UserRemoves, st.integers(0, 9)))
sequences = st.lists(st.one_of(*runs, *users, seconds), min_size=8, max_size=14)


class Folders:
    """What is there, and what should be: every file that the user wrote last, with its content."""

    def __init__(self, counts: Counter[str]) -> None:
        place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None  # there fsync costs nothing
        self.root = Path(tempfile.mkdtemp(prefix="folders-", dir=place))
        self.users: dict[Path, str] = {}
        self.removed: set[Path] = set()
        self.version = 0
        self.counts = counts

    def happen(self, event: UserWrites | UserRemoves | Trains | SecondRun) -> None:
        self.counts[type(event).__name__] += 1
        if isinstance(event, UserWrites):
            self.user_writes(event)
        elif isinstance(event, UserRemoves):
            self.user_removes(event)
        elif isinstance(event, SecondRun):
            self.second_run(event)
        else:
            self.train(event)
        self.no_file_of_the_user_is_changed_or_gone()
        self.complete_checkpoints_can_be_loaded()
        self.no_model_is_a_mixture()

    def user_writes(self, event: UserWrites) -> None:
        path, text = self.root / event.folder / event.name, event.text
        if path.name == "metric.json":
            if not path.exists():
                return  # a checkpoint made by hand is none of ours to keep loadable
            text = '{"step": 1, "metric": null, "note": "mine"}'
        if path.is_dir() or any(parent.is_file() for parent in path.parents):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.users[path] = text

    def user_removes(self, event: UserRemoves) -> None:
        if self.users:
            path = sorted(self.users)[event.number % len(self.users)]
            path.unlink()
            del self.users[path]
            self.removed.add(path)  # perhaps it stood where a run had written

    def train(self, event: Trains) -> None:
        self.version += 1
        options: dict[str, Any] = {**vars(event), "out": self.root / event.out, "ckpt": self.root / event.ckpt}
        run = Run(**options)
        outcome = execute(run, self.version)
        self.counts[{0: "completed", KILLED: "killed", REFUSED: "refused"}[outcome.status]] += 1
        if outcome.status == KILLED and not run.can_exchange:  # the next run brings back what had stepped aside
            CheckpointStore(run.ckpt).recover()
        if outcome.saved:
            newest = CheckpointStore(run.ckpt).latest()
            assert newest is not None
            assert newest.step >= outcome.saved[-1]
            self.counts["checkpoints"] += len(outcome.saved)
        if outcome.status == 0:
            self.check_export(run)
            left = [p.name for p in run.out.glob(".openrlhf-*") if p.name not in (".openrlhf-files.json", *NAMES)]
            assert not [name for name in left if "global_step" not in name]  # those go with the next checkpoint

    def check_export(self, run: Run) -> None:
        wanted = {*EXPORTED, *(f"model-{number}.safetensors" for number in range(run.shards))}
        assert {(run.out / name).read_text() for name in wanted} == {f"version {self.version}"}

    def second_run(self, event: SecondRun) -> None:
        held = hold(self.root / event.folder, "--ckpt.path")
        other = Run(out=self.root / event.folder, ckpt=self.root / event.ckpt)
        assert execute(other, self.version).status == REFUSED
        held.release()

    def is_users(self, path: Path) -> bool:
        """Whether the user wrote it, or took it away."""
        return path in self.users or (path in self.removed and not path.exists())

    def no_file_of_the_user_is_changed_or_gone(self) -> None:
        for path, text in self.users.items():
            assert path.read_text() == text, path

    def complete_checkpoints_can_be_loaded(self) -> None:
        for folder in FOLDERS:
            for checkpoint in CheckpointStore(self.root / folder).checkpoints():
                theirs = [name for name in (*PAYLOAD, "metric.json") if self.is_users(checkpoint.path / name)]
                assert theirs or not damaged(checkpoint.path)

    def no_model_is_a_mixture(self) -> None:
        for folder in FOLDERS:
            names = [name for name in EXPORTED if not self.is_users(self.root / folder / name)]
            if (self.root / folder / "config.json").exists() and len(names) == len(EXPORTED):
                texts = {(self.root / folder / name).read_text() for name in names}
                assert len(texts) == 1, texts


def check(number: int) -> Counter[str]:
    counts: Counter[str] = Counter()

    @settings(
        phases=[Phase.generate],
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=SLOW,
    )
    @given(sequences)
    def in_any_order(events: list[UserWrites | UserRemoves | Trains | SecondRun]) -> None:
        world = Folders(counts)
        try:
            for event in events:
                world.happen(event)
            counts["sequences"] += 1
        finally:
            shutil.rmtree(world.root)

    in_any_order()
    print(dict(counts))
    return counts


def test_nobody_s_file_is_lost_in_any_order_of_events() -> None:
    counts = check(25)
    assert (
        min(counts[kind] for kind in ("completed", "killed", "refused", "checkpoints", "UserWrites", "SecondRun")) > 0
    )


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_nobody_s_file_is_lost_in_two_hundred_sequences() -> None:
    assert check(200)["sequences"] >= 200


def test_the_check_finds_a_file_that_is_gone() -> None:
    """Sabotage: the check is no rubber stamp."""
    world = Folders(Counter())
    try:
        world.happen(UserWrites("a", "notes.md", "mine"))
        (world.root / "a" / "notes.md").write_text("not mine")
        with pytest.raises(AssertionError):
            world.happen(UserWrites("b", "notes.md", "mine"))
    finally:
        shutil.rmtree(world.root)
