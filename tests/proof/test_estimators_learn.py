"""Every estimator with PPO's and GSPO's loss, and every other loss, learns the quickstart's task within 40 steps.

Those that have a teacher instead of a reward have a proof of their own, `test_distillation.py`.
"""

import json
import socket
import statistics

import pytest
from torch.multiprocessing.spawn import start_processes
from warm_start import WarmStart, make_warm_start

from openrlhf.core.tables import ESTIMATORS, POLICY_LOSSES
from support.proof_ranks import Case, run_cases

PLAIN = ("ppo", "gspo")
CASES = [
    Case(estimator=estimator, loss=loss, seed=seed)
    for estimator, loss in (
        *((estimator, loss) for estimator, row in ESTIMATORS.items() if not row.teacher for loss in PLAIN),
        *(("reinforce_baseline", loss) for loss in POLICY_LOSSES if loss not in PLAIN),
    )
    for seed in (1, 2, 3)
]

pytestmark = [pytest.mark.proof, pytest.mark.ranks, pytest.mark.timeout(3600)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """All cases that were asked for in one pair of spawned ranks: name -> outcome."""
    asked = {item.name.partition("[")[2].removesuffix("]") for item in request.session.items}
    cases = [case for case in CASES if case.name in asked]
    folder = tmp_path_factory.mktemp("estimators")
    make_warm_start(folder / "warm_start", WarmStart())
    results = folder / "results.jsonl"
    arguments = (2, free_port(), str(folder / "warm_start"), cases, results)
    start_processes(run_cases, args=arguments, nprocs=2, start_method="spawn")
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return {f"{row['estimator']}-{row['loss']}-{row['seed']}": row for row in rows}


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_estimator_learns(outcomes, name: str) -> None:
    outcome = outcomes[name]
    print(f"{name}: {outcome['before']:.3f} -> {outcome['after']:.3f}")
    assert 0.35 <= outcome["before"] <= 0.5
    assert outcome["after"] >= 0.75
    assert statistics.mean(outcome["rewards"][-10:]) >= 0.75
    assert outcome["alarms"] == []
