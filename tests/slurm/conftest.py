"""A real Slurm of three nodes on this machine, for the tests of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

MINISLURM = Path(__file__).parents[1] / "support" / "minislurm.sh"
MS_DIR = "/tmp/openrlhf-minislurm"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """Bring the cluster up and point this process at it; take it down at the end."""
    if os.geteuid() != 0:
        pytest.skip("the mini-cluster makes network namespaces: it needs root")
    missing = [
        name for name in ("slurmctld", "slurmd", "munged", "ip") if not shutil.which(name, path=path_with_sbin())
    ]
    if missing:
        pytest.skip(f"missing {', '.join(missing)}: apt-get install slurm-wlm munge iproute2")
    environ = os.environ | {"MS_DIR": MS_DIR, "PATH": path_with_sbin()}
    subprocess.run(["bash", str(MINISLURM), "up"], env=environ, check=True, timeout=120)
    os.environ["SLURM_CONF"] = f"{MS_DIR}/etc/slurm.conf"
    yield Path(MS_DIR)
    subprocess.run(["bash", str(MINISLURM), "down"], env=environ, check=True, timeout=120)
    del os.environ["SLURM_CONF"]


def path_with_sbin() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
