"""What a run leaves behind, made readable: TensorBoard events -> reward curve in the terminal and a short table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

REWARD = "train/reward"
STEP_TOTAL = "timing/step_total"
STEP_PHASES = ("timing/generation", "timing/make_experience", "timing/ppo_train", "timing/broadcast")


@dataclass(frozen=True)
class Point:
    """One logged value. time: seconds since the epoch."""

    step: int
    value: float
    time: float


def read_events(folder: Path) -> dict[str, list[Point]]:
    """All scalars of the event files under `folder`, by tag, in the order of their steps."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    out: dict[str, list[Point]] = {}
    for run in sorted({path.parent for path in folder.rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(run), size_guidance={SCALARS: 0})
        events.Reload()
        for tag in events.Tags()[SCALARS]:
            points = [Point(step=e.step, value=e.value, time=e.wall_time) for e in events.Scalars(tag)]
            out.setdefault(tag, []).extend(points)
    return {tag: sorted(points, key=lambda p: p.step) for tag, points in out.items()}


def require(events: Mapping[str, Sequence[Point]], tag: str) -> Sequence[Point]:
    """The points of one tag; a ValueError that lists the tags when it was never logged."""
    if not events.get(tag):
        raise ValueError(f"the run logged no {tag!r}; it logged {sorted(events)!r}")
    return events[tag]


def phase_seconds(events: Mapping[str, Sequence[Point]]) -> dict[str, float]:
    """Seconds in each phase of the training steps, summed over the run; "other" is what the phases leave."""
    sums = {tag.removeprefix("timing/"): sum(p.value for p in events.get(tag, ())) for tag in STEP_PHASES}
    total = sum(p.value for p in require(events, STEP_TOTAL))
    return {**sums, "other": max(0.0, total - sum(sums.values()))}


def terminal_plot(values: Sequence[float], *, width: int = 60, height: int = 10) -> str:
    """A column chart of values in [0, 1], one column per value (averaged when there are more than `width`)."""
    if not values:
        return "(no values)"
    columns = min(width, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    partial = " ▁▂▃▄▅▆▇█"
    rows = []
    for row in range(height - 1, -1, -1):
        eighths = [min(8, max(0, round((m * height - row) * 8))) for m in means]
        label = f"{(row + 1) / height:4.1f} ┤" if row % 2 else "     │"
        rows.append(label + "".join(partial[e] for e in eighths))
    axis = "     └" + "─" * columns
    ends = "      1" + str(len(values)).rjust(columns - 1)
    return "\n".join([*rows, axis, ends])


@dataclass(frozen=True)
class Summary:
    """The numbers of the closing table. seconds: phase -> wall-clock seconds; places and next: label -> text."""

    reward_first: float
    reward_last: float
    accuracy_before: float
    accuracy_after: float
    seconds: Mapping[str, float]
    places: Mapping[str, str] = field(default_factory=dict)
    next: Mapping[str, str] = field(default_factory=dict)


def render_table(summary: Summary) -> str:
    """The closing table, two columns of plain text."""
    rows = [
        ("reward, first step", f"{summary.reward_first:.3f}"),
        ("reward, last step", f"{summary.reward_last:.3f}"),
        ("held-out accuracy at temperature 1, before", f"{summary.accuracy_before:.3f}"),
        ("held-out accuracy at temperature 1, after", f"{summary.accuracy_after:.3f}"),
        *((f"seconds, {phase}", f"{value:.1f}") for phase, value in summary.seconds.items()),
        *summary.places.items(),
        *summary.next.items(),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)
