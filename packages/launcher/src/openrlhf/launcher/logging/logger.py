"""`RunLogger`: every metric to every sink. A sink that fails costs one warning, never the run."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import values_of
from openrlhf.launcher.logging.own_sink import load_sink
from openrlhf.launcher.logging.sinks import (
    ConsoleSink,
    GeneratedSample,
    JsonLinesSink,
    RunIdentity,
    Sink,
    TensorBoardSink,
    UnusableSinkError,
)
from openrlhf.launcher.logging.values import finite
from openrlhf.launcher.logging.wandb_sink import WandbSink
from openrlhf.launcher.redaction import redact_value
from openrlhf.launcher.saved import saved_run_id
from openrlhf.launcher.supervised_config import SupervisedConfig
from openrlhf.learner.folders.manifest import PREFIX, Manifest

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
RECORD = f"{PREFIX}run.json"


class RunLogger:
    """Metrics of a run, under names such as `train/reward`, `rollout/sync_error`, `timing/generation`.

    Steps are logged when `step % --logger.logging_steps == 0`, evaluations and samples always. Values that are not
    finite are left out. With `--logger.tensorboard_dir` the folder `{dir}/{run name}` gets TensorBoard's files and
    `metrics.jsonl`; with `--logger.wandb.key` the run is also sent to Weights & Biases. A run that goes on after a kill
    is the same run there (`run_id`, kept in its checkpoints), and no step stands in its logs twice.
    steps: how many the run makes at most, for the progress line.
    Raises ValueError at the start for a folder that can't be written and for a missing package; after that, nothing.
    """

    def __init__(
        self,
        config: TrainPPOConfig | SupervisedConfig,
        *,
        steps: int | None = None,
        sinks: Sequence[Sink] | None = None,
    ) -> None:
        self.every = max(config.logger.logging_steps, 1)
        self._broken: set[str] = set()
        saved = saved_run_id(config)
        self.run_id = saved or secrets.token_hex(4)
        if sinks is None:
            run = RunIdentity(id=self.run_id, goes_on=saved is not None, record=_record(config))
            sinks = default_sinks(config, run, steps)
        self._sinks = list(sinks)

    def resume(self, step: int) -> None:
        """The run goes on after `step` steps: what the logs hold beyond them goes, or is not written again."""
        self._each(lambda sink: sink.resume(step))

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


def default_sinks(config: TrainPPOConfig | SupervisedConfig, run: RunIdentity, steps: int | None) -> list[Sink]:
    """The sinks that the options ask for."""
    sinks: list[Sink] = [ConsoleSink(sys.stdout, steps)]
    for name, make in SINKS.items():
        try:
            sinks += make(config, run)
        except UnusableSinkError:
            raise
        except Exception as error:  # those of a service and of the network: no reason not to train
            log.warning("%s does not work (%s: %s); the run goes on", name, type(error).__name__, error)
    return sinks


def _files(config: TrainPPOConfig | SupervisedConfig, run: RunIdentity) -> list[Sink]:
    options = config.logger
    if options.tensorboard_dir is None:
        return []
    folder = Path(options.tensorboard_dir).expanduser() / options.wandb.run_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim_metrics(folder, goes_on=config.ckpt.load_enable)
        return [JsonLinesSink(folder / METRICS), TensorBoardSink(folder)]
    except OSError as error:
        raise UnusableSinkError(f"--logger.tensorboard_dir {options.tensorboard_dir!r}: {error}") from error


def _wandb(config: TrainPPOConfig | SupervisedConfig, run: RunIdentity) -> list[Sink]:
    return [] if config.logger.wandb.key is None else [WandbSink(config.logger.wandb, masked(config), run)]


def _own(config: TrainPPOConfig | SupervisedConfig, run: RunIdentity) -> list[Sink]:
    return [] if config.logger.path is None else [load_sink(config.logger.path)(masked(config), run)]


def _prometheus(config: TrainPPOConfig | SupervisedConfig, run: RunIdentity) -> list[Sink]:
    logger = config.logger
    if logger.prometheus_port is None:
        return []
    from openrlhf.launcher.logging.prometheus_sink import PrometheusSink

    sink = PrometheusSink(logger.prometheus_host, logger.prometheus_port, logger.wandb.run_name)
    log.info("metrics for Prometheus: http://%s:%d/metrics", logger.prometheus_host, sink.port)
    return [sink]


def _services(config: TrainPPOConfig | SupervisedConfig, run: RunIdentity) -> list[Sink]:
    logger = config.logger
    asked = {"MLflow": logger.mlflow, "Trackio": logger.trackio, "SwanLab": logger.swanlab, "Comet": logger.comet}
    projects = {name: project for name, project in asked.items() if project is not None}
    if not projects:
        return []
    from openrlhf.launcher.logging.service_sink import service_sink

    own = logger.wandb.run_name, masked(config), run
    return [service_sink(name, project, *own) for name, project in projects.items()]


SINKS: dict[str, Callable[[TrainPPOConfig | SupervisedConfig, RunIdentity], list[Sink]]] = {
    "TensorBoard": _files,
    WandbSink.name: _wandb,
    "--logger.path": _own,
    "Prometheus": _prometheus,
    "MLflow, Trackio, SwanLab or Comet": _services,
}
"""What makes the sinks beside the progress line, none where the options do not ask for one, by their name."""


def claim_metrics(folder: Path, *, goes_on: bool) -> None:
    """Make `metrics.jsonl` in the folder this run's: that of an earlier run steps aside (`metrics.1.jsonl`).

    Raises UnusableSinkError where there is one that no run wrote, or the folder's manifest is none.
    """
    try:
        manifest = Manifest.read(folder)
    except ValueError as error:
        raise UnusableSinkError(str(error)) from error
    if manifest.foreign([METRICS]):
        raise UnusableSinkError(
            f"--logger.tensorboard_dir: {str(folder / METRICS)!r} was written by no run that is recorded there: move "
            "it away, or give another --logger.wandb.run_name"
        )
    if not goes_on and (folder / METRICS).is_file():
        number = 1
        while (aside := folder / f"metrics.{number}.jsonl").exists():
            number += 1
        (folder / METRICS).rename(aside)
        manifest.note(aside.name, part="logs", grows=True)
    manifest.note(METRICS, part="logs", grows=True)
    manifest.write()


def _record(config: TrainPPOConfig | SupervisedConfig) -> Path | None:
    """Where the last logged step is noted; only beside checkpoints, from which a run can go on."""
    folder = Path(config.ckpt.path).expanduser()
    return folder / RECORD if config.ckpt.save_steps > 0 and folder.is_dir() else None


def masked(config: object) -> dict[str, Any]:
    """All options by dotted name, secrets as `***`."""
    return {path: redact_value(path, value) for path, value in values_of(config).items()}
