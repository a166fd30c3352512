"""A real Slurm of three nodes on this machine, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.mini_slurm import MiniSlurm, missing_for_slurm


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
