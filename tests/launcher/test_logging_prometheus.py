"""What Prometheus gets to see: valid names, the newest values, on this machine alone."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.logging.logger import RunLogger
from openrlhf.launcher.logging.prometheus_sink import PrometheusSink, gauge_name
from openrlhf.launcher.logging.sinks import UnusableSinkError

METRICS = {
    "train/reward": 0.5,
    "timing/step_total": 1.25,
    "rollout/failed_samples": 2.0,
    "eval/eval_GSM-8k_pass1": 0.75,
    "perf/tokens_per_second": 1e3,
    "train/my own/count": 3.0,
}


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    sink = PrometheusSink("127.0.0.1", 0, "run")
    yield sink
    sink.close()


def read(port: int, host: str = "127.0.0.1") -> str:
    return httpx.get(f"http://{host}:{port}/metrics", trust_env=False).text


def test_names() -> None:
    assert gauge_name("train/reward") == "openrlhf_train_reward"
    assert gauge_name("timing/step_total") == "openrlhf_timing_step_total_seconds"
    assert gauge_name("eval/eval_GSM-8k_pass1") == "openrlhf_eval_eval_gsm_8k_pass1"
    assert gauge_name("train/my own/count") == "openrlhf_train_my_own_count_value"


def test_the_newest_values_are_served(sink: PrometheusSink) -> None:
    sink.log_step(1, METRICS)
    sink.log_step(2, METRICS | {"train/reward": 0.625})
    sink.log_evaluation(2, {"eval/eval_a_pass1": 1.0})
    families = {f.name: f for f in text_string_to_metric_families(read(sink.port))}
    values = {name: [(s.labels, s.value) for s in f.samples] for name, f in families.items()}
    assert values["openrlhf_train_reward"] == [({"run": "run"}, 0.625)]
    assert values["openrlhf_step"] == [({"run": "run"}, 2.0)]
    assert values["openrlhf_eval_eval_a_pass1"] == [({"run": "run"}, 1.0)]
    assert len(values) == len(METRICS) + 2
    assert all(f.type == "gauge" and f.documentation for f in families.values())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_promtool_finds_nothing(sink: PrometheusSink) -> None:
    sink.log_step(1, METRICS)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=read(sink.port), text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_run_serves_at_its_address_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[PrometheusSink] = []
    start = PrometheusSink.__init__

    def note(self: PrometheusSink, *args: object) -> None:
        start(self, *args)  # pyright: ignore[reportArgumentType]
        served.append(self)

    monkeypatch.setattr(PrometheusSink, "__init__", note)
    config = build(TrainPPOConfig(), {"logger.prometheus_port": 0, "logger.prometheus_host": "127.0.0.2"})
    logger = RunLogger(config)
    logger.log_step(1, METRICS)
    assert 'openrlhf_train_reward{run="auto"} 0.5' in read(served[0].port, "127.0.0.2")
    assert served[0]._server.server_address[0] == "127.0.0.2"
    logger.close()
    with pytest.raises(httpx.ConnectError):
        read(served[0].port, "127.0.0.2")


def test_none_is_started_unasked_and_only_for_this_machine() -> None:
    assert TrainPPOConfig().logger.prometheus_port is None
    assert TrainPPOConfig().logger.prometheus_host == "127.0.0.1"


def test_a_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnusableSinkError, match=f"--logger.prometheus_port {port}: .*give another port, or 0"):
            PrometheusSink("127.0.0.1", port, "run")
