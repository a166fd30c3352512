"""What holds of a run whose engines came and went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from openrlhf.launcher.record.reader import Record


def check_trained(path: Path, moments: Sequence[int], *, prompts: int, samples: int) -> None:
    """Every sample was trained on exactly once, at most one version old, with weights as well in sync as before.

    path: a folder with the run's record. moments: how many steps were done before engines changed and after it.
    """
    record = Record.open(path)
    steps = record.steps()
    groups = [group for step in steps.values() for group in step.groups]
    trained = [(s.group_id, s.place) for number in steps for s in record.samples(number)]
    assert sorted(group.position for group in groups) == list(range(prompts))
    assert len(trained) == len(set(trained)) == prompts * samples
    ages = [step.metrics["rollout/staleness_max"] for step in steps.values()]
    assert max(ages) <= 1
    errors = [steps[number].metrics["rollout/sync_error"] for number in sorted(steps)]
    before, after = max(errors[: moments[0]]), max(errors[moments[1] :])
    assert after <= 10 * before + 1e-6
    print(f"{len(steps)} steps, staleness up to {max(ages):g}, sync error {before:.3g} before, {after:.3g} after")
