"""A process that saves checkpoints without end, to be killed at any moment: `learner_saver.py ROOT FIRST_STEP`."""

from __future__ import annotations

import sys
from pathlib import Path

from openrlhf.learner.checkpoint_dir import CheckpointStore

FILES = 6
SIZE = 200_000


def main(root: str, first: int) -> None:
    store = CheckpointStore(Path(root), max_num=2)
    step = first
    while True:
        pending = store.begin(step)
        for part in ("actor", "state"):
            (pending / part).mkdir()
            for number in range(FILES // 2):
                (pending / part / f"{number}.bin").write_bytes(step.to_bytes(4, "big") * SIZE)
        store.commit(step)
        print(step, flush=True)
        step += 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
