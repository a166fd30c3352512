"""A logger of one's own: `--logger.path examples/python/logger.py:CsvLogger`, or an importable `module:Class`.

Writes one line per step to `rewards.csv` in the folder of the model. A logger that raises costs one warning, never the
run.
"""

import csv
from pathlib import Path


class CsvLogger:
    """The methods of `openrlhf.launcher.logging.sinks.Sink`."""

    name = "rewards.csv"

    def __init__(self, config, run):
        """config: all flags by name, secrets masked. run: its id, and whether it goes on from a checkpoint."""
        self._path = Path(config["ckpt.output_dir"]) / "rewards.csv"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._rows = self._read() if run.goes_on else {}

    def resume(self, step):
        """The run goes on after `step` steps; later ones will be logged again."""
        self._rows = {number: row for number, row in self._rows.items() if number <= step}

    def log_step(self, step, metrics):
        self._rows[step] = metrics.get("train/reward", "")
        with self._path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("step", "reward"), *self._rows.items()])

    def log_evaluation(self, step, metrics):
        """Evaluations are not wanted here."""

    def log_samples(self, step, samples):
        """Samples are not wanted here."""

    def close(self):
        """Everything is written."""

    def _read(self):
        if not self._path.exists():
            return {}
        with self._path.open(newline="", encoding="utf-8") as file:
            return {int(step): reward for step, reward in list(csv.reader(file))[1:]}
