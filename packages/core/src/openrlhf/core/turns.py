"""Credit per turn: from the rewards of an episode's turns to the rewards of their last tokens.

An episode of K turns earns r_1 .. r_K. With one reward per episode, all of its tokens share one advantage, of which
what happened before a turn is noise for the turn. Here a turn is credited with what it and later turns earn, its
reward-to-go (Sutton & Barto, 2018, section 13.3), and compared with the same turn of the prompt's other episodes.

With G_k = r_k + gamma G_{k+1} and B the estimator's baseline over the episodes of a group that reached turn k:

to_go: A_k = B(G_k). each: A_k = B(r_k) + gamma A_{k+1}. With the baselines that only subtract (rloo, dr_grpo,
reinforce_baseline) and episodes of equally many turns both are the same. For two turns and group_norm `each` is MT-GRPO
(Zeng et al., "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Credit Assignment", 2025), its coefficient
of the outcome being gamma; for any number GRPO with process supervision (Shao et al., "DeepSeekMath", 2024, section
4.1.3). It differs from the latter in that a turn is normalised over the same turn of the others, not over all steps of
the group. GiGPO (Feng et al., 2025) compares turns that begin in the same state instead; here their number stands for
the state, as nobody tells which observations are alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from openrlhf.core.config import TurnRewards
from openrlhf.core.rewards import group_baseline
from openrlhf.core.tables import estimator_row


@dataclass(frozen=True, kw_only=True)
class TurnCredit:
    """What `turn_credit` returns. rewards: per sample one per turn, for its last trainable token. turns: of all
    samples. alone: those of them that no other episode of their group reached, where the estimator compares them."""

    rewards: list[list[float]]
    turns: int
    alone: int


def turn_credit(
    mode: TurnRewards,
    estimator: str,
    shaped: Tensor,
    turns: Sequence[Sequence[float]],
    *,
    groups: Sequence[Hashable],
    episodes: Sequence[Hashable],
    gamma: float = 1.0,
    scale: float = 1.0,
) -> TurnCredit:
    """Rewards for the last trainable token of every turn, such that returns over tokens are the turns' advantages.

    shaped [N]: the samples' rewards as wholes, after shaping and before any baseline. turns: per sample the rewards of
    its turns, at least one each, which `scale` multiplies as normalising did the whole. What they leave of the whole
    lies on the last turn: a penalty, a clip, what the author gave beyond them, and what other branches of the episode
    earned, of which nobody knows whether it came later. groups, episodes: names as in `rewards.group_baseline`.

    A turn that no other episode reached has nothing to be compared with and gets advantage 0. A turn's tokens then get
    r'_k = A_k - A_{k+1} in sum on its last one, so that the undiscounted return from any of its tokens on is A_k.

    Estimators without a baseline (gae, reinforce) get r'_k = r_k: their own returns, discounted per token, follow.

    Raises:
        ValueError: another number of samples in one of the arguments.
    """
    if not len(turns) == len(shaped) == len(groups) == len(episodes) or not all(turns):
        raise ValueError(
            f"turn_credit needs the turns, at least one, of each of {len(shaped)} samples, got {len(turns)} of "
            f"{len(groups)} groups and {len(episodes)} episodes"
        )
    whole = shaped.double().tolist()
    own = [[reward * scale for reward in rewards] for rewards in turns]
    for rewards, total in zip(own, whole, strict=True):
        rewards[-1] += total - sum(rewards)
    if estimator_row(estimator).baseline is None:
        return TurnCredit(rewards=own, turns=sum(map(len, own)), alone=0)
    values = [_to_go(rewards, gamma) for rewards in own] if mode == "to_go" else own
    place = [(n, k) for n, rewards in enumerate(values) for k in range(len(rewards))]
    compared = group_baseline(
        estimator,
        torch.tensor([values[n][k] for n, k in place], dtype=torch.float64),
        [(groups[n], k) for n, k in place],
        episodes=[episodes[n] for n, _ in place],
    )
    rest = iter(compared.rewards.tolist())
    advantages = [[next(rest) for _ in rewards] for rewards in values]
    if mode == "each":
        advantages = [_to_go(rewards, gamma) for rewards in advantages]
    return TurnCredit(
        rewards=[[a - b for a, b in pairwise([*of_sample, 0.0])] for of_sample in advantages],
        turns=len(place),
        alone=int((~compared.keep).sum()),
    )


def _to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    found, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        found.append(later)
    return found[::-1]
