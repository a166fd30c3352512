"""`python -m openrlhf.launcher.ray.alive ADDRESS NODES SECONDS`: wait until a Ray cluster has its nodes.

A program of its own, because Ray reads its token when it is imported and a client of a dead cluster cannot be stopped.
"""

from __future__ import annotations

import sys
import time


def wait_for_nodes(address: str, nodes: int, seconds: float) -> int:
    """0 when at least `nodes` nodes are alive, 1 after `seconds`; says on stderr what it sees."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import RpcError

    deadline, seen = time.monotonic() + seconds, -1
    while time.monotonic() < deadline:
        try:
            infos = GcsClient(address=address).get_all_node_info(timeout=2)
            alive = sum(info.state == 0 for info in infos.values())
        except RpcError:
            alive = 0
        if alive != seen:
            sys.stderr.write(f"{alive} of {nodes} Ray nodes are up\n")
            seen = alive
        if alive >= nodes:
            return 0
        time.sleep(0.5)
    return 1


if __name__ == "__main__":
    sys.exit(wait_for_nodes(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
