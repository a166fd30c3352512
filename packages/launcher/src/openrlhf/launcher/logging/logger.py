"""`RunLogger`: every metric to every sink. A sink that fails costs one warning, never the run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from openrlhf.launcher.flags import values_of
from openrlhf.launcher.logging.sinks import ConsoleSink, GeneratedSample, JsonLinesSink, Sink, TensorBoardSink
from openrlhf.launcher.logging.values import finite
from openrlhf.launcher.logging.wandb_sink import MissingPackageError, WandbOptions, WandbSink
from openrlhf.launcher.redaction import redact_value

log = logging.getLogger(__name__)


class LoggerOptions(Protocol):
    """The `logger.*` options."""

    @property
    def logging_steps(self) -> int: ...
    @property
    def tensorboard_dir(self) -> str | None: ...
    @property
    def wandb(self) -> WandbOptions: ...


class HasLogger(Protocol):
    """Any command's configuration."""

    @property
    def logger(self) -> LoggerOptions: ...


class RunLogger:
    """Metrics of a run, under names such as `train/reward`, `rollout/sync_error`, `timing/generation`.

    Steps are logged when `step % --logger.logging_steps == 0`, evaluations and samples always. Values that are not
    finite are left out. With `--logger.tensorboard_dir` the folder `{dir}/{run name}` gets TensorBoard's files and
    `metrics.jsonl`; with `--logger.wandb.key` the run is also sent to Weights & Biases.
    Raises ValueError at the start for a folder that can't be written and for a missing package; after that, nothing.
    """

    def __init__(self, config: HasLogger, *, sinks: Sequence[Sink] | None = None) -> None:
        self.every = max(config.logger.logging_steps, 1)
        self._broken: set[str] = set()
        self._sinks = list(default_sinks(config) if sinks is None else sinks)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of one training step."""
        if step % self.every == 0:
            values = finite(metrics)
            self._each(lambda sink: sink.log_step(step, values))

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of an evaluation after `step` training steps."""
        values = finite(metrics)
        self._each(lambda sink: sink.log_evaluation(step, values))

    def log_samples(self, step: int, samples: Sequence[GeneratedSample]) -> None:
        """A few generated samples, as a table."""
        if samples:
            self._each(lambda sink: sink.log_samples(step, samples))

    def close(self) -> None:
        """Write out what is waiting; may be called again."""
        self._each(lambda sink: sink.close())
        self._sinks = []

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            try:
                call(sink)
            except Exception as error:  # a logger's outage is no reason to stop training
                if sink.name not in self._broken:
                    self._broken.add(sink.name)
                    log.warning(
                        "%s failed (%s: %s); the run goes on, further failures are not reported",
                        sink.name,
                        type(error).__name__,
                        error,
                    )


def default_sinks(config: HasLogger) -> list[Sink]:
    """The sinks that the options ask for."""
    options = config.logger
    sinks: list[Sink] = [ConsoleSink(sys.stdout)]
    if options.tensorboard_dir is not None:
        folder = Path(options.tensorboard_dir).expanduser() / options.wandb.run_name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sinks += [JsonLinesSink(folder / "metrics.jsonl"), TensorBoardSink(folder)]
        except OSError as error:
            raise ValueError(f"--logger.tensorboard_dir {options.tensorboard_dir!r}: {error}") from error
    if options.wandb.key is not None:
        try:
            sinks.append(WandbSink(options.wandb, masked(config)))
        except MissingPackageError:
            raise
        except Exception as error:  # wandb's errors, and those of its service and the network
            log.warning("Weights & Biases does not work (%s: %s); the run goes on", type(error).__name__, error)
    return sinks


def masked(config: object) -> dict[str, Any]:
    """All options by dotted name, secrets as `***`."""
    return {path: redact_value(path, value) for path, value in values_of(config).items()}
