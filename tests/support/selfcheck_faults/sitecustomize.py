"""On the PYTHONPATH of a check: breaks, in the processes of its rows, what SELFCHECK_TEST_FAULT names."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any


def wrong_tensor_in_the_push() -> None:
    from openrlhf.rollout.weights.wire import Packer

    add = Packer.add

    def scaled(self: Packer, name: str, tensor: Any) -> Any:
        return add(self, name, tensor * 1.5 if name.endswith("layers.1.mlp.down_proj.weight") else tensor)

    Packer.add = scaled  # type: ignore[method-assign]


def samples_of_a_packed_row_meet() -> None:
    import torch

    from openrlhf.learner import packing

    build = packing.build_inputs

    def running_on(batch: Any, positions: Any, *, packed: bool) -> Any:
        inputs = build(batch, positions, packed=packed)
        return replace(inputs, position_ids=torch.arange(inputs.input_ids.shape[1])[None]) if packed else inputs

    packing.build_inputs = running_on


FAULTS = {"push": wrong_tensor_in_the_push, "packing": samples_of_a_packed_row_meet}

if "openrlhf.launcher.selfcheck.worker" in sys.orig_argv and "SELFCHECK_TEST_FAULT" in os.environ:
    FAULTS[os.environ["SELFCHECK_TEST_FAULT"]]()
