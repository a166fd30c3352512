"""The tables of advantage estimators and of policy losses: a row says everything that is ever asked about a name.

The names are the values of `--algo.advantage.estimator` and `--actor.policy_loss_type`. Flags and their help, rules,
the trainer and the docs read the rows; nothing compares names, so a new row is all that they need. Plain data without
any ML library, because `--help` reads it too: a row names its functions by their keys in `rewards.BASELINES`,
`advantages.RETURNS`, `losses.surrogates.RATIOS` and `losses.surrogates.SURROGATES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

Baseline = Literal["mean", "mean_std", "leave_one_out", "mean_ratio"]
Returns = Literal["gae", "discounted", "immediate"]
Ratio = Literal["token", "sequence", "sequence_token", "sequence_product"]
Surrogate = Literal["clip", "weight", "soft", "mask_tv", "mask_kl", "quadratic", "gamma"]
LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

CLIP_SETTINGS = "eps_clip eps_clip_low_high dual_clip"

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """A row: how the rewards of samples become advantages of tokens.

    title: the algorithm's name in the field. summary: what is special, a clause. source: the paper.
    baseline: what the samples of one prompt are compared with (a key of `rewards.BASELINES`); None: with nothing.
    returns: how token rewards become advantages (a key of `advantages.RETURNS`).
    discounts: whether gamma is used; with others gamma must be 1. whitens: whether advantages are whitened over the
    rollout batch. critic: whether there is one. teacher: whether token rewards come from one (`--ref.*`), and rewards
    of samples are optional. aliases: other names (small letters, digits and +), between blanks.
    """

    title: str
    summary: str
    source: str
    baseline: Baseline | None = None
    returns: Returns = "discounted"
    discounts: bool = False
    whitens: bool = False
    critic: bool = False
    teacher: bool = False
    aliases: str = ""

    @property
    def groups(self) -> bool:
        """Whether the samples of a prompt are compared: then there must be several."""
        return self.baseline is not None

    @property
    def min_samples(self) -> int:
        """Samples of a prompt without which none of them can be trained on."""
        return 2 if self.groups else 1

    @property
    def help(self) -> str:
        """One line for `--help`."""
        facts = {"critic": self.critic, "gamma": self.discounts, "groups": self.groups, "whitened": self.whitens}
        facts["teacher"] = self.teacher
        return f"{self.title}, {self.summary} ({', '.join(name for name, holds in facts.items() if holds)})"


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A row: a policy-gradient loss.

    title, summary, source, aliases: as of an `Estimator`. ratio: what the probability ratio is of (a key of
    `losses.surrogates.RATIOS`). surrogate: how ratio and advantage become a loss (a key of
    `losses.surrogates.SURROGATES`). settings: the fields of `config.PolicyLossConfig` that it reads, between blanks.
    agg_mode: the one aggregation that belongs to the loss; None: whichever the user chooses.
    """

    title: str
    summary: str
    source: str
    ratio: Ratio = "token"
    surrogate: Surrogate = "clip"
    settings: str = CLIP_SETTINGS
    agg_mode: LossAggMode | None = None
    aliases: str = ""

    @property
    def per_sequence(self) -> bool:
        """Whether all tokens of a sequence share one ratio; off-policy correction then judges sequences too."""
        return self.ratio != "token"

    @property
    def help(self) -> str:
        """One line for `--help`."""
        own = f"; implies loss_agg_mode {self.agg_mode}" if self.agg_mode else ""
        return f"{self.title}, {self.summary}{own}"


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(
        title="PPO",
        summary="generalised advantage estimation",
        source='Schulman et al., "Proximal Policy Optimization Algorithms" (2017)',
        returns="gae",
        discounts=True,
        whitens=True,
        critic=True,
        aliases="ppo a2c actorcritic critic vapo",
    ),
    "reinforce": Estimator(
        title="REINFORCE++",
        summary="the return itself",
        source='Hu et al., "REINFORCE++" (2025)',
        discounts=True,
        whitens=True,
        aliases="reinforce++ reinforceplusplus reinforcepp rpp pg policygradient",
    ),
    "rloo": Estimator(
        title="RLOO",
        summary="less the mean of the prompt's other samples",
        source='Ahmadian et al., "Back to Basics" (2024)',
        baseline="leave_one_out",
        aliases="leaveoneout loo reinforceleaveoneout",
    ),
    "reinforce_baseline": Estimator(
        title="REINFORCE++-baseline",
        summary="less the prompt's mean",
        source='Hu et al., "REINFORCE++" (2025)',
        baseline="mean",
        whitens=True,
        aliases="reinforce++baseline reinforceplusplusbaseline reinforceppbaseline reinforcebaseline++ rppbaseline"
        " baseline groupbaseline",
    ),
    "group_norm": Estimator(
        title="GRPO",
        summary="less the prompt's mean, divided by its std",
        source='Shao et al., "DeepSeekMath" (2024)',
        baseline="mean_std",
        aliases="grpo groupnorm grouprelative groupmean groupstd",
    ),
    "dr_grpo": Estimator(
        title="Dr. GRPO",
        summary="less the prompt's mean, not divided by its std",
        source='Liu et al., "Understanding R1-Zero-Like Training" (2025)',
        baseline="mean",
        aliases="drgrpo grpodoneright",
    ),
    "maxrl": Estimator(
        title="MaxRL",
        summary="less the prompt's mean, divided by that mean; for rewards of 0 and more",
        source='Tajwar et al., "Maximum Likelihood Reinforcement Learning" (2026)',
        baseline="mean_ratio",
        aliases="maximumlikelihood maximumlikelihoodrl pnormalization",
    ),
    "on_policy_distill": Estimator(
        title="On-policy distillation",
        summary="the teacher's log-prob of each sampled token less the policy's",
        source='Lu et al., Thinking Machines Lab, "On-Policy Distillation" (2025)',
        returns="immediate",
        teacher=True,
        aliases="distill distillation onpolicydistill onpolicydistillation opd gkd minillm kd",
    ),
}

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(
        title="PPO",
        summary="one ratio per token, clipped",
        source='Schulman et al., "Proximal Policy Optimization Algorithms" (2017)',
        aliases="clip ppoclip dualclip vanilla reinforce reinforce++ rloo gae",
    ),
    "gspo": PolicyLoss(
        title="GSPO",
        summary="one ratio per sequence, the geometric mean over its tokens, clipped",
        source='Zheng et al., "Group Sequence Policy Optimization" (2025), eq. 5 and 7',
        ratio="sequence",
        agg_mode="seq-mean-token-mean",
    ),
    "gspo_token": PolicyLoss(
        title="GSPO-token",
        summary="the sequence's ratio in value, the token's own in gradient, clipped",
        source='Zheng et al., "Group Sequence Policy Optimization" (2025), eq. 13 and 14',
        ratio="sequence_token",
        agg_mode="seq-mean-token-mean",
        aliases="gspotoken",
    ),
    "cispo": PolicyLoss(
        title="CISPO",
        summary="the log-prob, weighted by the ratio up to a bound; no token loses its gradient",
        source='Chen et al., "MiniMax-M1" (2025), eq. 4 and 5',
        surrogate="weight",
        settings="cispo_max_ratio",
        aliases="minimax clippedis truncatedis",
    ),
    "sapo": PolicyLoss(
        title="SAPO",
        summary="a sigmoid of the ratio, steeper for negative advantages, in place of the clip",
        source='Gao et al., "Soft Adaptive Policy Optimization" (2025)',
        surrogate="soft",
        settings="sapo_tau",
        agg_mode="seq-mean-token-mean",
        aliases="softadaptive softclip",
    ),
    "dppo_tv": PolicyLoss(
        title="DPPO, total variation",
        summary="the ratio; no gradient to tokens whose probability moved too far already and would move on",
        source='Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning" (2026), eq. 11 to 13',
        surrogate="mask_tv",
        settings="dppo_tv_delta",
        aliases="dppo dppobinarytv binarytv divergenceppo",
    ),
    "dppo_kl": PolicyLoss(
        title="DPPO, KL",
        summary="as dppo_tv, with the KL divergence between the token and all others",
        source='Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning" (2026), eq. 11, 12 and 14',
        surrogate="mask_kl",
        settings="dppo_kl_delta",
        aliases="dppobinarykl binarykl",
    ),
    "drpo": PolicyLoss(
        title="DRPO",
        summary="the ratio less a square of how far the probability moved, which pulls back past the bound",
        source='Yao et al., "Rethinking the Divergence Regularization in LLM RL" (2026), eq. 8 and 9',
        surrogate="quadratic",
        settings="drpo_delta",
        aliases="divergenceregularized",
    ),
    "vespo": PolicyLoss(
        title="VESPO",
        summary="the log-prob, weighted by a gamma-shaped kernel of the whole sequence's ratio; for stale samples",
        source='Shen et al., "VESPO: Variational Sequence-Level Soft Policy Optimization" (2026)',
        ratio="sequence_product",
        surrogate="gamma",
        settings="vespo_k vespo_lambda",
        aliases="variationalsequence",
    ),
}


def estimator_row(name: str) -> Estimator:
    """The row of an estimator. Raises ValueError for a name that has none."""
    return _row(ESTIMATORS, "`advantage.estimator`", name)


def policy_loss_row(name: str) -> PolicyLoss:
    """The row of a policy loss. Raises ValueError for a name that has none."""
    return _row(POLICY_LOSSES, "`policy_loss_type`", name)


def _row(table: Mapping[str, R], flag: str, name: str) -> R:
    if name not in table:
        raise ValueError(f"{flag} {name!r} is unknown: choose one of {', '.join(table)}")
    return table[name]
