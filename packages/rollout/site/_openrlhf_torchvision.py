"""Lets torchvision be imported beside a torch build whose libraries its own operators can't be loaded with.

The ordinary torchvision wheel is built for CUDA. Beside a CPU build of torch its library of operators does not load,
and torchvision then fails while it describes operators that do not exist (`torchvision::nms`); with it every model
class of transformers fails, for text models too. The operators are for object detection. The image processors of
vision-language models only need torchvision's Python code, so declaring the missing operators is enough: called, they
raise. Where torchvision's own library loads nothing is declared.

`_openrlhf_torchvision.pth` imports this module when Python starts: whatever imports torchvision first (transformers,
vLLM, a reward function) finds it mended, in every process. It costs nothing until then. Can go when torchvision
0.28's successors for CPU builds import without their operators.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
DESCRIBED_BY_TORCHVISION = ("nms", "qnms")
"""What torchvision describes at import without looking whether it is there."""

_keep_alive: list[object] = []


class TorchvisionFinder(MetaPathFinder):
    """Finds nothing itself; before the first import of torchvision it declares what would be missing."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            spec = PathFinder.find_spec(fullname)
            if spec is not None and spec.origin is not None:
                declare_missing_operators(Path(spec.origin).parent)
        return None


def declare_missing_operators(package: Path) -> bool:
    """Declare torchvision's operators unless the library in its folder loads. Returns whether they were declared."""
    import torch

    for library in package.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return False
    declared = torch.library.Library("torchvision", "DEF")
    for name in DESCRIBED_BY_TORCHVISION:
        declared.define(name + SIGNATURE)
    _keep_alive.append(declared)  # it takes its declarations with it
    return True


def install() -> None:
    """Stand in front of the other finders."""
    sys.meta_path.insert(0, TorchvisionFinder())


install()
