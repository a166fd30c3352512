"""Which device a worker uses."""

from __future__ import annotations

import pytest

from openrlhf.launcher.ray.devices import extra_noset, local_device_index

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
