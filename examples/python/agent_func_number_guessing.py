"""Number guessing in three turns: the environment says higher (+), lower (-) or not a number (?).

A task where several turns pay: seven numbers are always found in three guesses by halving. The feedback is written in
the format of the quickstart's tokenizer; for another model write its own turn markers. The label is the number.
"""

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

GUESSES = 3
USER, END, ASSISTANT = "<|user|>", "<|end|>", "<|assistant|>"


class AgentInstance(AgentInstanceBase):
    """One game."""

    async def reset(self, states, **kwargs):
        self.number = int(states["label"])
        self.guesses = 0
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.guesses += 1
        guess = states["action_text"].removesuffix(END).strip()
        valid = guess.isascii() and guess.isdigit()
        found = valid and int(guess) == self.number
        hint = "?" if not valid else "+" if int(guess) < self.number else "-"
        done = found or self.guesses == GUESSES
        return {
            "rewards": float(found),
            "scores": float(found),
            "environment_feedback": "" if done else f"{USER}{hint}{END}{ASSISTANT}",
            "done": done,
            "extra_logs": {"guesses": self.guesses, "valid_guess": float(valid)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
