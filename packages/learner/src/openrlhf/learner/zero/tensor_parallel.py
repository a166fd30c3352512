"""Tensor parallelism (DeepSpeed AutoTP): the matrices of the hidden layers are cut over neighbouring ranks.

The cut is transformers' own plan for the architecture. Embeddings, norms and heads stay whole on every rank, so
log-probs and values are computed as ever. The ranks of one tensor-parallel group hold different shards of one model and
must be given the same samples; data-parallel are only the groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openrlhf.core.batch import Batch
from openrlhf.learner.collective import check_same
from openrlhf.learner.spec import LearnerSpec

INSTEAD = "use `ds.zero_stage` 3 to split the model"

STYLES: dict[str, dict[str, Any]] = {
    "colwise": {"partition_type": "column"},
    "rowwise": {"partition_type": "row"},
    # norms over single heads: whole, but each rank sees the gradient of its own heads only
    "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
}
"""transformers' word for how a layer is cut -> DeepSpeed's."""

WHOLE = ("embedding_rowwise",)
"""Styles of the plan that are not followed: the layer stays whole, which costs memory and changes no number."""


def check_model(spec: LearnerSpec, config: Any) -> None:
    """ValueError when this model cannot be cut as asked. config: the Hugging Face configuration of the model."""
    size = spec.ds.tensor_parallel_size
    flag = f"`ds.tensor_parallel_size` {size!r}"
    if hasattr(config, "vision_config"):
        raise ValueError(f"{flag} does not work with a vision encoder: {INSTEAD}")
    plan = config.base_model_tp_plan
    if not plan:
        raise ValueError(
            f"{flag}: transformers has no tensor-parallel plan for {config.model_type!r} models; {INSTEAD}"
        )
    unknown = sorted(set(plan.values()) - set(STYLES) - set(WHOLE))
    if unknown:
        raise ValueError(
            f"{flag}: the plan of {config.model_type!r} models cuts layers in ways that DeepSpeed cannot "
            f"({', '.join(unknown)}); {INSTEAD}"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % size:
            raise ValueError(f"{flag} does not divide the {getattr(config, name)} {name} of {spec.model_path!r}")


def check_world(size: int, ranks: int) -> None:
    """ValueError when the ranks of the role are no whole number of groups."""
    if ranks % size:
        raise ValueError(f"`ds.tensor_parallel_size` {size!r} does not divide the {ranks} ranks of this model")


def layer_specs(plan: Mapping[str, str], *, trained: bool) -> list[dict[str, Any]]:
    """DeepSpeed's list of layers and cuts. plan: {"layers.*.mlp.up_proj": "colwise", ...}, relative to the backbone."""
    specs = [
        {"patterns": [_pattern(name)], **STYLES[style]} for name, style in sorted(plan.items()) if style not in WHOLE
    ]
    # a frozen model has no gradients, and DeepSpeed would hook them
    return specs if trained else [spec for spec in specs if "grad_allreduce" not in spec]


def _pattern(name: str) -> str:
    """Matches the full name of the layer's weight in our module, whatever precedes the backbone in it."""
    inner = r"\.".join("[0-9]+" if part == "*" else part for part in name.split("."))
    return rf"(.*\.)?{inner}\.weight$"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """How a parameter is cut: `dim` of the whole `shape` into `sizes`, one per rank of the group."""

    dim: int
    sizes: tuple[int, ...]
    shape: tuple[int, ...]


def shard_of(parameter: nn.Parameter) -> Shard | None:
    """None for a parameter that is whole on every rank."""
    meta = getattr(parameter, "ds_autotp_universal_checkpoint_meta", None)
    if meta is None or meta["partition_sizes"] is None:
        return None
    return Shard(dim=meta["partition_dim"], sizes=meta["partition_sizes"], shape=meta["logical_shape"])


class TensorParallel:
    """This rank's place in its group. With size 1 nothing is cut and nothing communicated."""

    def __init__(self, size: int, device: torch.device) -> None:
        """After `deepspeed.initialize`, which makes the groups. size: --ds.tensor_parallel_size."""
        self.size = size
        self.device = device
        self.group: Any = None
        self.data_group: Any = None
        self.rank = 0
        if size > 1:
            from deepspeed.utils import groups

            self.group = groups.get_tensor_model_parallel_group()
            self.data_group = groups.get_data_parallel_group()
            self.rank = dist.get_rank(self.group)
            assert dist.get_world_size(self.group) == size, "one process has one tensor-parallel size"

    @property
    def has_rank_0(self) -> bool:
        """Whether the first rank of all, which writes, is in this rank's group."""
        return not dist.is_initialized() or dist.get_rank() < self.size

    def any_wants(self, wanted: bool) -> bool:
        """Whether a rank of the group wants something, which all of them then take part in. Collective over it."""
        if self.group is None:
            return wanted
        seen = torch.tensor(float(wanted), device=self.device)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self.group)
        return bool(seen)

    def whole(self, parameter: nn.Parameter, local: Tensor) -> Tensor:
        """The whole tensor of which `local` is this rank's shard, cut as `parameter` is. Collective over the group."""
        shard = shard_of(parameter)
        if shard is None:
            return local
        widest = list(local.shape)
        widest[shard.dim] = max(shard.sizes)
        mine = local.new_zeros(widest)
        mine.narrow(shard.dim, 0, local.shape[shard.dim]).copy_(local)
        parts = [torch.empty_like(mine) for _ in shard.sizes]
        dist.all_gather(parts, mine, group=self.group)
        return torch.cat([part.narrow(shard.dim, 0, n) for part, n in zip(parts, shard.sizes, strict=True)], shard.dim)

    def local(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's shard of a whole tensor: the inverse of `whole`."""
        shard = shard_of(parameter)
        return whole if shard is None else whole.split(shard.sizes, shard.dim)[self.rank]

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """2-norm over all whole gradients in `.grad`, the same on every rank of the group."""
        own = [p for p in parameters if p.grad is not None]
        cut = [p.grad for p in own if p.grad is not None and shard_of(p) is not None]
        rest = [p.grad for p in own if p.grad is not None and shard_of(p) is None]
        norm = torch.nn.utils.get_total_norm(rest)
        if self.group is None:
            return norm
        square = torch.nn.utils.get_total_norm(cut).double() ** 2
        dist.all_reduce(square, group=self.group)
        return (square + norm.double() ** 2).sqrt()

    def check_same(self, batch: Batch) -> None:
        """The ranks of a group were given the same samples."""
        if self.group is not None:
            check_same(batch, self.group, self.device, "tensor-parallel")
