"""Which device a worker uses."""

from __future__ import annotations

import pytest

from openrlhf.launcher.ray.devices import extra_noset, local_device_index, narrowed

NOSET = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize(
    ("ids", "environment", "index"),
    [
        ([], {}, 0),
        (["3"], {"CUDA_VISIBLE_DEVICES": "3"}, 0),  # Ray narrowed the visible devices
        (["3"], NOSET, 3),
        (["5"], NOSET | {"CUDA_VISIBLE_DEVICES": "2,5,7"}, 1),  # B096
        (["7"], {"RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "true", "HIP_VISIBLE_DEVICES": "2, 7"}, 1),
        (["3"], {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "3"}, 0),
    ],
)
def test_index(ids: list[str], environment: dict[str, str], index: int) -> None:
    assert local_device_index(ids, environment) == index


def test_assigned_device_must_be_visible() -> None:
    with pytest.raises(ValueError, match=r"assigned device '4'.*'2,5,7'"):
        local_device_index(["4"], NOSET | {"CUDA_VISIBLE_DEVICES": "2,5,7"})


def test_rocr_sets_hip_too() -> None:
    rocr = {"RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES": "1"}
    assert extra_noset(rocr) == {"RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1"}
    assert extra_noset({}) == {}


UUIDS = {"CUDA_VISIBLE_DEVICES": "GPU-1f2e3d4c-aa, GPU-5a6b7c8d-bb,MIG-9e8f"}


@pytest.mark.parametrize(
    ("ids", "environment", "shown"),
    [
        (["3"], {"CUDA_VISIBLE_DEVICES": "3"}, {}),  # Ray narrowed the visible devices
        ([], NOSET, {}),  # an engine whose workers have the devices
        (["3"], NOSET, {"CUDA_VISIBLE_DEVICES": "3"}),
        (["2", "3"], NOSET, {"CUDA_VISIBLE_DEVICES": "2,3"}),  # tensor parallel
        (["7", "5"], NOSET | {"CUDA_VISIBLE_DEVICES": "2,5,7"}, {"CUDA_VISIBLE_DEVICES": "7,5"}),
        (["5"], NOSET | {"CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "5"}),  # narrowed already
        (["GPU-5a6b7c8d-bb"], NOSET | UUIDS, {"CUDA_VISIBLE_DEVICES": "GPU-5a6b7c8d-bb"}),
        (["MIG-9e8f-1", "GPU-1f2e"], NOSET | UUIDS, {"CUDA_VISIBLE_DEVICES": "MIG-9e8f,GPU-1f2e3d4c-aa"}),
        (
            ["7"],
            {"RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "true", "HIP_VISIBLE_DEVICES": "2, 7"},
            {"CUDA_VISIBLE_DEVICES": "7", "HIP_VISIBLE_DEVICES": "7"},
        ),
        (
            ["1"],
            {"RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES": "1"},
            {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"},
        ),
    ],
)
def test_narrowed_to_the_assigned_devices(ids: list[str], environment: dict[str, str], shown: dict[str, str]) -> None:
    assert narrowed(ids, environment) == shown


def test_narrowing_needs_visible_devices() -> None:
    with pytest.raises(ValueError, match=r"assigned device 'GPU-9'.*'GPU-1,0'"):
        narrowed(["GPU-9"], NOSET | {"CUDA_VISIBLE_DEVICES": "GPU-1,0"})


def test_index_by_uuid() -> None:
    assert local_device_index(["MIG-9e8f"], NOSET | UUIDS) == 2
    with pytest.raises(ValueError, match=r"'MIG-9e8f'.*set CUDA_VISIBLE_DEVICES"):
        local_device_index(["MIG-9e8f"], NOSET)
