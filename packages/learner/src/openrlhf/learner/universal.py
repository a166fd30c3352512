"""`python -m openrlhf.learner.universal CHECKPOINT`: make a checkpoint of ZeRO 1 to 3 loadable at any world size.

CHECKPOINT is a learner's folder (it holds learner.json), or a whole checkpoint with such folders in it. Resume with
`--ds.use_universal_ckpt`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path

from openrlhf.learner.checkpoint_dir import fresh_directory

TAG = "deepspeed"
UNIVERSAL_TAG = "deepspeed_universal"
INFO = "learner.json"

logger = logging.getLogger(__name__)


def convert(folder: Path) -> Path:
    """Write `deepspeed_universal` beside `deepspeed` in one learner's folder; complete or absent."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.checkpoint import ds_to_universal

    stage = json.loads((folder / INFO).read_text())["zero_stage"]
    if stage == 0:
        raise ValueError(f"{str(folder)!r} was written with `ds.zero_stage` 0: it loads at any world size as it is")
    if (folder / UNIVERSAL_TAG).is_dir():  # complete, and a checkpoint never changes
        return folder / UNIVERSAL_TAG
    with fresh_directory(folder / UNIVERSAL_TAG) as out:
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=str(folder / TAG),
                output_folder=str(out),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
    return folder / UNIVERSAL_TAG


def learner_folders(root: Path) -> list[Path]:
    """The learners' folders in (or at) `root`."""
    found = sorted(info.parent for info in [root / INFO, *root.glob(f"*/{INFO}")] if info.is_file())
    if not found:
        raise ValueError(f"{str(root)!r} is not a checkpoint: it holds no {INFO}")
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m openrlhf.learner.universal", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint folder, for example ckpt/global_step100")
    root = parser.parse_args(arguments).checkpoint
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for folder in learner_folders(root):
        logger.info("wrote %s", convert(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
