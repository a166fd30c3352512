"""Strings of Slurm: node lists, job ids, counts, GPUs, times."""

from __future__ import annotations

import pytest

from openrlhf.launcher.slurm.names import JobId, count_gpus, expand_nodes, minutes, parse_job_id, tasks_per_node


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("nodes[006,011]", "nodes006 nodes011"),
        ("host[001,003-004,006]", "host001 host003 host004 host006"),
        ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
        (
            "ml-16-node-[001-002,004],ml-17-node-[001-003]",
            "ml-16-node-001 ml-16-node-002 ml-16-node-004 ml-17-node-001 ml-17-node-002 ml-17-node-003",
        ),
        ("c427-032,c429-002", "c427-032 c429-002"),
        ("c438-[062,104]", "c438-062 c438-104"),
        ("d05-[41-42]", "d05-41 d05-42"),
        ("c[1-2]", "c1 c2"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[009-011]", "n009 n010 n011"),
        ("rack[0-1]node[0-1]", "rack0node0 rack0node1 rack1node0 rack1node1"),
        ("login01", "login01"),
        ("n[1-2].site", "n1.site n2.site"),
    ],
)
def test_expand_nodes_b097(text: str, nodes: str) -> None:
    assert expand_nodes(text) == nodes.split()


@pytest.mark.parametrize("text", ["", " ", ",", "n[1-2", "n1]", "n[2-1]", "n[a-b]", "n[]"])
def test_expand_nodes_refuses_b097(text: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        expand_nodes(text)


def test_job_ids() -> None:
    assert parse_job_id("123") == JobId(job=123)
    assert parse_job_id("123_4") == JobId(job=123, task="4")
    assert parse_job_id("123_[1-3]") == JobId(job=123, task="1-3")
    assert parse_job_id("123_[1-9%2]") == JobId(job=123, task="1-9%2")
    assert parse_job_id("123+1") == JobId(job=123, part=1)
    with pytest.raises(ValueError, match="'12a' is no Slurm job id"):
        parse_job_id("12a")


def test_counts_per_node() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("1") == [1]
    with pytest.raises(ValueError, match="2x3"):
        tasks_per_node("2x3")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4", 4),
        ("h100:4", 4),
        ("gpu:4", 4),
        ("gpu:h100:4", 4),
        ("gpu:h100:4(S:0-1)", 4),
        ("gpu:h100:2(IDX:0,3)", 2),
        ("gpu", 1),
        ("gpu:a100:2,gpu:h100:3", 5),
        ("gpu:2,nic:ib:1", 2),
        ("gpu:4,lscratch:100", 4),
        ("gpu:h100:4(S:0-1),lscratch:100,shard:8", 4),
        ("0", 0),
    ],
)
def test_gpu_strings(text: str, count: int) -> None:
    assert count_gpus(text) == count


@pytest.mark.parametrize(
    ("text", "limit"),
    [("90", 90), ("90:00", 90), ("1:30:00", 90), ("1-0", 1440), ("1-02:30", 1590), ("1-02:30:30", 1591), ("0:30", 1)],
)
def test_minutes(text: str, limit: int) -> None:
    assert minutes(text) == limit


def test_minutes_refuses() -> None:
    with pytest.raises(ValueError, match="'2h' is no time limit"):
        minutes("2h")


@pytest.mark.parametrize("text", ["0", "0:00", "0-0"])
def test_a_limit_of_nothing_is_none_to_slurm(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is no limit at all to Slurm.*give one"):
        minutes(text)
