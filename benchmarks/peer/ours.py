"""Our side: `train_ppo_ray` with the flags given, and a logger that reports every step and waits for its turn.

After each step it prints a line `@step {...}` and waits for one on its standard input.
usage: ours.py FLAGS...
"""

from __future__ import annotations

import json
import sys

from openrlhf.launcher.command_line import train_ppo_ray
from openrlhf.launcher.logging import logger
from openrlhf.launcher.logging.sinks import Metrics


class Gate:
    """The driver waits in `log_step`; everything else has nothing to do then."""

    name = "the benchmark"

    def resume(self, step: int) -> None: ...

    def log_step(self, step: int, metrics: Metrics) -> None:
        wanted = {"train/reward": "reward", "train/response_length": "length"}
        kept = {short: metrics[name] for name, short in wanted.items() if name in metrics}
        kept |= {name: value for name, value in metrics.items() if name.startswith("timing/")}
        print("@step", json.dumps(kept), flush=True)
        sys.stdin.readline()

    def log_evaluation(self, step: int, metrics: Metrics) -> None: ...

    def log_samples(self, step: int, samples: object) -> None: ...

    def close(self) -> None: ...


if __name__ == "__main__":
    logger.SINKS["the benchmark"] = lambda config, run: [Gate()]
    sys.exit(train_ppo_ray(sys.argv[1:]))
