"""A code agent: the model writes a program, the unit tests answer, and it may repair it.

The label is Python source with asserts, unittest cases or doctests, or a list of {"input": ..., "output": ...}. The
reward is the share of tests passed in the last attempt. Programs run apart from their tests, with limits on time,
memory, processes and files (docs/graders.md); run untrusted code in a container besides. The
feedback uses ChatML turn markers: write those of your model.
"""

from openrlhf.agents.graders.code import CodeLimits, IOTest, grade_code_async
from openrlhf.agents.graders.text import strip_special
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

ATTEMPTS = 3
LIMITS = CodeLimits(seconds=5.0, memory_mb=512)
SHOWN = 600  # characters of an error that the model sees


class AgentInstance(AgentInstanceBase):
    """One programming task."""

    async def reset(self, states, **kwargs):
        label = states["label"]
        self.tests = label if isinstance(label, str) else [IOTest(**test) for test in label]
        self.attempts = 0
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.attempts += 1
        share, results = await grade_code_async(strip_special(states["action_text"]), self.tests, LIMITS)
        done = share == 1.0 or self.attempts == ATTEMPTS
        return {
            "rewards": share if done else 0.0,
            "scores": share,
            "environment_feedback": "" if done else self.feedback(results),
            "done": done,
            "extra_logs": {"attempts": self.attempts, "passed": share},
        }

    def feedback(self, results):
        """The first failing run, as the next user turn."""
        failed = next((r for r in results if not r.ok), results[0])
        reason = "it took too long" if failed.exit_code is None else (failed.stderr or "wrong output")[-SHOWN:]
        return f"\n<|im_start|>user\nThe tests failed:\n{reason}\nPlease fix it.<|im_end|>\n<|im_start|>assistant\n"


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
