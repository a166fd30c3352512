"""The report without a browser: what is read, what a block holds, what the page is made of, what the server answers."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from openrlhf.launcher.main import main
from openrlhf.launcher.record.reader import Record
from openrlhf.launcher.report.episodes import difference, interesting, short, step_block
from openrlhf.launcher.report.live import LiveReport, application
from openrlhf.launcher.report.page import SCRIPTS, STYLES, asset, write_page
from openrlhf.launcher.report.run_files import read_run, settings_of
from openrlhf.launcher.report.words import in_words
from support.report_runs import HOSTILE, PER_STEP, write_run

MIB = 2**20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("logs") / "a run", steps=3)


def unpack(block: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and columns, as `source.js` reads them."""
    content = gzip.decompress(block)
    size = int.from_bytes(content[:4], "little")
    header = json.loads(content[4 : 4 + size])
    columns = {
        name: np.frombuffer(content, {"file": "u1"}.get(kind, f"<{kind}"), length, 4 + size + place)
        for name, (kind, place, length) in header.get("columns", {}).items()
    }
    return header, columns


def test_reads_what_a_run_left(run: Path) -> None:
    read = read_run(run.parent)
    assert (read.name, [row.step for row in read.steps], [row.step for row in read.evaluations]) == (
        "a run",
        [1, 2, 3],
        [3],
    )
    assert read.steps[0].metrics["timing/step_total"] == 1.4
    given = {s.name: (s.value, s.default) for s in read.settings if s.value != s.default}
    assert given["train.seed"] == ("7", "42")
    assert given["data.prompt_dataset"] == ("prompts.jsonl", "None")
    assert len(given) == 3
    assert read.sources == {"actor.model_name_or_path": "models/tiny", "data.prompt_dataset": "prompts.jsonl"}
    assert [alarm["name"] for alarm in read.alarms] == ["no_reward_variance"]


def test_a_record_alone_has_its_curves(run: Path) -> None:
    read = read_run(run / "record")
    assert [row.metrics["timing/step_total"] for row in read.steps] == [1.4] * 3


def test_metrics_alone_are_a_run(tmp_path: Path) -> None:
    rows = [{"step": 1, "time": 1.0, "train/loss": 2.5}, {"step": 1, "time": 2.0, "train/loss": 2.0}]
    torn = json.dumps(rows[0])[:-4]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*map(json.dumps, rows), torn]))
    read = read_run(tmp_path)
    assert [row.metrics for row in read.steps] == [{"train/loss": 2.0}]  # what was logged again counts
    assert "overview" in write_page([read], max_bytes=MIB)


def test_nothing_of_a_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "holds nothing of a run" in capsys.readouterr().err


def test_a_block_holds_the_record_bit_for_bit_as_far_as_it_is_shown(run: Path) -> None:
    record = Record.open(run)
    samples = record.samples(2)
    header, columns = unpack(step_block(record, record.steps()[2].groups, samples, step=2))
    assert len(header["samples"]) == PER_STEP + 1  # and one that failed
    for sample in samples[:8]:
        told = header["samples"][sample.index]
        cut = slice(told["start"], told["start"] + told["length"])
        assert [header["ids"][n] for n in columns["piece"][cut]] == sample.tokens.tolist()
        assert "".join(header["pieces"][n] for n in columns["piece"][cut]) == record.decode(sample.tokens)
        assert (columns["trainable"][cut] == sample.trainable).all()
        assert (columns["version"][cut] == sample.versions).all()
        for name, exact in (("logprob", sample.engine_logprobs), ("difference", difference(sample))):
            np.testing.assert_allclose(columns[name][cut], exact, rtol=2**-11)
        assert told["reward"] == sample.reward
    name = header["samples"][1]["images"][0]
    assert bytes(columns[f"image {name}"]) == record.images(2)[name]
    assert header["samples"][-1]["failure"].startswith("agent: ValueError")


def test_turns_have_their_rewards(run: Path) -> None:
    record = Record.open(run)
    [sample] = record.samples(1)[:1]
    bare = replace(sample, turns=[replace(sample.turns[0], reward=None)])
    header, _ = unpack(step_block(record, [], [sample, bare], step=1))
    assert [turns["turns"][0][3] for turns in header["samples"]] == [0.25, None]


def test_text_of_no_character_survives(run: Path) -> None:
    record = Record.open(run)
    [sample] = record.samples(1)[2:3]
    header, _ = unpack(step_block(record, [], [sample], step=1))
    assert HOSTILE.encode("utf-8", "surrogatepass") in "".join(
        header["pieces"][n] for n in unpack(step_block(record, [], [sample], step=1))[1]["piece"]
    ).encode("utf-8", "surrogatepass")


