"""What tokenising costs a node: CPU time and memory of 8 ranks beside those of one rank, on rows of a short chat.

Every rank is a process that loads the data as a supervised run does and reads its share of the first steps; what it
takes for a hundred rows comes before. Memory is the growth of the proportional set size, in which a page that several
processes map counts once for all of them.

    .venv/bin/python benchmarks/tokenising.py --rows 1800000
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf.launcher.data.sampler import order
from openrlhf.launcher.data.supervised import load_supervised
from openrlhf.launcher.data.token_cache import TokenCache
from openrlhf.launcher.supervised.batches import Batches
from openrlhf.launcher.supervised.task import Task, make_task
from openrlhf.launcher.supervised_config import SftDataConfig, TrainSFTConfig

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.launcher_tokenizer import byte_tokenizer

RANKS, AIM = 8, 1.3
STEPS, BATCH = 20, 256
MIB = 2**20


def write_rows(path: Path, count: int) -> None:
    rng = random.Random(0)
    with path.open("w") as file:
        for number in range(count):
            row = {"input": f"sort {rng.randrange(10**5):05d}", "output": f"{number:07d}"}
            file.write(json.dumps(row) + "\n")


def held_bytes() -> int:
    """The proportional set size of this process."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in rollup if line.startswith("Pss:")).split()[1]) * 1024


def read(data: Path, cache: Path, task: Task, rank: int, ranks: int) -> Batches:
    """Load the data and take the first steps."""
    tokens = TokenCache(cache, most_bytes=1 << 40)
    dataset = load_supervised(str(data), task.reader, tokens, max_samples=10**9, seed=1)
    batches = Batches(dataset, batch_size=BATCH, hidden_size=64, rank=rank, world_size=ranks)
    for _ in islice(batches.run(order(len(dataset), seed=1, episode=0).astype(np.int32)), STEPS):
        pass
    return batches


def rank_of(rank: int, ranks: int, folder: Path, together: Any, said: Any) -> None:
    """One rank: what it took, when all have their data."""
    task = make_task(TrainSFTConfig(data=SftDataConfig(output_key="output")), byte_tokenizer())
    read(folder / "few.jsonl", folder / f"cache{ranks}", task, rank, ranks)
    together.wait()
    before, began = held_bytes(), time.process_time()
    batches = read(folder / "rows.jsonl", folder / f"cache{ranks}", task, rank, ranks)
    took = time.process_time() - began
    together.wait()
    said.put((took, held_bytes() - before))
    together.wait()
    del batches


def measured(ranks: int, folder: Path) -> tuple[float, int]:
    """CPU seconds and bytes of so many ranks together, from an empty cache."""
    context = multiprocessing.get_context("spawn")
    together, said = context.Barrier(ranks), context.Queue()
    processes = [context.Process(target=rank_of, args=(rank, ranks, folder, together, said)) for rank in range(ranks)]
    for process in processes:
        process.start()
    answers = [said.get() for _ in processes]
    for process in processes:
        process.join()
    return sum(seconds for seconds, _ in answers), sum(held for _, held in answers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_800_000)
    parser.add_argument("--ranks", type=int, default=RANKS)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder) / "few.jsonl", 100)
        write_rows(Path(folder) / "rows.jsonl", args.rows)
        found = {ranks: measured(ranks, Path(folder)) for ranks in (1, args.ranks)}
    for ranks, (seconds, held) in found.items():
        print(f"{args.rows} rows, {ranks} ranks: {seconds:.1f} s of CPU time, {held / MIB:.0f} MiB")
    ratios = [several / one for several, one in zip(found[args.ranks], found[1], strict=True)]
    print(f"{args.ranks} ranks take {ratios[0]:.2f} times the CPU time and {ratios[1]:.2f} times the memory of one")
    return int(max(ratios) > AIM)


if __name__ == "__main__":
    sys.exit(main())
