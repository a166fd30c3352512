"""Which device a worker uses: one pure function of what Ray assigned and what the environment says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NOSET_VARIABLES = (
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
)


def noset(environment: Mapping[str, str]) -> bool:
    """True where Ray was told to leave the visible devices alone."""
    return any(environment.get(name, "0").lower() not in ("", "0", "false") for name in NOSET_VARIABLES)


def local_device_index(accelerator_ids: Sequence[str], environment: Mapping[str, str]) -> int:
    """The index that `torch.device("cuda", index)` needs in this worker.

    Ray narrows the visible devices to the assigned ones, so the first assigned device is index 0, unless a
    RAY_EXPERIMENTAL_NOSET_* variable is set: then it is the place of the assigned id among the visible devices
    (CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES; all of the machine when neither is set).

    Raises ValueError when the assigned device is not visible.
    """
    if not accelerator_ids or not noset(environment):
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES") or environment.get("HIP_VISIBLE_DEVICES")
    assigned = accelerator_ids[0]
    if not visible:
        return int(assigned)
    listed = [part.strip() for part in visible.split(",")]
    if assigned not in listed:
        raise ValueError(
            f"Ray assigned device {assigned!r} to a worker whose visible devices are {visible!r}: unset "
            "CUDA_VISIBLE_DEVICES / HIP_VISIBLE_DEVICES on that node or list the device there"
        )
    return listed.index(assigned)


def extra_noset(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that must be set too: Ray reads ..._NOSET_HIP_..., the guide's users set ..._NOSET_ROCR_...."""
    rocr = environment.get("RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES")
    return {} if rocr is None else {"RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": rocr}
