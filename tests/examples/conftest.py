from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def quickstart() -> Path:
    return Path(__file__).resolve().parents[2] / "examples" / "quickstart"
