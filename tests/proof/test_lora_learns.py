"""With adapters of rank 16 the quickstart's task is learned as fast as with all weights; with a critic too."""

import json
import statistics
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import start_processes
from warm_start import WarmStart, make_warm_start

from support.learner_ranks import free_port
from support.proof_ranks import Case, run_cases

SEEDS = (1, 2, 3)
FULL = [Case(estimator="reinforce_baseline", loss="ppo", seed=seed) for seed in SEEDS]
LORA = [Case(estimator="reinforce_baseline", loss="ppo", seed=seed, lora=16, kl_coef=1e-3) for seed in SEEDS]
CRITIC = [Case(estimator="gae", loss="ppo", seed=seed, lora=16) for seed in SEEDS]

pytestmark = [pytest.mark.proof, pytest.mark.ranks, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """All cases in one pair of spawned ranks: name -> outcome."""
    folder: Path = tmp_path_factory.mktemp("lora")
    make_warm_start(folder / "warm_start", WarmStart())
    cases = [*FULL, *LORA, *CRITIC]
    results = folder / "results.jsonl"
    arguments = (2, free_port(), str(folder / "warm_start"), cases, results)
    start_processes(run_cases, args=arguments, nprocs=2, start_method="spawn")
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    for case, row in zip(cases, rows, strict=True):
        print(f"{case.name}: {row['before']:.3f} -> {row['after']:.3f}")
    return {case.name: row for case, row in zip(cases, rows, strict=True)}


def test_adapters_reach_what_full_training_does(outcomes: dict[str, dict]) -> None:
    full, lora = (statistics.mean(outcomes[case.name]["after"] for case in cases) for cases in (FULL, LORA))
    assert all(0.35 <= outcomes[case.name]["before"] <= 0.5 for case in (*FULL, *LORA))
    assert lora >= full - 0.05


def test_no_alarm_cries(outcomes: dict[str, dict]) -> None:
    assert [row["alarms"] for row in outcomes.values()] == [[]] * len(outcomes)


@pytest.mark.parametrize("number", range(len(SEEDS)))
def test_every_seed_is_within_reach(outcomes: dict[str, dict], number: int) -> None:
    assert outcomes[LORA[number].name]["after"] >= outcomes[FULL[number].name]["after"] - 0.05


@pytest.mark.parametrize("case", CRITIC, ids=lambda case: case.name)
def test_ppo_learns_with_a_critic_that_has_adapters(outcomes: dict[str, dict], case: Case) -> None:
    assert outcomes[case.name]["after"] >= 0.75
