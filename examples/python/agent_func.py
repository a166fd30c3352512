"""The three-step agent of the guide: two rounds of "try again", then done.

Pass this file to --train.agent_func_path. Try it without a model: openrlhf-agents check examples/python/agent_func.py
"""

from typing import Any

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    """One environment, one episode."""

    def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs) -> dict:
        """states: observation (the prompt), label."""
        self.step_idx = 0
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        """states: observation_text, action_text, label, sampling_params."""
        self.step_idx += 1
        done = self.step_idx >= 3
        reward = 1.0 if done else 0.0  # a torch tensor is fine too
        feedback = (
            "\n\nHuman: [CORRECT]\n</s>"
            if done
            else "\n\nHuman: [INCORRECT]\nPlease analyze and try again.\n</s>\n\nAssistant: "
        )
        return {
            "rewards": reward,  # used for the advantages
            "scores": reward,  # used for dynamic filtering
            "environment_feedback": feedback,  # appended to the context of the next turn
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"step": self.step_idx},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """What the trainer looks for in this file."""

    def __init__(self):
        super().__init__(AgentInstance)
