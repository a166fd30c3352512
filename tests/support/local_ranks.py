"""What the controller does with the roles of a run, with one rank of each in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf.launcher.ranks.batches import combine_sums
from openrlhf.launcher.ranks.roles import CriticRank, PolicyRank, ReferenceRank
from openrlhf.launcher.samples import SampleRef
from openrlhf.launcher.trainer.protocols import Prepared


def prepare_here(
    mini_batches: Sequence[Sequence[SampleRef]],
    *,
    policy: PolicyRank,
    critic: CriticRank | None = None,
    reference: ReferenceRank | None = None,
    kl_coef: float = 0.0,
    step: int = 0,
) -> Prepared:
    """A batch for `update_here`; the handles of what roles hand each other are the tensors themselves."""
    algo, scores, told = policy.config.algo, dict[str, Any](), list[Any]()
    if reference is not None and algo.ref_logprobs:
        scores["ref_logprobs"] = [reference.logprobs(mini_batches)]
    if reference is not None and algo.distill.divergence is not None:
        told = [reference.tell(mini_batches)]
    valued = None if critic is None else critic.values(mini_batches)
    if critic is not None and valued is not None:
        scores["values"] = [critic.read(valued)]
    ready = policy.prepare(mini_batches, scores=scores, kl_coef=kl_coef, told=told, step=step)
    if critic is not None and valued is not None:
        valued = critic.prepare(valued, returns=[policy.returns(ready)])
    return Prepared(handle=(ready, valued), metrics=combine_sums([policy.metrics(ready)]))


def update_here(
    prepared: Prepared,
    order: Sequence[int],
    *,
    policy: PolicyRank,
    critic: CriticRank | None = None,
    kl_coef: float = 0.0,
    freeze: Sequence[bool] = (),
    members: str | None = None,
) -> dict[str, float]:
    """One optimiser step of policy and critic per mini-batch."""
    ready, valued = prepared.handle
    metrics = combine_sums([policy.update(ready, order, kl_coef=kl_coef, freeze=freeze, members=members)])
    if critic is not None:
        metrics |= combine_sums([critic.update(valued, order, members=members)])
    return metrics
