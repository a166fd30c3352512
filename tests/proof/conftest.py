"""No alarm may cry in a whole run, but for those that a test names because its model can't do better (`alarms`)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf.launcher.record.files import ABOUT
from openrlhf.launcher.record.reader import Record


@pytest.fixture(autouse=True)
def no_false_alarm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Looks into the records of all runs that the test made."""
    yield
    runs = [Record.open(about.parent) for about in sorted(tmp_path.rglob(ABOUT))]
    allowed = {name for marker in request.node.iter_markers("alarms") for name in marker.args}
    raised = [row for run in runs for row in run.alarms() if row["state"] == "raised"]
    steps = sum(len(run.steps()) for run in runs)
    print(f"{len(runs)} recorded runs, {steps} steps, alarms: {sorted(row['name'] for row in raised)}")
    assert [row for row in raised if row["name"] not in allowed] == []
