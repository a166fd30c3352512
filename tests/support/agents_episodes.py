"""Scripted agents and shorthands for episodes."""

from openrlhf.agents.testing import ByteTokenizer
from openrlhf.agents.types import Failure
from openrlhf.utils.agent import AgentInstanceBase

EOS = 257


def ids(text):
    return ByteTokenizer().encode(text)


def agent(*steps, observation=None, on_step=None):
    """An agent class that returns these step results, the last one for ever."""

    class Scripted(AgentInstanceBase):
        def __init__(self):
            self.turn = 0

        async def reset(self, states, **kwargs):
            return {"observation": states["observation"] if observation is None else observation}

        async def step(self, states, **kwargs):
            if on_step is not None:
                on_step(states)
            self.turn += 1
            return steps[min(self.turn, len(steps)) - 1]

    return Scripted


def failure(trajectory) -> Failure:
    assert trajectory.failure is not None
    return trajectory.failure


def more(feedback="", **kwargs):
    return {"rewards": 0.0, "environment_feedback": feedback, "done": False, **kwargs}


def last(reward=1.0, feedback="", **kwargs):
    return {"rewards": reward, "environment_feedback": feedback, "done": True, **kwargs}
