"""What the algorithms can be told: one dataclass per part of a flag section. Imports no ML library.

The docstring under a field is the help text of its flag; names, types and defaults are those of the command line.
Where metadata names a table as `choices`, its names are the values, and the rows' `help` follows the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from openrlhf.core.tables import (
    ESTIMATORS,
    POLICY_LOSSES,
    Estimator,
    LossAggMode,
    PolicyLoss,
    estimator_row,
    policy_loss_row,
)

CorrectionType = Literal["tis", "icepop", "seq-mask-tis"]
KLEstimator = Literal["k1", "k2", "k3"]
TurnRewards = Literal["off", "to_go", "each"]
Divergence = Literal["reverse", "forward", "jsd"]


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """What sampling leaves of a distribution: see `truncation.kept_mask`. By default all of it."""

    top_p: float = 1.0
    """Likeliest tokens up to this sum of probabilities, in (0, 1]."""
    top_k: int = -1
    """So many of the likeliest tokens; 0 or less: all."""
    min_p: float = 0.0
    """Tokens with at least this share of the likeliest one's probability, in [0, 1]."""

    def __post_init__(self) -> None:
        if not (0 < self.top_p <= 1 and 0 <= self.min_p <= 1):
            raise ValueError(f"`top_p` {self.top_p!r} must be in (0, 1], `min_p` {self.min_p!r} in [0, 1]")

    @property
    def active(self) -> bool:
        """Whether it may leave a token out."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


NO_TRUNCATION = Truncation()


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

    policy_loss_type: str = field(default="ppo", metadata={"choices": POLICY_LOSSES})
    """The loss of the policy."""

    cispo_max_ratio: float = 5.0
    """cispo: the largest weight of a token. The paper sets no lower bound; 5 is what the study of Khatri et al. (2025)
    found best."""

    sapo_tau: tuple[float, float] = (1.0, 1.05)
    """sapo: how fast the gradient fades as the ratio leaves 1, for positive and for negative advantages."""

    dppo_tv_delta: float = 0.2
    """dppo_tv: how far the probability of a token may move, in absolute terms."""

    dppo_kl_delta: float = 0.05
    """dppo_kl: how far the distribution over a token and all others may move, in nats."""

    drpo_delta: float = 12.5
    """drpo: by how much the probability of a token must have moved for its gradient to vanish; the weight of a gradient
    lies within 1 - 1 / drpo_delta and 1 + 1 / drpo_delta. 0.2 has the bound of dppo_tv."""

    vespo_k: tuple[float, float] = (2.0, 3.0)
    """vespo: power of the sequence's ratio in its weight, for positive and for negative advantages."""

    vespo_lambda: tuple[float, float] = (3.0, 2.0)
    """vespo: how fast the weight falls as that ratio grows, for positive and for negative advantages."""

    loss_path: str | None = None
    """A loss of your own in the place of policy_loss_type: file.py, or file.py:function where it is not called
    policy_loss. It is tried on a toy batch before anything starts."""

    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number per optimiser step. token-mean: mean over all trainable tokens of all
    micro-batches and ranks. seq-mean-token-mean: mean per sequence, then over sequences. seq-mean-token-sum-norm:
    sum per sequence divided by rollout.max_new_tokens (else data.max_len), then mean over sequences (Dr. GRPO)."""

    entropy_coef: float | None = None
    """Weight of the entropy bonus. None: entropy is not computed. 0: it is logged only."""

    clip_cov_share: float | None = None
    """Keep the entropy up (Clip-Cov): this share of all tokens, drawn from those whose probability and advantage vary
    together most, is left out of the policy gradient. The paper's value is 2e-4. None: off."""

    clip_cov_range: tuple[float, float] = (1.0, 5.0)
    """Clip-Cov draws tokens for which (log-prob - mean) * (advantage - mean) lies in this range (low, high)."""

    aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of mixture-of-experts models, for policy and critic. 0: off."""

    def __post_init__(self) -> None:
        policy_loss_row(self.policy_loss_type)

    @property
    def clip(self) -> tuple[float, float]:
        """(low, high): the ratio is clipped to [1 - low, 1 + high]."""
        return self.eps_clip_low_high or (self.eps_clip, self.eps_clip)

    @property
    def clip_fits(self) -> bool:
        """Whether the clipped ratio can be one of probabilities, which is never negative, and 1 lies in its range."""
        low, high = self.clip
        return 0 <= low <= 1 and high >= 0

    @property
    def loss(self) -> PolicyLoss:
        """The row of the loss."""
        return policy_loss_row(self.policy_loss_type)

    @property
    def agg_mode_conflicts(self) -> bool:
        """Whether the user chose another aggregation than the one that belongs to the loss."""
        return self.loss.agg_mode is not None and self.loss_agg_mode not in (
            self.loss.agg_mode,
            PolicyLossConfig.loss_agg_mode,
        )


@dataclass(frozen=True, kw_only=True)
class ValueLossConfig:
    """Value loss: part of `--critic.*`."""

    value_clip: float = 0.5
    """The new value is clipped to this distance from the value before the update; the worse of both errors counts."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Advantages and off-policy correction: `--algo.advantage.*`."""

    estimator: str = field(default="gae", metadata={"choices": ESTIMATORS})
    """How rewards become advantages. In brackets: whether there is a critic, whether gamma is used, whether samples of
    one prompt are compared (groups, which need rollout.n_samples_per_prompt > 1), and whether advantages are whitened
    over the rollout batch."""

    path: str | None = None
    """Advantages of your own in the place of the estimator's: file.py, or file.py:function where it is not called
    compute_advantages. It is given the token rewards after the baseline; critic, baseline and whitening stay the
    estimator's. It is tried on a toy batch before anything starts."""

    gamma: float = 1.0
    """Discount per trainable token. Another value than 1 is an error with an estimator that does not use it."""

    lambd: float = 1.0
    """Lambda of generalised advantage estimation. Lower trades bias for variance."""

    no_std_norm: bool = False
    """Where advantages are whitened: centre them, but do not divide them by their std."""

    is_correction_enable: bool = False
    """Weight the policy loss by the ratio of training engine to rollout engine probabilities."""

    is_correction_type: CorrectionType = "tis"
    """tis: clamp the ratio per token into the thresholds. icepop: a ratio outside them counts 0, one inside stays.
    seq-mask-tis: drop sequences whose geometric mean ratio is outside, clamp the ratios of the others per token."""

    is_correction_threshold: tuple[float, float] = (0.5, 5.0)
    """Bounds (low, high) of the ratio."""

    def __post_init__(self) -> None:
        estimator_row(self.estimator)

    @property
    def correction_fits(self) -> bool:
        """Whether the thresholds are those of a ratio, in order."""
        low, high = self.is_correction_threshold
        return 0 <= low <= high

    @property
    def row(self) -> Estimator:
        """The row of the estimator."""
        return estimator_row(self.estimator)


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
class DistillConfig:
    """What is learned from a teacher's next-token distributions."""

    divergence: Divergence | None = None
    """Loss term between the next-token distributions of teacher p and student q. reverse: KL(q || p), which drops what
    the teacher finds improbable. forward: KL(p || q), which covers all that the teacher finds probable. jsd: the
    Jensen-Shannon divergence between the two. None: no such term."""

    coef: float = 1.0
    """Weight of what the teacher says."""

    top_k: int = 0
    """Compare the probabilities of the teacher's k most probable tokens and of all others together. 0: the whole
    vocabulary."""

    jsd_beta: float = 0.5
    """Weight of the teacher in the mixture that jsd compares with; near 0 it is like forward, near 1 like reverse."""


