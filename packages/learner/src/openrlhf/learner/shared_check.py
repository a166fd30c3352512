"""Whether samples can share their beginnings in a model without changing its numbers: looked up, listened for, tried.

What the options and the configuration rule out is known before (`ruled_out`). The rest is found on a few tokens: that
every layer hands its attention over and says which tokens it sees, and that the states are those of separate rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openrlhf.core.batch import Batch
from openrlhf.learner.attention import open_seam
from openrlhf.learner.batching import Family
from openrlhf.learner.heads import LogitsHead
from openrlhf.learner.layers import num_experts, recurrent_layers
from openrlhf.learner.modules import LearnerModule, evaluating
from openrlhf.learner.packing import build_inputs
from openrlhf.learner.shared_attention import SharedAttention, UnknownOptionError, flex_available, follow
from openrlhf.learner.sharing import lay_out
from openrlhf.learner.spec import LearnerSpec

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Share of the largest hidden state by which one may differ between the two ways; attention unheard is far more."""


def can_share(spec: LearnerSpec, module: LearnerModule, device: torch.device) -> bool:
    """Whether samples share their beginnings, as `batch.share_prompt` asks for. Collective.

    Raises ValueError where it asks for what the model does not allow.
    """
    if spec.batch.share_prompt == "off":
        return False
    problem = sharing_problem(spec, module, device)
    if problem is not None and spec.batch.share_prompt == "on":
        raise ValueError(f"`batch.share_prompt` 'on': {spec.model_path!r} cannot: {problem}. Fix: 'auto'")
    if problem is not None:
        logger.info("%s %r: every sample is computed whole: %s", spec.role.value, spec.model_path, problem)
    return problem is None


def sharing_problem(spec: LearnerSpec, module: LearnerModule, device: torch.device) -> str | None:
    """Why samples cannot share their beginnings; None where they can, and `module` is ready for it. Collective."""
    problem = ruled_out(spec, module, device)
    if problem is None:
        module.flex = device.type == "cuda" and flex_available() and flex_works(module, device)
        problem = _tried_out(spec.ds.attn_implementation, module, device)
    failed = torch.tensor(float(problem is not None), device=device)
    if dist.is_initialized():
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    return problem or ("another rank found that they cannot" if float(failed) else None)


def ruled_out(spec: LearnerSpec, module: LearnerModule, device: torch.device) -> str | None:
    """What options and the model's configuration say."""
    config, kernel = module.model.config, spec.ds.attn_implementation
    if spec.ds.ring_attn_size > 1:
        return "`ds.ring_attn_size` cuts rows over ranks"
    if spec.ds.deepcompile:
        return "`ds.deepcompile` compiles the model without it"
    if spec.trained and spec.ds.lora.rank > 0 and spec.ds.lora.dropout > 0:
        return "`ds.lora.dropout` treats every sample in its own way"
    if hasattr(config, "vision_config"):
        return "its samples may have images"
    if recurrent := recurrent_layers(config):
        return f"its {', '.join(recurrent)} layers carry a state from token to token"
    if module.aux_loss and isinstance(module.head, LogitsHead):
        return "its own balance loss counts a shared token once"
    if not open_seam(kernel):
        return f"`ds.attn_implementation` {kernel!r} has no place for it"
    return None


def flex_works(module: LearnerModule, device: torch.device) -> bool:
    """Whether flex attention compiles for heads as the model's and gives what grids give, forward and backward.

    Without it grids are used, also beside flash attention.
    """
    config = module.model.config.get_text_config()
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    groups, width = getattr(config, "num_key_value_heads", None) or heads, getattr(config, "head_dim", None) or width
    batch, families = few_tokens()
    layout = lay_out(batch.to(device), families)
    generator = torch.Generator().manual_seed(0)
    dtype, shapes = next(module.parameters()).dtype, [(1, n, len(layout.cells), width) for n in (heads, groups, groups)]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]

    def outcome(*, flex: bool) -> list[Tensor]:
        q, k, v = inputs = [t.clone().requires_grad_() for t in tensors]
        out = SharedAttention(layout, flex=flex)(module, q, k, v, None, scaling=None)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    try:
        with torch.enable_grad():
            pairs = list(zip(outcome(flex=True), outcome(flex=False), strict=True))
    except (RuntimeError, NotImplementedError, ValueError) as error:  # whatever the compiler has against it
        logger.info("shared prompts go without flex attention, which fails here: %s", error)
        return False
    return all(float((a - b).abs().max()) <= TOLERANCE[dtype] * float(b.abs().max()) for a, b in pairs)


