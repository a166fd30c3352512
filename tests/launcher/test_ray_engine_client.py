"""The engines behind vLLM's client protocol: every engine gets its own ranks, errors say which call they broke."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.launcher.ray import engine_client
from openrlhf.launcher.ray.engine_client import FleetClient


class Engine:
    def __init__(self, calls: list[tuple[Any, ...]], name: str) -> None:
        self.call = SimpleNamespace(remote=lambda *args: calls.append((name, *args)) or name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    seen: list[tuple[Any, ...]] = []
    waits: Any = lambda refs, *, what, timeout: seen.append((what, *refs, timeout))  # noqa: E731
    monkeypatch.setattr(engine_client, "get", waits)
    return seen


def client(calls: list[tuple[Any, ...]]) -> FleetClient:
    engines = [Engine(calls, "e0"), Engine(calls, "e1"), Engine(calls, "e2")]
    return FleetClient(engines=engines, num_workers=[2, 1, 4], update_timeout=15.0)


def test_every_engine_joins_with_its_own_first_rank(calls: list[tuple[Any, ...]]) -> None:
    client(calls).init_weight_transfer_engine({"rank_offset": 1, "master_port": 5})
    offsets = [args[2]["rank_offset"] for args in calls[:3]]
    assert offsets == [1, 3, 4]
    assert {args[2]["master_port"] for args in calls[:3]} == {5}
    assert calls[3] == ("weight group", "e0", "e1", "e2", 60.0)


def test_ipc_engines_join_nothing(calls: list[tuple[Any, ...]]) -> None:
    client(calls).init_weight_transfer_engine({"packed": True})
    assert calls[0] == ("e0", "init_weight_transfer", {"packed": True})


def test_a_push_has_three_parts_and_a_version(calls: list[tuple[Any, ...]]) -> None:
    own = client(calls)
    own.start_weight_update()
    own.update_weights({"names": ["a"]})
    own.finish_weight_update("7")
    assert [entry for entry in calls if entry[0] in ("e2", "weight push")] == [
        ("e2", "start_weight_update"),
        ("e2", "update_weights", {"names": ["a"]}),
        ("weight push", "e0", "e1", "e2", 15.0),
        ("e2", "finish_weight_update", 7),
    ]
