"""Where a job's parts live: ports, temporary folders, addresses, its place in the allocation."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from openrlhf.launcher.machine import detect_machine
from openrlhf.launcher.ray.devices import local_device_index
from openrlhf.launcher.resolve import resolve
from openrlhf.launcher.rules.check import check_rules
from openrlhf.launcher.slurm import addresses
from openrlhf.launcher.slurm.addresses import join_port, known_to_slurm, own_address, pick_address
from openrlhf.launcher.slurm.allocation import read_allocation
from openrlhf.launcher.slurm.folders import TempDir, choose_temp_dir, remove_abandoned
from openrlhf.launcher.slurm.ports import candidates, hold_block
from support.launcher_flags import parse_train_ppo


def test_neighbouring_jobs_share_no_port_b092() -> None:
    blocks = [candidates(job)[0] for job in range(1500, 1600)]
    ports = [port for block in blocks for port in block.ports]
    assert len(ports) == len(set(ports)) == 100 * 200
    assert max(ports) < 32768


def test_all_candidates_of_a_job_differ() -> None:
    assert len({block.first for block in candidates(7)}) == 6
    assert [b.first for b in candidates(7)] == [b.first for b in candidates(7)]


def test_two_jobs_hold_different_blocks_b092(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = hold_block(candidates(1500)), hold_block(candidates(1500))
    third = hold_block(candidates(1501))
    held = [set(b.block.ports) for b in (first, second, third)]
    assert not held[0] & held[1]
    assert not held[0] & held[2]
    assert not held[1] & held[2]
    for block in (first, second, third):
        block.close()
    again = hold_block(candidates(1500))
    assert again.block == first.block
    again.close()


def test_a_taken_port_moves_the_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    wanted = candidates(1502)
    with socket.socket() as taken:
        taken.bind(("", wanted[0].first + 3))
        taken.listen()
        held = hold_block(wanted)
    assert held.block == wanted[1]
    with pytest.raises(ValueError, match="give another --port-base"):
        hold_block([held.block])
    held.close()


def test_port_base_is_checked() -> None:
    with pytest.raises(ValueError, match="--port-base 40000"):
        candidates(1, 40000)


def test_ray_arguments_stay_in_the_block() -> None:
    block = candidates(3)[0]
    numbers = [int(a.split("=")[1]) for a in block.node_arguments() + block.head_arguments()]
    assert len(numbers) == len(set(numbers)) == 11
    assert set(numbers) <= set(block.ports)
    assert block.control not in numbers


def test_temp_dir_b091() -> None:
    long = "/" + "x" * 59
    path, note = choose_temp_dir(1234567, {"TMPDIR": long})
    assert path == Path("/tmp/r1234567")
    assert "TMPDIR" in note
    assert "using /tmp" in note
    assert choose_temp_dir(12, {"TMPDIR": "/scratch"}) == (Path("/scratch/r12"), "")
    assert choose_temp_dir(12, {"SLURM_TMPDIR": "/local/12", "TMPDIR": "/x"}) == (Path("/local/12/r12"), "")
    assert choose_temp_dir(12, {}) == (Path("/tmp/r12"), "")
    with pytest.raises(ValueError, match="--temp-dir"):
        choose_temp_dir(12, {}, long)


def test_temp_dir_is_private_and_removed(tmp_path: Path) -> None:
    folder = TempDir(tmp_path / "r5")
    assert (tmp_path / "r5").stat().st_mode & 0o777 == 0o700
    (tmp_path / "r5" / "session").mkdir()
    folder.close()
    assert not (tmp_path / "r5").exists()


def test_folders_of_killed_jobs_are_removed(tmp_path: Path) -> None:
    (tmp_path / "r6").mkdir()
    (tmp_path / "r6" / ".openrlhf-node1.lock").touch()  # its holder is gone
    (tmp_path / "r7").mkdir()  # not ours: no lock
    (tmp_path / "other").mkdir()
    alive = TempDir(tmp_path / "r8")
    assert not (tmp_path / "r6").exists()
    assert remove_abandoned(tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == ["other", "r7", "r8"]
    alive.close()


def test_x01_a_folder_that_no_job_made_is_never_removed(tmp_path: Path) -> None:
    for name in ("r12", "r13"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "poetry.lock").write_text("mine")
    with pytest.raises(ValueError, match=r"/r12' holds files that no job put there: give another --temp-dir"):
        TempDir(tmp_path / "r12")
    TempDir(tmp_path / "r14").close()
    assert [(tmp_path / name / "poetry.lock").read_text() for name in ("r12", "r13")] == ["mine", "mine"]


def test_addresses_b099() -> None:
    assert pick_address(["fe80::1", "10.0.0.5"], nodes=2, host="n1") == "10.0.0.5"
    assert pick_address(["127.0.1.1", "10.0.0.5"], nodes=2, host="n1") == "10.0.0.5"
    assert pick_address(["2001:db8::1"], nodes=2, host="n1") == "2001:db8::1"
    assert join_port("2001:db8::1", 6379) == "[2001:db8::1]:6379"
    assert join_port("10.0.0.5", 6379) == "10.0.0.5:6379"
    assert pick_address(["127.0.0.1"], nodes=1, host="n1") == "127.0.0.1"
    with pytest.raises(ValueError, match="'n1' has no address that other nodes can reach"):
        pick_address(["127.0.0.1"], nodes=2, host="n1")


def test_the_address_of_an_interface() -> None:
    assert own_address("n1", nodes=1, interface="lo") == "127.0.0.1"
    with pytest.raises(ValueError, match="'ib7': 'n1' has none of that name with an IPv4 address; it has lo"):
        own_address("n1", nodes=2, interface="ib7")


BASE = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_ON_NODE": "8"}


def test_a_name_that_does_not_resolve_is_asked_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []

    def scontrol(command: Sequence[str]) -> str:
        asked.append(command)
        return "NodeName=n1 Arch=x86_64 CoresPerSocket=32 NodeAddr=10.1.2.3 NodeHostName=n1-ib Version=22.05\n"

    assert known_to_slurm("n1", scontrol) == ["10.1.2.3"]
    assert asked == [["scontrol", "-o", "show", "node", "n1"]]
    assert known_to_slurm("n1", lambda command: "NodeName=n1 NodeAddr=n1 NodeHostName=n1\n") == []
    assert known_to_slurm("n1", lambda command: "") == []
    monkeypatch.setattr(addresses, "resolve", lambda host: [])
    monkeypatch.setattr(addresses, "known_to_slurm", lambda host: ["10.1.2.3"] if host == "n1" else [])
    assert own_address("n1", nodes=2) == "10.1.2.3"


def test_exactly_one_head_whatever_the_addresses_b098() -> None:
    views = [read_allocation(BASE | {"SLURM_NODEID": str(i)}) for i in range(3)]
    assert [view.is_head for view in views] == [True, False, False]
    assert {view.head for view in views} == {"n1"}
    assert [view.host for view in views] == ["n1", "n2", "n3"]


def test_allocation_reads_resources() -> None:
    view = read_allocation(
        BASE | {"SLURM_NODEID": "0", "SLURM_CPUS_PER_TASK": "4", "SLURM_GPUS_ON_NODE": "2", "SLURM_RESTART_COUNT": "1"}
    )
    assert (view.cpus, view.gpus, view.restarts) == (4, 2, 1)
    assert read_allocation(BASE, detected_gpus=8).gpus == 8


def test_the_part_of_a_heterogeneous_job() -> None:
    parts = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]"}
    assert [read_allocation(BASE | parts | {"SLURM_NODEID": str(i)}).group for i in range(3)] == [0, 1, 1]
    assert read_allocation(BASE).group == 0


def test_a_non_contiguous_allocation_is_used_as_it_is_b096(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for i in range(8):
        (tmp_path / "dev" / f"nvidia{i}").touch()
    environ = BASE | {"CUDA_VISIBLE_DEVICES": "2,5,7"}
    machine = detect_machine(environ, tmp_path)
    assert read_allocation(environ, detected_gpus=machine.gpus).gpus == 3
    workers = [
        local_device_index([device], environ | {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"})
        for device in ("2", "5", "7")
    ]
    assert workers == [0, 1, 2]
    flags = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "p", "--reward.remote_url", "r.py"]
    for asked, said in ((3, []), (4, ["--actor.num_gpus_per_node 3 or less"])):
        config, _ = resolve(parse_train_ppo([*flags, "--actor.num_gpus_per_node", str(asked)]), machine)
        found = [str(v) for v in check_rules(config, machine) if "a node has" in str(v)]
        assert len(found) == len(said)
        assert all(part in line for part, line in zip(said, found, strict=True))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "not inside a Slurm job"),
        (
            BASE | {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": "n[1-2]" for i in range(2)} | {"SLURM_HET_SIZE": "2"},
            r"'n1' is in the parts \[0, 1\] of this heterogeneous job: give --exclusive",
        ),
        (BASE | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "--ntasks-per-node=1"),
        (BASE | {"SLURM_NODEID": "3"}, "outside of the node list"),
    ],
)
def test_allocation_refuses(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_allocation(environ)
