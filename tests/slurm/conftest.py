"""A real Slurm of three nodes on this machine, for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from support.mini_slurm import MiniSlurm, missing_for_slurm, search_path


@pytest.fixture(scope="session")
def cluster() -> Iterator[MiniSlurm]:
    """Bring the cluster up and point this process at it; take it down at the end."""
    if reason := missing_for_slurm():
        pytest.skip(reason)
    cluster = MiniSlurm()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.configuration))
        patch.setenv("PATH", search_path())
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("HOME", os.environ["HOME"])
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
