"""Which devices a worker uses: pure functions of what Ray assigned and what the environment says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NOSET_VARIABLES = (
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
)


def noset(environment: Mapping[str, str]) -> bool:
    """True where Ray was told to leave the visible devices alone."""
    return any(_is_on(environment, name) for name in NOSET_VARIABLES)


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "0").lower() not in ("", "0", "false")


def local_device_index(accelerator_ids: Sequence[str], environment: Mapping[str, str]) -> int:
    """The index that `torch.device("cuda", index)` needs in this worker.

    Ray narrows the visible devices to the assigned ones, so the first assigned device is index 0, unless a
    RAY_EXPERIMENTAL_NOSET_* variable is set: then it is the place of the assigned id among the visible devices
    (CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES; all of the machine when neither is set).

    Raises ValueError when the assigned device is not visible.
    """
    if not accelerator_ids or not noset(environment):
        return 0
    assigned = accelerator_ids[0]
    listed = _visible(environment)
    if not listed:
        return _index(assigned)
    return _place(assigned, listed)


def narrowed(accelerator_ids: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that show a process the assigned devices and no others, in the spelling of its environment.

    For programs that choose their device themselves, from the first visible one on (vLLM). Empty where Ray narrowed
    the visible devices, and for an actor that was assigned none. Set them before CUDA is initialised.

    Raises ValueError when an assigned device is not visible.
    """
    if not accelerator_ids or not noset(environment):
        return {}
    listed = _visible(environment)
    value = ",".join(listed[_place(a, listed)] if listed else a for a in accelerator_ids)
    hip = "HIP_VISIBLE_DEVICES" in environment or any(
        _is_on(environment, name) for name in NOSET_VARIABLES if "CUDA" not in name
    )
    # vLLM reads CUDA_VISIBLE_DEVICES on AMD too, and refuses two variables that differ
    return {"CUDA_VISIBLE_DEVICES": value, **({"HIP_VISIBLE_DEVICES": value} if hip else {})}


def _visible(environment: Mapping[str, str]) -> list[str]:
    """The visible devices as the environment spells them; empty: all."""
    visible = environment.get("CUDA_VISIBLE_DEVICES") or environment.get("HIP_VISIBLE_DEVICES") or ""
    return [part.strip() for part in visible.split(",") if part.strip()]


def _place(assigned: str, listed: Sequence[str]) -> int:
    """Where in the list a device stands. CUDA takes UUIDs (GPU-..., MIG-...) by any unique beginning."""
    if assigned in listed:
        return listed.index(assigned)
    if not assigned.isdigit():
        for place, name in enumerate(listed):
            if not name.isdigit() and (name.startswith(assigned) or assigned.startswith(name)):
                return place
    raise ValueError(
        f"Ray assigned device {assigned!r} to a worker whose visible devices are {','.join(listed)!r}: unset "
        "CUDA_VISIBLE_DEVICES / HIP_VISIBLE_DEVICES on that node or list the device there"
    )


def _index(assigned: str) -> int:
    if not assigned.isdigit():
        raise ValueError(
            f"Ray assigned device {assigned!r} to a worker without a list of visible devices, and "
            "RAY_EXPERIMENTAL_NOSET_* keeps Ray from making one: set CUDA_VISIBLE_DEVICES on that node, or unset the "
            "RAY_EXPERIMENTAL_NOSET_* variables"
        )
    return int(assigned)


def extra_noset(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that must be set too: Ray reads ..._NOSET_HIP_..., the guide's users set ..._NOSET_ROCR_...."""
    rocr = environment.get("RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES")
    return {} if rocr is None else {"RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": rocr}
