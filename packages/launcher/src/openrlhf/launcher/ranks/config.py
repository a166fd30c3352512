"""What a learner rank needs of the configuration, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.core.config import AlgoConfig, PolicyLossConfig
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.plugins import NO_PLUGINS, Plugins


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """Beside its learner's own specification.

    agg_constant: divisor of loss_agg_mode seq-mean-token-sum-norm. processor_path: of a vision-language model.
    images: whether samples may come with images. plugins: the user's functions in the place of ours.
    """

    algo: AlgoConfig
    policy_loss: PolicyLossConfig
    value_clip: float
    max_len: int
    agg_constant: float
    pad_token_id: int
    processor_path: str | None = None
    images: bool = False
    force_old_logprobs: bool = False
    plugins: Plugins = NO_PLUGINS


def rank_config(
    config: TrainPPOConfig, *, pad_token_id: int, processor_path: str | None = None, plugins: Plugins = NO_PLUGINS
) -> RankConfig:
    """From the resolved configuration."""
    return RankConfig(
        algo=config.algo,
        policy_loss=config.actor,
        value_clip=config.critic.value_clip,
        max_len=config.data.max_len,
        agg_constant=float(config.rollout.max_new_tokens or config.data.max_len),
        pad_token_id=pad_token_id,
        processor_path=processor_path,
        images=config.data.max_images_per_prompt > 0,
        plugins=plugins,
    )
