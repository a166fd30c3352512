"""Programs that attack their grader: judged wrong, nothing of them is left, and the grader goes on."""

import os
import sys

import pytest

from openrlhf.agents.graders.code import CodeLimits, grade_code
from openrlhf.agents.graders.program import isolation
from support.attacking_programs import ATTACKS
from support.leftovers import nothing_left

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Programs run below `tmp_path`; no file of theirs is left there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", ATTACKS, ids=lambda case: case.name)
def test_attack_fails_and_leaves_nothing(case):
    shared = set(os.listdir("/dev/shm"))
    with nothing_left():
        reward, results = grade_code(case.response, case.tests, CodeLimits(seconds=case.seconds))
    assert reward == 0.0, results
    assert results[0].isolation == isolation.isolation()
    assert "left-by-a-program" not in set(os.listdir("/dev/shm")) - shared


def test_every_attack_is_one_of_its_own():
    assert len({(case.response, str(case.tests)) for case in ATTACKS}) == len(ATTACKS) >= 30
