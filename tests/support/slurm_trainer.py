"""A stand-in for the trainer on Slurm: `python slurm_trainer.py FLAGS...`, told what to do by $STAND_IN.

report FILE CODE: write down what arrived and what Ray's workers see, end with CODE.
count FILE LAST: a step per second from the newest checkpoint, a note in FILE per life; USR1 saves and ends with 85.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

NAMES = ("HF_HOME", "NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "RAY_DEDUP_LOGS", "CUDA_VISIBLE_DEVICES")


def report(file: str, code: str, flags: list[str]) -> int:
    """An actor on every GPU tells what is in its environment."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=0, num_gpus=1)
    class Worker:
        def look(self) -> dict[str, str | None]:
            return {"node": os.uname().nodename} | {name: os.environ.get(name) for name in NAMES}

    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    nodes = [n for n in ray.nodes() if n["Alive"]]
    places = [n["NodeID"] for n in nodes for _ in range(int(n["Resources"]["GPU"]))]
    on = [NodeAffinitySchedulingStrategy(place, soft=False) for place in places]
    worker: Any = Worker
    actors = [worker.options(scheduling_strategy=place).remote() for place in on]
    workers = ray.get([actor.look.remote() for actor in actors], timeout=300)
    ports = [n["NodeManagerPort"] for n in nodes]
    address = ray.get_runtime_context().gcs_address
    ray.shutdown()
    seen = {"flags": flags, "workers": workers, "ports": ports, "address": address, "pid": os.getpid()}
    Path(file).write_text(json.dumps(seen))
    return int(code)


def count(file: str, last: str, flags: list[str]) -> int:
    """Checkpoints are folders below --ckpt.path; every second step is saved."""
    warned: list[int] = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: warned.append(signum))
    root = Path([value for name, value in pairwise(flags) if name == "--ckpt.path"][-1])  # the last one wins
    root.mkdir(parents=True, exist_ok=True)
    saved = [int(p.name.removeprefix("global_step")) for p in root.glob("global_step*")]
    step = max(saved, default=0) if "--ckpt.load_enable" in flags else 0
    with Path(file).open("a") as lives:
        lives.write(f"{step} {os.environ['SLURM_JOB_ID']}\n")
    while step < int(last):
        time.sleep(1)
        step += 1
        if warned or step % 2 == 0:
            (root / f"global_step{step}").mkdir()
        if warned:
            return 85
    with Path(file).open("a") as lives:
        lives.write(f"done {step}\n")
    return 0


if __name__ == "__main__":
    what, file, number = shlex.split(os.environ["STAND_IN"])
    sys.exit({"report": report, "count": count}[what](file, number, sys.argv[1:]))