@dataclass(frozen=True, kw_only=True)
class PolicyDistillConfig(DistillConfig):
    """A teacher of the policy: `--algo.distill.*`."""

    reward_coef: float = 0.0
    """Weight of the reward beside a teacher, for estimators whose advantage is the teacher's. 0: rewards are measured
    only, and none are needed."""


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """The algorithm: `--algo.*`."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)

    kl: KLConfig = field(default_factory=KLConfig)

    distill: PolicyDistillConfig = field(default_factory=PolicyDistillConfig)

    turn_rewards: TurnRewards = "off"
    """Where the rewards of an agent's turns go. off: their sum is one reward of the episode. to_go: every turn is
    credited with what it and later turns earn; estimators that compare the samples of a prompt compare that with the
    same turn of the others. each: every turn's own reward is compared with the same turn's of the others first, then
    what it and later turns have left is summed."""

    turn_gamma: float = 1.0
    """Discount per turn of what later turns earn, for estimators that compare the samples of a prompt; the others
    discount per token (algo.advantage.gamma)."""

    @property
    def samples_teacher(self) -> bool:
        """Whether what is learned from a teacher are its log-probs of sampled tokens, not its distributions."""
        return self.advantage.row.teacher and self.distill.divergence is None

    @property
    def ref_logprobs(self) -> bool:
        """Whether the reference model's log-probs of sampled tokens are needed."""
        return self.kl.init_coef > 0 or self.samples_teacher

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
