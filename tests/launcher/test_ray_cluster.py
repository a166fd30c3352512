import pytest

from openrlhf.launcher.ray.cluster import Cluster


@pytest.mark.parametrize(
    ("given", "spins", "waits"),
    [({}, "20000", None), ({"GOMP_SPINCOUNT": "7"}, "7", None), ({"OMP_WAIT_POLICY": "passive"}, None, "passive")],
)
def test_threads_sleep_after_a_moment_unless_the_user_says_how_they_wait(monkeypatch, given, spins, waits) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    workers = Cluster(started=True, run_id="r").worker_environment()
    assert workers.get("GOMP_SPINCOUNT") == spins
    assert workers.get("OMP_WAIT_POLICY", waits) == waits  # what is not in it comes from the node's own environment


def test_runs_on_gpus_leave_threads_alone(monkeypatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert "GOMP_SPINCOUNT" not in Cluster(started=True, run_id="r", gpus=1).worker_environment()
