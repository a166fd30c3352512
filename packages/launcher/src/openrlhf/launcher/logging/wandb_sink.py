"""Weights & Biases (`[wandb]` extra). `WANDB_MODE=offline` writes the run to the disk only."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.launcher.config import WandbConfig
from openrlhf.launcher.logging.sinks import GeneratedSample, Metrics, RunIdentity, UnusableSinkError

INIT_TIMEOUT = 60.0
FINISH_TIMEOUT = 60.0
STEP = "train/global_step"
_KEPT_SAMPLES = 200
_COLUMNS = ["global_step", "text", "label", "reward"]


class WandbSink:
    """One run. `run_config` is shown on its page; secrets must be masked already.

    A run that goes on does so on its page, and sends no step again that it had sent before it was killed.

    Raises UnusableSinkError without the `wandb` package, and whatever wandb raises when the run can't be started.
    """

    name = "Weights & Biases"

    def __init__(self, options: WandbConfig, run_config: Mapping[str, Any], run: RunIdentity) -> None:
        wandb = _import()
        self._identity = run
        self._sent = {"step": -1, "evaluation": -1}
        online = os.environ.get("WANDB_MODE") not in ("offline", "disabled", "dryrun")
        key = {"api_key": options.key} if online and options.key else {}  # wandb.login() would keep it in ~/.netrc
        self._run = wandb.init(
            entity=options.org,
            project=options.project,
            group=options.group,
            name=options.run_name,
            id=run.id,
            resume="allow" if run.goes_on else None,
            config=dict(run_config),
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT, **key),
        )
        self._table = wandb.Table
        self._run.define_metric(STEP)
        for section in ("train", "rollout", "timing", "eval"):
            self._run.define_metric(f"{section}/*", step_metric=STEP)
        self._rows: list[list[Any]] = []

    def resume(self, step: int) -> None:
        """Nothing up to the last step that was sent is sent again, be it before `step` or after."""
        if not self._identity.goes_on:
            return
        sent = _read_record(self._identity)
        known = int(self._run.summary.get(STEP) or -1)  # offline nothing is known
        self._sent = {kind: max(sent.get(kind, known), step if kind == "step" else -1) for kind in self._sent}

    def log_step(self, step: int, metrics: Metrics) -> None:
        self._log("step", step, metrics)

    def log_evaluation(self, step: int, metrics: Metrics) -> None:
        self._log("evaluation", step, metrics)

    def _log(self, kind: str, step: int, metrics: Metrics) -> None:
        if step <= self._sent[kind]:
            return
        self._run.log({**metrics, STEP: step})
        self._sent[kind] = step
        if self._identity.record is not None:
            content = {"run": self._identity.id, **self._sent}
            self._identity.record.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def log_samples(self, step: int, samples: Sequence[GeneratedSample]) -> None:
        """The table of the newest samples; a logged table is final, so each time a new one is sent."""
        if step < self._sent["step"]:
            return
        self._rows += [[step, s.text, s.label, s.reward] for s in samples]
        self._rows = self._rows[-_KEPT_SAMPLES:]
        table = self._table(columns=_COLUMNS, data=self._rows)
        self._run.log({"train/generated_samples": table, STEP: step})

    def close(self) -> None:
        """Wait for the upload, at most FINISH_TIMEOUT seconds."""
        errors: list[Exception] = []

        def finish() -> None:
            try:
                self._run.finish()
            except Exception as error:  # handed to the caller's thread
                errors.append(error)

        thread = threading.Thread(target=finish, name="wandb-finish", daemon=True)
        thread.start()
        thread.join(FINISH_TIMEOUT)
        if errors:
            raise errors[0]
        if thread.is_alive():
            raise TimeoutError(f"the upload was not finished after {FINISH_TIMEOUT:.0f} s; see `wandb sync`")


def _read_record(run: RunIdentity) -> dict[str, int]:
    """The last steps that were sent; empty when none are noted for this run."""
    try:
        content = json.loads("" if run.record is None else run.record.read_text(encoding="utf-8"))
        return {kind: int(content[kind]) for kind in ("step", "evaluation")} if content["run"] == run.id else {}
    except (OSError, ValueError, KeyError):
        return {}


def _import() -> Any:
    try:
        import wandb
    except ModuleNotFoundError:
        raise UnusableSinkError(
            "--logger.wandb.key needs the package wandb: pip install 'openrlhf[wandb]', or drop the flag"
        ) from None
    return wandb
