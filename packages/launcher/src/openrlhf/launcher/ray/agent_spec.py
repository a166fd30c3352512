"""What an agent worker is made of: plain data that crosses process borders."""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.agents.config import AgentConfig
from openrlhf.agents.engine import SamplingParams
from openrlhf.agents.files import CodeFile


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """Files travel by content, so that they work on nodes without a shared disk. reward_urls: HTTP reward servers.

    vision: whether the model takes images. reward_model: whether one scores what comes back without a reward.
    """

    tokenizer_path: str
    sampling: SamplingParams
    n_samples: int
    max_len: int
    max_new_tokens: int | None
    seed: int
    overlong: str
    agent: AgentConfig
    vision: bool = False
    reward_model: bool = False
    agent_file: CodeFile | None = None
    reward_file: CodeFile | None = None
    reward_urls: tuple[str, ...] = ()
    reward_api_key: str | None = None
    reward_timeout: float = 60.0
