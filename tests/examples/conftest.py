"""The quickstart's files are scripts that import each other by name, so their folder has to be on the path."""

import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
if str(QUICKSTART) not in sys.path:
    sys.path.insert(0, str(QUICKSTART))


@pytest.fixture(scope="session")
def quickstart() -> Path:
    return QUICKSTART
