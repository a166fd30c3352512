"""Proofs use the quickstart's task: its files are scripts that import each other by name."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUICKSTART = EXAMPLES / "quickstart"
for folder in (QUICKSTART, EXAMPLES / "pipeline"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
