"""Five random faults in one real run, which goes on, and the signal that ends it in order (the proof has more)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from model import build_model, build_tokenizer

from support.chaos import Life, afflict, made
from support.chaos_faults import GENTLE, draw

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

SEED = 1


def test_a_run_survives_five_random_faults(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    faults = draw(SEED, 5, kinds=GENTLE)
    with made(tmp_path / "job", tmp_path / "model", server=False, steps=60) as job:
        life = Life(job, job.start(), {})
        afflict(life, faults)
        assert not faults, life.story()
        assert all(i.came.startswith("went on") for i in life.injected), life.story()
        os.kill(life.run.process.pid, signal.SIGTERM)
        assert life.run.wait(60) == 128 + signal.SIGTERM, life.story()
        assert life.run.left_over() == [], life.story()
        assert "SIGTERM received" in life.run.text
        for word in ("Traceback", "Unhandled error"):
            assert word not in life.run.text.partition("SIGTERM received")[2], life.story()
        ledger = job.ledger()
        ledger.check(steps=max(ledger.samples))
        print(life.story())
