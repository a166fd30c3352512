"""What the algorithms can be told: one dataclass per part of a flag section. Imports no ML library.

The docstring under a field is the help text of its flag; names, types and defaults are those of the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

AdvantageEstimator = Literal["gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo"]
CorrectionType = Literal["tis", "icepop", "seq-mask-tis"]
KLEstimator = Literal["k1", "k2", "k3"]
LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
PolicyLossType = Literal["ppo", "gspo"]

GROUP_ESTIMATORS: tuple[AdvantageEstimator, ...] = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
"""Estimators that compare the samples of one prompt: they need n_samples_per_prompt > 1."""

DISCOUNTED_ESTIMATORS: tuple[AdvantageEstimator, ...] = ("gae", "reinforce")
"""Estimators that use gamma; with another one gamma != 1 is an error."""

WHITENED_ESTIMATORS: tuple[AdvantageEstimator, ...] = ("gae", "reinforce", "reinforce_baseline")
"""Estimators whose advantages are whitened over the rollout batch."""


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    """Policy loss: part of `--actor.*`."""

    eps_clip: float = 0.2
    """PPO clip range: the probability ratio is clipped to [1 - eps_clip, 1 + eps_clip]."""

    eps_clip_low_high: tuple[float, float] | None = None
    """Asymmetric clip range (low, high): the ratio is clipped to [1 - low, 1 + high]. Overrides eps_clip when given."""

    dual_clip: float | None = None
    """Dual-clip constant c > 1 (typically 3): bounds the loss of a token with negative advantage by c times it.
    None: off."""

    policy_loss_type: PolicyLossType = "ppo"
    """ppo: one ratio per token. gspo: one ratio per sequence, the geometric mean over its tokens; implies
    loss_agg_mode seq-mean-token-mean."""

    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number per optimiser step. token-mean: mean over all trainable tokens of all
    micro-batches and ranks. seq-mean-token-mean: mean per sequence, then over sequences. seq-mean-token-sum-norm:
    sum per sequence divided by rollout.max_new_tokens (else data.max_len), then mean over sequences (Dr. GRPO)."""

    entropy_coef: float | None = None
    """Weight of the entropy bonus. None: entropy is not computed. 0: it is logged only."""

    aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of mixture-of-experts models, for policy and critic. 0: off."""


@dataclass(frozen=True, kw_only=True)
class ValueLossConfig:
    """Value loss: part of `--critic.*`."""

    value_clip: float = 0.5
    """The new value is clipped to this distance from the value before the update; the worse of both errors counts."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Advantages and off-policy correction: `--algo.advantage.*`."""

    estimator: AdvantageEstimator = "gae"
    """gae: PPO with a critic. reinforce: REINFORCE++. rloo: leave-one-out baseline. reinforce_baseline: REINFORCE++
    with the group mean as baseline. group_norm: GRPO. dr_grpo: GRPO without division by the group's std. Only gae
    has a critic; rloo, reinforce_baseline, group_norm and dr_grpo need rollout.n_samples_per_prompt > 1."""

    gamma: float = 1.0
    """Discount per trainable token. Used by gae and reinforce; another value than 1 is an error with the others."""

    lambd: float = 1.0
    """Lambda of generalised advantage estimation. Lower trades bias for variance."""

    no_std_norm: bool = False
    """Centre the advantages but do not divide them by their std (gae, reinforce, reinforce_baseline)."""

    is_correction_enable: bool = False
    """Weight the policy loss by the ratio of training engine to rollout engine probabilities."""

    is_correction_type: CorrectionType = "tis"
    """tis: clamp the ratio per token into the thresholds. icepop: a ratio outside them counts 0, one inside stays.
    seq-mask-tis: drop sequences whose geometric mean ratio is outside, clamp the ratios of the others per token."""

    is_correction_threshold: tuple[float, float] = (0.5, 5.0)
    """Bounds (low, high) of the ratio."""


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """Divergence from the reference model: `--algo.kl.*`."""

    init_coef: float = 0.01
    """KL coefficient at the start. 0: no reference model is loaded."""

    target: float | None = None
    """Adapt the coefficient so that the KL approaches this value. None: the coefficient stays constant."""

    horizon: int = 10000
    """Time constant of that adaptation, in samples."""

    estimator: KLEstimator = "k1"
    """KL estimator per token: k1 for a reward penalty, k2 or k3 for a loss term."""

    use_loss: bool = False
    """Add the KL as a loss term instead of a penalty on the token rewards."""


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """The algorithm: `--algo.*`."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)

    kl: KLConfig = field(default_factory=KLConfig)

    dynamic_filtering_enable: bool = False
    """Train only on prompts whose mean score over their samples lies inside dynamic_filtering_range (DAPO). Rejected
    prompts are replaced by drawing more."""

    dynamic_filtering_range: tuple[float, float] = (0.0, 1.0)
    """Bounds (low, high) of that mean score, both exclusive."""


@dataclass(frozen=True, kw_only=True)
class RewardShapingConfig:
    """What happens to a raw reward: part of `--reward.*`. Order: normalise, clip, overlong, stop-properly."""

    normalize_enable: bool = False
    """Normalise raw rewards by the running mean and std over all rewards seen, whatever their source. A reward model
    whose config carries mean and std starts from those."""

    clip_range: tuple[float, float] = (-10.0, 10.0)
    """Clamp the (normalised) reward into (low, high), before penalties and baseline."""

    overlong_buffer_len: float | None = None
    """Soft length limit (DAPO): samples longer than the maximum minus this many tokens lose reward linearly. The
    maximum is rollout.max_new_tokens, else data.max_len. None or 0: off."""

    overlong_penalty_factor: float = 1.0
    """Largest overlong penalty, reached at the maximum length."""

    stop_properly_penalty_coef: float | None = None
    """Samples of which a generation call (of any turn) was cut by rollout.max_new_tokens, or that filled data.max_len:
    a coefficient in [0, 1] multiplies their reward, a negative one replaces it (ProRL). None: off."""
