"""Stand-ins for the trainer in Slurm tests: `python slurm_driver.py MODE ...`."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path


def write_arguments(path: str, *arguments: str) -> int:
    """Write down the arguments and what Ray shows, then end with the number in the first one."""
    import ray

    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    nodes = sorted(n["NodeManagerHostname"] for n in ray.nodes() if n["Alive"])
    ray.shutdown()
    seen = {"arguments": arguments, "nodes": nodes, "host": socket.gethostname(), "HF_HOME": os.environ.get("HF_HOME")}
    Path(path).write_text(json.dumps(seen))
    return int(arguments[0])


def count(folder: str, last: str, *flags: str) -> int:
    """Count a step per second from the newest checkpoint; on USR1 save and end with 85."""
    warned = []
    signal.signal(signal.SIGUSR1, lambda *_: warned.append(True))
    root = Path(folder)
    root.mkdir(exist_ok=True)
    steps = [int(p.name.removeprefix("global_step")) for p in root.glob("global_step*")]
    step = max(steps, default=0) if "--ckpt.load_enable" in flags else 0
    with (root / "lives").open("a") as lives:
        lives.write(f"{step} {os.environ['SLURM_JOB_ID']}\n")
    while step < int(last):
        time.sleep(1)
        step += 1
        if warned:
            (root / f"global_step{step}").mkdir()
            return 85
    (root / "done").write_text(str(step))
    return 0


if __name__ == "__main__":
    sys.exit({"arguments": write_arguments, "count": count}[sys.argv[1]](*sys.argv[2:]))