def _tried_out(implementation: str, module: LearnerModule, device: torch.device) -> str | None:
    """What the model itself says."""
    try:
        with torch.no_grad(), evaluating(module):
            return unheard(implementation, module, device) or _differs(module, device)
    except UnknownOptionError as error:
        return str(error)
    except (TypeError, RuntimeError) as error:  # a model that takes no further arguments, a kernel that fails
        return f"it fails on a few tokens: {error}"


def unheard(implementation: str, module: LearnerModule, device: torch.device) -> str | None:
    """Why not every layer leaves its attention to `attend` and says which tokens it sees; None where all do."""
    tokens = torch.arange(1, 5, device=device)[None]
    places = torch.arange(4, device=device)[None]
    with listening(implementation) as ears:
        module.backbone(input_ids=tokens, position_ids=places, attention_mask=None, use_cache=False, attend=ears)
    layers = int(module.model.config.get_text_config().num_hidden_layers)
    if ears.layers != layers:
        return f"{ears.layers} of its {layers} layers hand their attention over"
    return ears.problems[0] if ears.problems else None


def _differs(module: LearnerModule, device: torch.device) -> str | None:
    batch, families = few_tokens()
    batch = batch.to(device)
    apart, shared = (build_inputs(batch, batch.action_mask, packed=False, families=f) for f in (None, families))
    want, got = module.states(apart).float(), module.states(shared).float()
    error = (got - want).abs().amax(-1) / want.abs().max()
    # a mixture may choose another expert for a token whose scores are as good as equal
    worst = float(error.median() if num_experts(module.model.config.get_text_config()) else error.max())
    limit = TOLERANCE[next(module.parameters()).dtype]
    return None if worst <= limit else f"its states differ by {worst:.1g} of the largest"


def few_tokens() -> tuple[Batch, list[Family]]:
    """Three rows with 12 tokens in common, and one alone."""
    common = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    rows = [[*common, *tail] for tail in ([2, 7, 1], [8, 2], [8, 1, 8, 2])] + [[7, 7, 2, 1, 5]]
    width = max(map(len, rows))
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    actions = mask.clone()
    actions[:, 0] = False
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    batch = Batch(tokens=tokens, attention_mask=mask, action_mask=actions, index=torch.arange(len(rows)))
    return batch, [Family((0, 1, 2), len(common)), Family((3,), len(rows[3]))]


class _Ears:
    """An `Attend` that notes what layers ask for and answers with zeros."""

    def __init__(self) -> None:
        self.masks: list[tuple[Any, int | None]] = []
        self.problems: list[str] = []
        self.layers = 0

    def mask_function(self, *, batch_size: int, q_length: int, kv_length: int, **options: Any) -> Tensor:
        """In place of transformers' own: a mask that is known again, with the span of tokens it stands for."""
        mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=options.get("device"))
        self.masks.append((mask, options.get("local_size")))
        return mask

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        *,
        scaling: float | None,
        **options: Any,
    ) -> Tensor:
        self.layers += 1
        try:
            window = follow(options)
            spans = [span for known, span in self.masks if known is mask]
            if spans != [window]:
                self.problems.append("its layers do not say which tokens they see")
        except UnknownOptionError as error:
            self.problems.append(str(error))
        return query.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2)


@contextmanager
def listening(implementation: str) -> Iterator[_Ears]:
    """Inside, transformers' masks of this implementation are noted; pass what is yielded as `attend`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    ears = _Ears()
    ALL_MASK_ATTENTION_FUNCTIONS[implementation] = ears.mask_function
    try:
        yield ears
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[implementation]