def test_short_numbers_are_rounded_to_the_nearest() -> None:
    values = np.array([0.0, 1.0, -1.5, 1 / 3, 1e-30, np.nan, np.inf, -np.inf], dtype=np.float32)
    np.testing.assert_allclose(short(values)[:5], values[:5], rtol=2**-12)
    assert np.isnan(short(values)[5])
    assert short(values)[6:].tolist() == [np.inf, -np.inf]


def test_no_text_of_a_run_is_markup(run: Path) -> None:
    page = write_page([read_run(run)], max_bytes=15 * MIB)
    assert "owned" not in page
    assert "\x1b" not in page
    assert page.count("</script>") == len(SCRIPTS) + 4  # overview and three steps
    assert re.findall(r"https?://(?!github\.com/leeoniya|www\.w3\.org)", page) == []
    for name in (*SCRIPTS, *STYLES):
        assert "</s" not in asset(name), f"{name} would end its own element"


def test_a_small_page_keeps_the_worst_and_the_best(run: Path) -> None:
    read = read_run(run)
    whole = write_page([read], max_bytes=15 * MIB)
    less = write_page([read], max_bytes=len(whole) - 10_000)
    assert len(less) <= len(whole) - 10_000
    none = write_page([read], max_bytes=0)  # as small as it can be
    assert len(none) < len(less)
    assert read.record is not None
    samples = read.record.samples(2)
    kept = interesting(samples, 4)
    assert {7} < kept  # reward -3
    assert {samples[i].reward for i in kept} == {-3.0, 0.0, 1.0}


@dataclass
class Told:
    step: int
    metrics: dict[str, float] = field(default_factory=dict)


def test_how_a_run_went_in_words() -> None:
    steps = [Told(n, {"train/reward": 0.25 if n < 11 else 0.75, "timing/step_total": 2.0}) for n in range(1, 21)]
    steps[3].metrics |= {"rollout/failed_samples": 3.0, "rollout/failed_samples_reward": 3.0}
    for step in steps:
        step.metrics["timing/generation"] = 1.5
    evaluations = [Told(0, {"eval/eval_math_pass1": 0.3}), Told(20, {"eval/eval_math_pass1": 0.6})]
    alarm = {"name": "entropy_collapse", "state": "raised", "step": 5}
    assert in_words(steps, evaluations, [alarm]) == [
        "The reward rose: 0.25 and 0.75 over the first and the last 2 steps of 20.",
        "Evaluation on 'math': pass@1 0.6 at step 20, 0.3 at step 0.",
        "3 samples failed (reward 3).",
        "Alarms: entropy collapse; the first at step 5.",
        "A step took 2 s, 75% of it sampling.",
    ]


def test_noise_is_no_change() -> None:
    noisy = [Told(n, {"train/reward": 0.5 + (n % 2) * 0.2}) for n in range(40)]
    noisy[-1].metrics["train/reward"] += 0.05
    assert "did not change beyond its noise" in in_words(noisy, [])[0]
    assert in_words([], []) == []


def test_the_server_answers_below_its_token_and_to_this_machine_only(run: Path) -> None:
    app = application(LiveReport([run]), "secret")
    with TestClient(app, base_url="http://127.0.0.1") as client:
        page = client.get("/secret/")
        assert page.status_code == 200
        assert "connect-src &#x27;self&#x27;" in page.text
        overview, _ = unpack(client.get("/secret/overview").content)
        assert list(overview["runs"][0]["episodes"]) == ["1", "2", "3"]
        header, _ = unpack(client.get("/secret/run-0-step-2").content)
        assert len(header["samples"]) == PER_STEP + 1
        for path in ("/", "/overview", "/wrong/overview", "/secret/run-0-step-9", "/secret/run-1-step-1"):
            assert client.get(path).status_code == 404
    with TestClient(app, base_url="http://evil.example") as client:
        assert client.get("/secret/").status_code == 400


def test_a_configuration_of_another_version_has_the_flags_that_it_had() -> None:
    saved = "# python3 -m openrlhf.cli.train_sft --config THIS_FILE\n[train]\nseed = 3\n[gone]\nflag = true\n"
    told = {s.name: (s.value, s.default) for s in settings_of(saved)}
    assert told["train.seed"] == ("3", "42")
    assert told["gone.flag"] == ("true", "")
    assert "train.batch_size" not in told
    assert settings_of("no = = toml") == []
