"""Memory stays bounded however often a prompt is repeated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import many_prompts


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_f05_1_8_million_rows_of_18_thousand_prompts(tmp_path: Path) -> None:
    command = [sys.executable, many_prompts.__file__, str(tmp_path), "1800000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    print(result)
    assert result["rows"] == 1_800_000
    assert result["grown_mib"] < 700  # the mapped file included, which is about two thirds of it
