"""From the raw reward of a sample to the reward of its tokens.

Order: running normalisation, clip, overlong penalty, stop-properly penalty (`shape_rewards`), then the baseline over
the samples of a prompt (`group_baseline`), then the KL penalty per token (`token_rewards`). Failed samples are never
scored: they are left out of every statistic and get advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.core.config import RewardShapingConfig
from openrlhf.core.masks import at_least_fp32, check_rows, check_vectors, select
from openrlhf.core.tables import Baseline, estimator_row

GROUP_STD_EPS = 1e-9
"""Added to the group's std by mean_std: a group of equal rewards gets advantage 0."""

_MIN_STD = 1e-8
_MIN_MEAN = 1e-9


class RunningRewardNorm:
    """Mean and population std of all rewards seen so far (Chan et al., 1979, parallel update), in float64.

    Its state belongs into checkpoints. Call `update` with new rewards before `normalize`.
    """

    # A reward model's stored mean and std count like this many rewards: the first batch refines, not replaces them.
    STORED_STATS_COUNT = 1000.0

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self.sum_sq = 0.0
        """Sum of squared deviations from the mean."""

    @classmethod
    def from_stored(cls, mean: float, std: float) -> RunningRewardNorm:
        """Start from the mean and std that a reward model's config carries.

        Raises:
            ValueError: mean not finite or std not > 0.
        """
        if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
            raise ValueError(f"a reward model's stored mean and std must be finite, std > 0: got {mean!r}, {std!r}")
        norm = cls()
        norm.count, norm.mean, norm.sum_sq = cls.STORED_STATS_COUNT, mean, std * std * cls.STORED_STATS_COUNT
        return norm

    @property
    def std(self) -> float:
        return math.sqrt(self.sum_sq / self.count) if self.count else 0.0

    @property
    def scale(self) -> float:
        """What `normalize` multiplies differences of rewards by."""
        return 1.0 / max(self.std, _MIN_STD)

    def update(self, rewards: Tensor, valid: Tensor | None = None) -> None:
        """Take in rewards [N]; those not finite or not valid [N] bool are left out."""
        x = rewards.double()[_usable(rewards, valid)]
        if not len(x):
            return
        n, mean = float(len(x)), float(x.mean())
        delta, total = mean - self.mean, self.count + n
        self.sum_sq += float((x - mean).square().sum()) + delta * delta * self.count * n / total
        self.mean += delta * n / total
        self.count = total

    def normalize(self, rewards: Tensor) -> Tensor:
        """(rewards - mean) / max(std, 1e-8), [N] in their dtype."""
        assert self.count > 0, "RunningRewardNorm.update comes before normalize"
        return ((rewards.double() - self.mean) / max(self.std, _MIN_STD)).to(rewards.dtype)

    def state_dict(self) -> dict[str, float]:
        """Plain numbers, exact in JSON."""
        return {"count": self.count, "mean": self.mean, "sum_sq": self.sum_sq}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self.count, self.mean, self.sum_sq = float(state["count"]), float(state["mean"]), float(state["sum_sq"])


def shape_rewards(
    rewards: Tensor,
    *,
    lengths: Tensor,
    truncated: Tensor,
    max_length: int,
    config: RewardShapingConfig,
    norm: RunningRewardNorm | None = None,
) -> Tensor:
    """Raw rewards [N] to shaped rewards [N]: normalise, clip, overlong penalty, stop-properly penalty.

    lengths [N]: trainable tokens of the sample, with several turns those of its longest turn. truncated [N] bool:
    ended because of length. max_length: rollout.max_new_tokens, else data.max_len. norm: already updated with these
    rewards; used if config.normalize_enable. A NaN (failed sample) stays NaN unless a penalty replaces it.

    Raises:
        ValueError: shapes that differ, options out of range.
    """
    check_vectors(rewards=rewards, lengths=lengths, truncated=truncated)
    low, high = config.clip_range
    if not low <= high:
        raise ValueError(f"`clip_range` needs low <= high, got {low!r} {high!r}")
    shaped = at_least_fp32(rewards)
    if config.normalize_enable:
        assert norm is not None, "`normalize_enable` needs a RunningRewardNorm"
        shaped = norm.normalize(shaped)
    shaped = shaped.clamp(low, high)
    if config.overlong_buffer_len:
        shaped = shaped + overlong_penalty(
            lengths, max_length, config.overlong_buffer_len, config.overlong_penalty_factor
        ).to(shaped.dtype)
    if config.stop_properly_penalty_coef is not None:
        shaped = stop_properly_penalty(shaped, truncated, config.stop_properly_penalty_coef)
    return shaped


