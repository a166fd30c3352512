"""The places metrics go to: a progress line, TensorBoard event files, a JSON-lines file.

A sink may raise anything; `RunLogger` turns that into one warning. Weights & Biases is in `wandb_sink`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from openrlhf.learner.folders.files import replace_file

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

Metrics = Mapping[str, float]

_MAX_TEXT = 20_000  # characters of one generated sample in TensorBoard


@dataclass(frozen=True, kw_only=True)
class GeneratedSample:
    """One sample for people to read. text: prompt and response."""

    text: str
    label: str = ""
    reward: float | None = None


class UnusableSinkError(ValueError):
    """What the user has to change before the run can log there: a folder, a package. Ends the run at its start."""


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Which run it is. id: the same after every restart. goes_on: it was started before. record: a file in which the
    last steps that were sent are noted, None where nobody will go on from it."""

    id: str
    goes_on: bool = False
    record: Path | None = None


class Sink(Protocol):
    """Receives finite metrics only. Its maker stands in `SINKS` of `logger`.

    `resume` comes before everything else, where a run goes on after `step` steps: what was logged beyond them will be
    logged again, and must not stand there twice.
    """

    name: str

    def resume(self, step: int) -> None: ...

    def log_step(self, step: int, metrics: Metrics) -> None: ...

    def log_evaluation(self, step: int, metrics: Metrics) -> None: ...

    def log_samples(self, step: int, samples: Sequence[GeneratedSample]) -> None: ...

    def close(self) -> None: ...


_PROGRESS = (
    ("train/reward", "reward"),
    ("train/score", "score"),
    ("train/response_length", "length"),
    ("train/kl", "kl"),
    ("train/policy_loss", "loss"),
    ("train/critic_loss", "critic"),
    ("train/gpt_loss", "loss"),
    ("train/loss", "loss"),
    ("train/acc", "acc"),
    ("train/margin", "margin"),
    ("train/grad_norm", "grad"),
    ("train/actor_grad_norm", "grad"),
    ("rollout/sync_error", "sync"),
)
_PHASES = (
    ("timing/generation", "gen"),
    ("timing/make_experience", "exp"),
    ("timing/ppo_train", "train"),
    ("timing/broadcast", "push"),
)


BAR_CELLS = 20
CLEAR_LINE = "\x1b[K"


