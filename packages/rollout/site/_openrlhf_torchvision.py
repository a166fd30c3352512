"""Lets torchvision be imported beside a torch build whose libraries its own operators can't be loaded with.

The ordinary torchvision wheel is built for CUDA. Beside a CPU build of torch its library of operators does not load,
and torchvision then fails while it describes operators that do not exist (`torchvision::nms`); with it every model
class of transformers fails, for text models too. The operators are for object detection. The image processors of
vision-language models only need torchvision's Python code, so declaring the missing operators is enough: called, they
raise. Beside a CUDA build of torch, and where torchvision's own library loads, nothing is declared. The CPU build of
torchvision, on PyTorch's index only, needs none of this.

torch calls `declare_missing_operators` at the end of its own import: it is an entry point of the group that torch has
for extensions (`torch.backends`). So it reaches every process, also the ones that vLLM spawns, in which no code of ours
runs before vLLM imports torchvision, and a Python that imports no torch has nothing of it. It lies beside the namespace
`openrlhf`, which a folder of that name in the working directory hides: `import torch` must not fail there.
Can go when torchvision 0.28's successors for CUDA import beside CPU builds of torch.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
DESCRIBED_BY_TORCHVISION = ("nms", "qnms")
"""What torchvision describes at import without looking whether it is there."""

_keep_alive: list[object] = []


def declare_missing_operators() -> None:
    """Declare torchvision's operators where torch has no CUDA and the library in torchvision's folder does not load."""
    import torch

    spec = find_spec("torchvision")
    if torch.version.cuda is not None or spec is None or spec.origin is None:
        return
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return
    declared = torch.library.Library("torchvision", "DEF")
    for name in DESCRIBED_BY_TORCHVISION:
        declared.define(name + SIGNATURE)
    _keep_alive.append(declared)  # it takes its declarations with it
