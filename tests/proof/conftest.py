"""Proofs use the quickstart's task: its files are scripts that import each other by name."""

import sys
from pathlib import Path

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
if str(QUICKSTART) not in sys.path:
    sys.path.insert(0, str(QUICKSTART))
