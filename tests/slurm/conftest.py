"""A real Slurm of three nodes on this machine, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.mini_slurm import MiniSlurm, missing_for_slurm
from support.slurm_runs import Desk, cancel_all


@pytest.fixture(scope="session")
def cluster() -> Iterator[MiniSlurm]:
    """Bring the cluster up and point this process at it; take it down at the end."""
    if reason := missing_for_slurm():
        pytest.skip(reason)
    cluster = MiniSlurm()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.client_environment.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture
def desk(cluster: MiniSlurm, tmp_path: Path) -> Iterator[Desk]:
    """A user of the cluster; what a failed test left in the queue is cancelled."""
    yield Desk(tmp_path)
    cancel_all()


@pytest.fixture
def repaired(cluster: MiniSlurm) -> Iterator[MiniSlurm]:
    """The cluster; nodes that a test has killed are started again afterwards."""
    yield cluster
    cluster.repair()
