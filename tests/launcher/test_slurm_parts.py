"""Ranks on the nodes of a job: who is where, and how the run ends. Nodes are threads here."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from openrlhf.launcher.slurm import requeue, runner
from openrlhf.launcher.slurm.allocation import Allocation
from openrlhf.launcher.slurm.parts import Place, make_part
from openrlhf.launcher.slurm.ports import PortBlock
from openrlhf.launcher.slurm.runner import EndedError, HeadRun, NodeRunner, WorkerRun
from openrlhf.launcher.slurm.spec import NodeSpec, PartKind

NODES = ("n0", "n1")
REPORT = """
import os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").write(" ".join(os.environ[name] for name in names))
"""
FAIL = "import os, sys, time; os.environ['RANK'] == '3' and sys.exit(7); time.sleep(600)"
SAVE = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path(sys.argv[1], "global_step5").mkdir(exist_ok=True)
    sys.exit(85)
signal.signal(signal.SIGUSR1, save)
time.sleep(600)
"""


class Nodes:
    """The nodes of a job on this machine."""

    def __init__(self, spec: NodeSpec, gpus: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.block = PortBlock(probe.getsockname()[1] - 9)
        monkeypatch.setattr(runner, "candidates", lambda job, base: [self.block])
        monkeypatch.setattr(runner, "resolve", lambda host: ["127.0.0.1"])
        for module in (runner, requeue):
            monkeypatch.setattr(module, "was_preempted", lambda job: False)
        self.ended: list[EndedError | int] = []
        environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        self.runners, self.parts = [], []
        for index, count in enumerate(gpus):
            here = Allocation(job_id=1, nodes=NODES[: len(gpus)], index=index, cpus=6, gpus=count)
            self.runners.append(NodeRunner(spec, here, "secret"))
            self.parts.append(make_part(spec, Place(here=here, block=self.block, ip="127.0.0.1", environ=environ)))

    def run(self) -> int:
        """The head's exit status."""
        others = [threading.Thread(target=self._work, args=[i]) for i in range(1, len(self.runners))]
        for thread in others:
            thread.start()
        try:
            return HeadRun(self.runners[0], self.parts[0], self.block.control, "127.0.0.1:4567").run()
        finally:
            for thread in others:
                thread.join()

    def _work(self, index: int) -> None:
        try:
            self.ended.append(WorkerRun(self.runners[index], self.parts[index]).run())
        except EndedError as end:
            self.ended.append(end)


def spec(program: str, folder: Path, part: PartKind = "ranks", checkpoints: str = "") -> NodeSpec:
    return NodeSpec(command=(sys.executable, "-c", program, str(folder)), part=part, checkpoints=checkpoints)


def test_ranks_are_told_who_is_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(spec(REPORT, tmp_path), (2, 2), monkeypatch)
    assert nodes.run() == 0
    assert nodes.ended == [0]
    seen = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert seen == {str(rank): f"{rank} 4 {rank % 2} 2 127.0.0.1 4567 3" for rank in range(4)}


def test_a_rank_that_fails_on_another_node_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(spec(FAIL, tmp_path), (2, 2), monkeypatch)
    assert nodes.run() == 7
    assert nodes.ended == [0]


def test_a_program_is_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    program = "import os, sys; sys.exit(3 if 'RANK' in os.environ else 0)"
    assert Nodes(spec(program, tmp_path, "program"), (4,), monkeypatch).run() == 0


@pytest.mark.parametrize(("checkpoints", "code"), [(True, 85), (False, 86)])
def test_a_warned_run_saves_and_is_requeued_if_that_helped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: bool, code: int
) -> None:
    looked_at = tmp_path if checkpoints else tmp_path / "other"
    nodes = Nodes(spec(SAVE, tmp_path, checkpoints=str(looked_at)), (1, 1), monkeypatch)
    told: list[str] = []
    monkeypatch.setattr(NodeRunner, "say", lambda self, text: told.append(text))
    up = nodes.parts[0].up

    def up_and_warned(argv: list[str]) -> None:
        up(argv)
        nodes.runners[0].signals.warned = True

    monkeypatch.setattr(nodes.parts[0], "up", up_and_warned)
    monkeypatch.setattr(runner, "WARN_AGAIN", 0.2)  # a rank that does not listen yet is asked again
    monkeypatch.setattr(nodes.parts[0], "everywhere", False)  # the other's ranks wait for a signal of their own
    assert nodes.run() == code
    assert "warned: asking the trainer to save and end" in told


def test_nodes_with_unlike_numbers_of_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(spec(REPORT, tmp_path), (2, 1), monkeypatch)
    with pytest.raises(EndedError, match="n1 left the run: it has GPUs for 1 ranks, n0 for 2: ask for as many") as end:
        nodes.run()
    assert end.value.code == runner.START_EXIT
    assert list(tmp_path.iterdir()) == []
