"""`python -m openrlhf.learner.universal CHECKPOINT`: make a checkpoint of ZeRO 1 to 3 loadable at any world size.

CHECKPOINT is a learner's folder (it holds learner.json), or a whole checkpoint with such folders in it. Resume with
`--ds.use_universal_ckpt`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from openrlhf.learner.checkpoint import INFO
from openrlhf.learner.zero.checkpoint import convert

logger = logging.getLogger(__name__)


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
        logger.info("wrote %s", convert(folder, json.loads((folder / INFO).read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