class ConsoleSink:
    """One line per step: `step 3 of 40  reward 0.91  length 9.8  kl 0.002 | 0.41s: gen 0.21 exp 0.05 ... | 15 s left`.

    steps: how many the run will make, an upper bound where prompts are filtered; None where nobody knows. On a terminal
    the time that is left stands in a bar below the last line, which other output writes over.
    """

    name = "the progress line"

    def __init__(self, stream: TextIO, steps: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._steps = steps
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._bar = "" if steps is not None and stream.isatty() else None

    def resume(self, step: int) -> None:
        """What a terminal has shown stays."""

    def log_step(self, step: int, metrics: Metrics) -> None:
        number = f"step {step}" if self._steps is None else f"step {step} of {self._steps}"
        parts = [number, *(f"{word} {metrics[key]:.4g}" for key, word in _PROGRESS if key in metrics)]
        phases = " ".join(f"{word} {metrics[key]:.2f}" for key, word in _PHASES if key in metrics)
        if "timing/step_total" in metrics:
            parts.append(f"| {metrics['timing/step_total']:.2f}s: {phases}")
        left = self._left(step)
        if self._bar is not None and self._steps is not None:
            self._bar = progress_bar(step, self._steps, left)
        elif left is not None:
            parts.append(f"| {duration(left)} left")
        self._write("  ".join(parts))

    def _left(self, step: int) -> float | None:
        """Seconds until the last step at the pace since the first one logged: what came before it is not counted."""
        now = self._clock()
        if self._first is None:
            self._first = step, now
        first, then = self._first
        if self._steps is None or not first < step < self._steps:
            return None
        return (now - then) / (step - first) * (self._steps - step)

    def log_evaluation(self, step: int, metrics: Metrics) -> None:
        shown = {k.removeprefix("eval/").removeprefix("eval_"): v for k, v in metrics.items() if "pass" in k}
        shown = shown or {k.removeprefix("eval/"): v for k, v in metrics.items()}
        self._write("  ".join([f"eval at step {step}", *(f"{k} {v:.4g}" for k, v in shown.items())]))

    def log_samples(self, step: int, samples: Sequence[GeneratedSample]) -> None:
        """Samples are long; the console does not show them."""

    def close(self) -> None:
        """Take the bar away; the stream is not ours."""
        if self._bar:
            self._stream.write(CLEAR_LINE)
            self._stream.flush()

    def _write(self, line: str) -> None:
        if self._bar is None:
            self._stream.write(line + "\n")
        else:  # the cursor stays at the beginning of the bar
            self._stream.write(f"{CLEAR_LINE}{line}\n{self._bar}\r")
        self._stream.flush()


def progress_bar(step: int, steps: int, left: float | None) -> str:
    """`[######--------------] 30%, 12 min 05 s left`."""
    filled = min(BAR_CELLS, BAR_CELLS * step // steps)
    cells = "#" * filled + "-" * (BAR_CELLS - filled)
    return f"[{cells}] {min(100, 100 * step // steps)}%" + ("" if left is None else f", {duration(left)} left")


def duration(seconds: float) -> str:
    """A span of time for people, in its two largest units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class TensorBoardSink:
    """Event files in one folder. Written at once, so that a killed run loses nothing."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._make = lambda purge: SummaryWriter(str(folder), purge_step=purge)
        self._writer = None if any(folder.glob("events.out.tfevents.*")) else self._make(None)

    @property
    def _open(self) -> SummaryWriter:
        self._writer = self._writer or self._make(None)
        return self._writer

    def resume(self, step: int) -> None:
        """TensorBoard leaves out the earlier events of later steps."""
        if self._writer is None:
            self._writer = self._make(step + 1)

    def log_step(self, step: int, metrics: Metrics) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        # one event for all of them, as TensorBoard reads it too; `add_scalar` makes one each, at eight times the cost
        values = [Summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self._open._get_file_writer().add_summary(Summary(value=values), step)
        self._open.flush()

    def log_evaluation(self, step: int, metrics: Metrics) -> None:
        self.log_step(step, metrics)

    def log_samples(self, step: int, samples: Sequence[GeneratedSample]) -> None:
        for i, sample in enumerate(samples):
            head = f"reward {sample.reward}, label {sample.label!r}"
            self._open.add_text(f"generated_samples/{i}", f"{head}\n\n```\n{sample.text[:_MAX_TEXT]}\n```", step)
        self._open.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class JsonLinesSink:
    """`metrics.jsonl`: one object per step or evaluation, with step and UNIX time, for scripts."""

    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        self._there: set[tuple[str, int]] = set()

    def resume(self, step: int) -> None:
        """Take out the rows of later steps, and one that was cut off; rows that are there are not written again."""
        rows = [
            row for line in self._path.read_bytes().splitlines() if (row := metrics_row(line)) and row["step"] <= step
        ]
        self._file.close()
        replace_file(self._path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file = self._path.open("a", encoding="utf-8")
        self._there = {(row_kind(row), row["step"]) for row in rows}

    def log_step(self, step: int, metrics: Metrics) -> None:
        self._write({"step": step, "time": time.time(), **metrics})

    def log_evaluation(self, step: int, metrics: Metrics) -> None:
        self.log_step(step, metrics)

    def log_samples(self, step: int, samples: Sequence[GeneratedSample]) -> None:
        self._write({"step": step, "time": time.time(), "generated_samples": [asdict(s) for s in samples]})

    def close(self) -> None:
        self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        if (row_kind(row), row["step"]) in self._there:
            return
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()


def metrics_row(line: bytes) -> dict[str, Any] | None:
    """A row of `metrics.jsonl`; None for the part of one that a killed run left."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def row_kind(row: Mapping[str, Any]) -> str:
    """What a row of `metrics.jsonl` tells: "step", "evaluation" or "samples"."""
    if "generated_samples" in row:
        return "samples"
    return "evaluation" if any(key.startswith("eval/") for key in row) else "step"
