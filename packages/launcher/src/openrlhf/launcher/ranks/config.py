"""What a learner rank needs of the configuration, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from openrlhf.core.config import AlgoConfig, PolicyLossConfig
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.plugins import NO_PLUGINS, Plugins
from openrlhf.launcher.record.place import RecordPlace

if TYPE_CHECKING:
    from openrlhf.learner.teaching import Lesson


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """Beside its learner's own specification.

    agg_constant: divisor of loss_agg_mode seq-mean-token-sum-norm. processor_path: of a vision-language model.
    images: whether samples may come with images. plugins: the user's functions in the place of ours.
    shared_vocab: token ids that policy and reference both have. record: where the policy's ranks record samples.
    """

    algo: AlgoConfig
    policy_loss: PolicyLossConfig
    value_clip: float
    max_len: int
    agg_constant: float
    pad_token_id: int
    processor_path: str | None = None
    images: bool = False
    shared_vocab: int | None = None
    force_old_logprobs: bool = False
    plugins: Plugins = NO_PLUGINS
    record: RecordPlace | None = None

    @property
    def lesson(self) -> Lesson | None:
        """What the policy learns of its teacher's distributions."""
        distill = self.algo.distill
        if distill.divergence is None:
            return None
        from openrlhf.learner.teaching import Lesson

        return Lesson(kind=distill.divergence, beta=distill.jsd_beta, top_k=distill.top_k, vocab=self.shared_vocab)


def rank_config(
    config: TrainPPOConfig,
    *,
    pad_token_id: int,
    processor_path: str | None = None,
    shared_vocab: int | None = None,
    plugins: Plugins = NO_PLUGINS,
    record: RecordPlace | None = None,
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
        shared_vocab=shared_vocab,
        record=record,
    )
