"""MLflow, Trackio, SwanLab and Comet: each an extra of the same name, all behind one sink.

What they have in common (no step twice, samples as text, a missing package) is `ServiceSink`'s; what differs is a
`Service`, which a function of this module opens. Where a service sends to is its own business: `MLFLOW_TRACKING_URI`,
`SWANLAB_MODE`, `COMET_API_KEY` and the like are read by it, not by us.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from openrlhf.launcher.logging.sinks import GeneratedSample, Metrics, RunIdentity, UnusableSinkError

_MAX_TEXT = 20_000  # characters of one generated sample


class Service(Protocol):
    """A run that a service keeps."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def log_text(self, step: int, name: str, text: str) -> None: ...

    def finish(self) -> None: ...


class ServiceSink:
    """A run of one service. A run that goes on sends no step again that it had sent before it was killed.

    What was sent is noted beside the checkpoints, in a file of this service's (`RunIdentity.record`).
    """

    def __init__(self, name: str, service: Service, run: RunIdentity) -> None:
        self.name = name
        self._service = service
        self._run = run
        self._note = None if run.record is None else run.record.with_name(f"{run.record.stem}.{name.lower()}.json")
        self._sent = {"step": -1, "evaluation": -1}

    def resume(self, step: int) -> None:
        if not self._run.goes_on:
            return
        self._sent = self._noted() | {}
        self._sent["step"] = max(self._sent["step"], step)

    def log_step(self, step: int, metrics: Metrics) -> None:
        self._log("step", step, metrics)

    def log_evaluation(self, step: int, metrics: Metrics) -> None:
        self._log("evaluation", step, metrics)

    def _log(self, kind: str, step: int, metrics: Metrics) -> None:
        if step <= self._sent[kind]:
            return
        self._service.log(step, metrics)
        self._sent[kind] = step
        if self._note is not None:
            self._note.write_text(json.dumps({"run": self._run.id, **self._sent}) + "\n", encoding="utf-8")

    def log_samples(self, step: int, samples: Sequence[GeneratedSample]) -> None:
        if step < self._sent["step"]:
            return
        parts = [f"reward {s.reward}, label {s.label!r}\n{s.text[:_MAX_TEXT]}" for s in samples]
        self._service.log_text(step, "generated_samples", "\n\n".join(parts))

    def close(self) -> None:
        self._service.finish()

    def _noted(self) -> dict[str, int]:
        nothing = {"step": -1, "evaluation": -1}
        try:
            content = json.loads("" if self._note is None else self._note.read_text(encoding="utf-8"))
            return {kind: int(content[kind]) for kind in nothing} if content["run"] == self._run.id else nothing
        except (OSError, ValueError, KeyError):
            return nothing


class _MLflow:
    """A run is found again by a tag: MLflow gives it a name of its own."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any], run: RunIdentity) -> None:
        self._client = _package("mlflow", "mlflow")
        self._client.set_experiment(project)
        known = []
        if run.goes_on:
            tag = f"tags.openrlhf_run = '{run.id}'"
            known = self._client.search_runs(filter_string=tag, output_format="list")
        if known:
            self._client.start_run(run_id=known[0].info.run_id)
        else:
            self._client.start_run(run_name=name, tags={"openrlhf_run": run.id})
            self._client.log_dict(dict(config), "config.json")

    def log(self, step: int, metrics: Metrics) -> None:
        self._client.log_metrics(dict(metrics), step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(text, f"{name}/{step:08d}.txt")

    def finish(self) -> None:
        self._client.end_run()


class _Trackio:
    """A run has the name of ours, by which it is found again."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any], run: RunIdentity) -> None:
        self._client = _package("trackio", "trackio")
        again = "allow" if run.goes_on else "never"
        self._client.init(project=project, name=f"{name}-{run.id}", config=dict(config), resume=again)

    def log(self, step: int, metrics: Metrics) -> None:
        self._client.log(dict(metrics), step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        """Samples are in the record; Trackio has tables, and no texts."""

    def finish(self) -> None:
        self._client.finish()


class _SwanLab:
    """A run's id is made of ours, by which it is found again."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any], run: RunIdentity) -> None:
        self._client = _package("swanlab", "swanlab")
        again: dict[str, Any] = {"id": _long_id(run)[:21], "resume": "allow"}
        self._run = self._client.init(project=project, experiment_name=name, config=dict(config), **again)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: self._client.Text(text)}, step=step)

    def finish(self) -> None:
        self._run.finish()


class _Comet:
    """A run's key is made of ours, by which it is found again."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any], run: RunIdentity) -> None:
        comet = _package("comet_ml", "comet")
        self._experiment = comet.start(
            project_name=project,
            experiment_key=_long_id(run),
            mode="get_or_create",
            experiment_config=comet.ExperimentConfig(name=name, log_code=False),
        )
        self._experiment.log_parameters(dict(config))

    def log(self, step: int, metrics: Metrics) -> None:
        self._experiment.log_metrics(dict(metrics), step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        self._experiment.log_text(text, step=step)

    def finish(self) -> None:
        self._experiment.end()


Open = Callable[[str, str, Mapping[str, Any], RunIdentity], Service]
SERVICES: dict[str, Open] = {"MLflow": _MLflow, "Trackio": _Trackio, "SwanLab": _SwanLab, "Comet": _Comet}
"""Name -> what opens a run: (project, name of the run, configuration with masked secrets, which run it is)."""


def service_sink(name: str, project: str, run_name: str, config: Mapping[str, Any], run: RunIdentity) -> ServiceSink:
    """The sink of a service. Raises UnusableSinkError without its package, else whatever the service raises."""
    return ServiceSink(name, SERVICES[name](project, run_name, config, run), run)


def _package(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UnusableSinkError(
            f"--logger.{extra} needs the package {module}: pip install 'openrlhf-launcher[{extra}]', or drop the flag"
        ) from None


def _long_id(run: RunIdentity) -> str:
    return hashlib.sha256(run.id.encode()).hexdigest()[:32]