def overlong_penalty(lengths: Tensor, max_length: int, buffer_len: float, factor: float) -> Tensor:
    """-factor * clip((L - (max_length - buffer_len)) / buffer_len, 0, 1) for lengths L [N]; [N] in [-factor, 0].

    Linear over the last buffer_len tokens (Yu et al., DAPO, 2025, eq. 13); the paper's penalty is -1 past the maximum,
    this one is capped at the factor. A buffer of 0 is off.

    Raises:
        ValueError: buffer_len negative or longer than max_length.
    """
    if not 0 <= buffer_len <= max_length:
        raise ValueError(
            f"`overlong_buffer_len` must lie between 0 and the maximum length {max_length!r} "
            f"(`max_new_tokens`, else `max_length`), got {buffer_len!r}"
        )
    if buffer_len == 0:
        return torch.zeros_like(lengths, dtype=torch.float32)
    excess = (lengths.double() - (max_length - buffer_len)) / buffer_len
    return (excess.clamp(0.0, 1.0) * -factor).float()


def stop_properly_penalty(rewards: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """Truncated samples: coef in [0, 1] multiplies their reward, a negative coef replaces it; [N].

    Source: Liu et al., ProRL (2025). Note that multiplying raises a negative reward.

    Raises:
        ValueError: coef > 1 or NaN.
    """
    if not coef <= 1:
        raise ValueError(f"`stop_properly_penalty_coef` must be <= 1, got {coef!r}")
    penalised = rewards * coef if coef >= 0 else torch.full_like(rewards, coef)
    return torch.where(truncated.bool(), penalised, rewards)


@dataclass(frozen=True, kw_only=True)
class GroupBaseline:
    """What `group_baseline` returns.

    rewards [N]: after the baseline; exactly 0 where not keep. keep [N] bool: samples to train on.
    dropped_groups: groups without enough surviving samples. group_std: mean over the kept groups of the unbiased std of
    their rewards (the metric group_reward_std), 0 without a group of two.
    """

    rewards: Tensor
    keep: Tensor
    dropped_groups: int
    group_std: float


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What a baseline is made of, [N] float64 each.

    centred: the reward of a sample's episode less its group's mean. own: the sample's reward less its episode's, 0
    unless branches of an episode have rewards of their own. Of its group: n, the valid episodes; std, unbiased; mean.
    """

    centred: Tensor
    own: Tensor
    n: Tensor
    std: Tensor
    mean: Tensor


BASELINES: dict[Baseline, Callable[[Compared], Tensor]] = {
    "mean": lambda x: x.centred + x.own,
    "mean_std": lambda x: (x.centred + x.own) / (x.std + GROUP_STD_EPS),
    "leave_one_out": lambda x: x.centred * (x.n / (x.n - 1).clamp_min(1)) + x.own,
    "mean_ratio": lambda x: select((x.centred + x.own) / x.mean.clamp_min(_MIN_MEAN), x.mean > _MIN_MEAN),
}
"""Rewards [N] after the baseline."""


def group_baseline(
    estimator: str,
    rewards: Tensor,
    group_ids: Sequence[Hashable] | Tensor,
    valid: Tensor | None = None,
    episodes: Sequence[Hashable] | Tensor | None = None,
) -> GroupBaseline:
    """Compare each episode with the others of its prompt. rewards [N], group_ids N prompt identities in any order.

    episodes: N names of episodes, told apart within a group; samples of one are its branches. None: every sample is an
    episode. An episode counts once, with the mean reward of its valid branches, and its branches share its advantage;
    one with a reward of its own is compared with the same baseline by that.

    With m and s the mean and unbiased std (n - 1) over the group's n valid episodes:
    rloo: n / (n - 1) (R - m), that is R minus the mean of the others (Ahmadian et al., 2024). group_norm:
    (R - m) / (s + 1e-9) (Shao et al., GRPO, 2024, which leaves the kind of std open and has no epsilon). dr_grpo:
    R - m (Liu et al., 2025, whose division by a constant length is loss_agg_mode seq-mean-token-sum-norm).
    reinforce_baseline: R - m, whitened later on (Hu et al., REINFORCE++, 2025). maxrl: (R - m) / m (Tajwar et al.,
    2026, for rewards of 0 and 1, where it follows the gradient of log p(success) up to a factor of
    1 - (1 - p) ** (n - 1)); where m is not > 1e-9 it is 0. gae and reinforce: R.
    A group of equal rewards gets exactly 0.

    Samples not valid [N] bool, or whose reward is not finite, are left out of the statistics and not kept; nor are
    groups with fewer than two surviving episodes where the estimator compares them.

    Raises:
        ValueError: shapes that differ, an unknown estimator.
    """
    row = estimator_row(estimator)
    check_vectors(rewards=rewards, valid=valid)
    group, ids = _numbered(group_ids, rewards, "group_ids")
    names = range(len(ids)) if episodes is None else _numbered(episodes, rewards, "episodes")[1]
    episode, _ = _numbered(list(zip(ids, names, strict=True)), rewards, "episodes")
    ok = _usable(rewards, valid)
    n, std, samples = _group_stats(rewards, group, episode, ok)
    keep = ok & (n >= row.min_samples)[group]
    out = rewards.double() if row.baseline is None else BASELINES[row.baseline](samples)
    compared = n >= 2
    return GroupBaseline(
        rewards=select(out, keep).to(at_least_fp32(rewards).dtype),
        keep=keep,
        dropped_groups=int((n < row.min_samples).sum()),
        group_std=float(std[compared].mean()) if bool(compared.any()) else 0.0,
    )


def token_rewards(
    reward: Tensor, kl: Tensor | None, kl_coef: float, action_mask: Tensor, turns: Tensor | None = None
) -> Tensor:
    """-kl_coef * kl per trainable token, plus the scalar reward on the last trainable one; [B, T], 0 off the mask.

    reward [B], kl [B, T] or None (no reference model, or KL as a loss). A row without trainable tokens is all 0.
    turns [B, T]: in the place of the scalars what `turns.turn_credit` gave the last tokens of turns.
    The reward of Ouyang et al. (InstructGPT, 2022, eq. 2) and Ziegler et al. (2019), spread over the tokens; the KL
    comes after the baseline of the group, so no baseline sees it.

    Raises:
        ValueError: shapes that differ.
    """
    check_rows(action_mask, kl=kl, turns=turns)
    if reward.shape != action_mask.shape[:1]:
        raise ValueError(f"reward must be [B] = [{action_mask.shape[0]}], got {tuple(reward.shape)}")
    reward = at_least_fp32(reward)
    last = action_mask & (action_mask.flip(-1).cumsum(-1).flip(-1) == 1)
    out = torch.where(last, reward.unsqueeze(-1), torch.zeros((), dtype=reward.dtype, device=reward.device))
    if turns is not None:
        out = select(turns, action_mask)
    if kl is not None:
        out = out - kl_coef * select(kl, action_mask).to(out.dtype)
    return out


def _usable(rewards: Tensor, valid: Tensor | None) -> Tensor:
    finite = rewards.isfinite()
    return finite if valid is None else finite & valid.bool()


def _numbered(names: Sequence[Hashable] | Tensor, rewards: Tensor, what: str) -> tuple[Tensor, list[Hashable]]:
    """Names as numbers [N] from 0, in order of appearance, and as a list."""
    ids = names.tolist() if isinstance(names, Tensor) else list(names)
    if len(ids) != len(rewards):
        raise ValueError(f"{len(ids)} {what} for {len(rewards)} rewards")
    numbers = {name: i for i, name in enumerate(dict.fromkeys(ids))}
    return torch.tensor([numbers[name] for name in ids], dtype=torch.long, device=rewards.device), ids


def _group_stats(rewards: Tensor, group: Tensor, episode: Tensor, ok: Tensor) -> tuple[Tensor, Tensor, Compared]:
    """Per group: surviving episodes [G] and unbiased std [G], float64; and what the samples are compared by."""
    n_episodes, n_groups = (int(ids.max()) + 1 if len(ids) else 0 for ids in (episode, group))
    x = select(rewards.double(), ok)
    anchor, mean, branches = _means(x, episode, n_episodes, ok)
    value, alive = anchor + mean, branches > 0
    own = select(x - anchor[episode] - mean[episode], ok)

    group_of = episode.new_zeros(n_episodes)
    group_of[episode] = group
    anchor, mean, n = _means(value, group_of, n_groups, alive)
    centred = select(value - anchor[group_of] - mean[group_of], alive)
    variance = x.new_zeros(n_groups).index_add_(0, group_of, centred.square()) / (n - 1).clamp_min(1)
    std = variance.sqrt()
    compared = Compared(
        centred=select(centred[episode], ok), own=own, n=n[group], std=std[group], mean=(anchor + mean)[group]
    )
    return n, std, compared


def _means(x: Tensor, bins: Tensor, n_bins: int, ok: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per bin the mean of its values that are ok, as one of them plus the rest, and how many there are; [bins] each.

    Shifted by one member of the bin first: values that are equal centre to exactly 0, without rounding.
    """
    anchor = x.new_zeros(n_bins)
    anchor[bins[ok]] = x[ok]
    count = x.new_zeros(n_bins).index_add_(0, bins, ok.to(x.dtype))
    shifted = select(x - anchor[bins], ok)
    return anchor, x.new_zeros(n_bins).index_add_(0, bins, shifted) / count.clamp_min(1), count
