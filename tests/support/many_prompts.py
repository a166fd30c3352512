"""Loads a Parquet file in which each prompt stands a hundred times, and says what that cost.

python many_prompts.py FOLDER ROWS: prints {"rows", "prompts", "seconds", "grown_mib"} as JSON; the last is the growth
of the process' largest memory while it loads.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

REPEATED = 100


def write(path: Path, rows: int) -> None:
    """Rows in the manner of DAPO-Math-17k: message lists, a nested label, a running index."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    distinct = rows // REPEATED
    words = "Let the side lengths of a triangle be given and find the sum of its angles. " * 3
    prompts = pa.array([[{"role": "user", "content": f"{i}: {words}"}] for i in range(distinct)])
    labels = pa.array([{"ground_truth": str(i), "style": "rule"} for i in range(distinct)])
    whole = pa.table({"prompt": prompts, "reward_model": labels})
    with pq.ParquetWriter(path, whole.schema) as writer:
        for _ in range(REPEATED):
            writer.write_table(whole)


def main(folder: Path, rows: int) -> None:
    from datasets import config as settings
    from datasets import disable_progress_bars

    from openrlhf.launcher.config import DataConfig
    from openrlhf.launcher.data.prompts import load_prompts
    from support.launcher_tokenizer import CHATML, byte_tokenizer

    settings.HF_DATASETS_CACHE = folder / "cache"
    disable_progress_bars()
    write(folder / "rows.parquet", rows)
    config = DataConfig(
        prompt_dataset=str(folder / "rows.parquet"),
        input_key="prompt",
        label_key="reward_model.ground_truth",
        apply_chat_template=True,
    )
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    prompts = load_prompts(config, byte_tokenizer(chat_template=CHATML))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    last = prompts.item(len(prompts) - 1)
    assert last.label == str(rows // REPEATED - 1)
    result = {"rows": len(prompts), "seconds": round(time.perf_counter() - began, 1), "grown_mib": grown // 1024}
    print(json.dumps(result))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(Path(sys.argv[1]), int(sys.argv[2]))
