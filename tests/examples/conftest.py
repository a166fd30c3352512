"""The examples' files are scripts that import each other by name, so their folders have to be on the path."""

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUICKSTART = EXAMPLES / "quickstart"
for folder in (QUICKSTART, EXAMPLES / "pipeline"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def quickstart() -> Path:
    return QUICKSTART
