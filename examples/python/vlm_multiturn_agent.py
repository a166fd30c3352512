"""An agent that shows pictures: after the first answer the environment draws a second picture and asks again.

For vision-language models with Qwen's tokens; for another family write its own turn markers and image token. Every
picture of `environment_images` needs its place in the feedback, in order. The label holds the two colours, such as
"red blue": the prompt's picture has the first one, the environment draws the second. A right name earns 0.5.

--data.max_images_per_prompt counts all pictures of an episode: here 2.
"""

import random

from PIL import Image

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 30),
    "blue": (30, 30, 220),
    "yellow": (220, 220, 30),
    "white": (235, 235, 235),
    "black": (20, 20, 20),
}
SIZE, NOISE = 32, 25
END = "<|im_end|>"
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
FEEDBACK = f"\n<|im_start|>user\n{PICTURE}colour?{END}\n<|im_start|>assistant\n"


class AgentInstance(AgentInstanceBase):
    """Two questions about two pictures."""

    async def reset(self, states, **kwargs):
        self.colours = states["label"].split()
        self.turn = 0
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        right = states["action_text"].removesuffix(END) == self.colours[self.turn]
        self.turn += 1
        done = self.turn == len(self.colours)
        result = {
            "rewards": 0.5 * right,
            "environment_feedback": "" if done else FEEDBACK,
            "done": done,
            "extra_logs": {f"right_{self.turn}": float(right)},
        }
        if not done:
            # Seeded by the prompt: the samples of a group see the same pictures.
            result["environment_images"] = [draw(self.colours[self.turn], seed=states["label"])]
        return result


def draw(colour, seed):
    """A picture of one colour with noise."""
    rng = random.Random(seed)
    picture = Image.new("RGB", (SIZE, SIZE))
    picture.putdata(
        [tuple(round(min(max(c + rng.gauss(0, NOISE), 0), 255)) for c in COLOURS[colour]) for _ in range(SIZE * SIZE)]
    )
    return picture


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
