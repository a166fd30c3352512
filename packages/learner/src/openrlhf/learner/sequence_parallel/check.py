"""Whether a model gives the same numbers when its rows are cut over ranks: looked up, listened for, tried."""

from __future__ import annotations

import torch
import torch.distributed as dist

from openrlhf.learner.attention import open_seam
from openrlhf.learner.heads import LogitsHead
from openrlhf.learner.layers import num_experts, recurrent_layers
from openrlhf.learner.modules import LearnerModule, evaluating
from openrlhf.learner.packing import build_inputs, cut_over
from openrlhf.learner.sequence_parallel.attention import SequenceParallel
from openrlhf.learner.sequence_parallel.group import SequenceGroup
from openrlhf.learner.shared_attention import UnknownOptionError
from openrlhf.learner.shared_check import TOLERANCE, few_tokens, unheard
from openrlhf.learner.spec import LearnerSpec


def cut_rows(spec: LearnerSpec, module: LearnerModule, group: SequenceGroup, device: torch.device) -> None:
    """Let `module` cut its rows over the group. Collective over all ranks.

    Raises ValueError where its numbers would not be those of whole rows.
    """
    how = SequenceParallel(
        group=group, implementation=spec.ds.attn_implementation, head_stride=spec.ds.ring_attn_head_stride
    )
    problem = ruled_out(spec, module) or _tried_out(how, module, device)
    failed = torch.tensor(float(problem is not None), device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if float(failed):
        why = problem or "another rank found that they cannot"
        raise ValueError(
            f"`ds.ring_attn_size` {group.size!r}: the rows of {spec.model_path!r} cannot be cut over ranks: {why}. "
            "Fix: `ds.ring_attn_size` 1"
        )
    module.sequence = how


def ruled_out(spec: LearnerSpec, module: LearnerModule) -> str | None:
    """What options and the model's configuration say."""
    config, kernel = module.model.config, spec.ds.attn_implementation
    if hasattr(config, "vision_config"):
        return "its samples may have images"
    if recurrent := recurrent_layers(config):
        return f"its {', '.join(recurrent)} layers carry a state from token to token"
    if module.aux_loss and isinstance(module.head, LogitsHead):
        return "its own balance loss is of the tokens of one rank"
    if not (kernel == "sdpa" or "flash" in kernel) or not open_seam(kernel):
        return f"`ds.attn_implementation` {kernel!r} has no place for it"
    return None


def _tried_out(how: SequenceParallel, module: LearnerModule, device: torch.device) -> str | None:
    """What the model itself says. All ranks of a group come to the same result before they cut a row."""
    try:
        with torch.no_grad(), evaluating(module):
            return unheard(how.implementation, module, device) or _differs(how, module, device)
    except UnknownOptionError as error:
        return str(error)
    except (TypeError, RuntimeError) as error:  # a model that takes no further arguments, a kernel that fails
        return f"it fails on a few tokens: {error}"


def _differs(how: SequenceParallel, module: LearnerModule, device: torch.device) -> str | None:
    batch = few_tokens()[0].to(device)
    inputs = build_inputs(batch, batch.action_mask, packed=True)
    part, shares = cut_over(inputs, how.group)
    want = module.states(inputs).float()[shares.mine]
    module.sequence = how
    try:
        got = module.states(part).float()
    finally:
        module.sequence = None
    if not len(want):
        return None
    error = (got - want).abs().amax(-1) / want.abs().max()
    # a mixture may choose another expert for a token whose scores are as good as equal
    worst = float(error.median() if num_experts(module.model.config.get_text_config()) else error.max())
    limit = TOLERANCE[next(module.parameters()).dtype]
    return None if worst <= limit else f"its states differ by {worst:.1g} of the largest"
