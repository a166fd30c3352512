"""Math with verifiable answers: 1.0 where the final answer of the response equals the label.

Pass this file to --reward.remote_url. Only the response is graded, never the prompt; the last \\boxed{} wins.
Needs math-verify: pip install 'openrlhf-agents[math]'.
"""

from openrlhf.agents.graders.math import extract_answer, grade_math
from openrlhf.agents.graders.text import response_of


def reward_func(queries, prompts, labels, **kwargs):
    """queries: prompt and response; labels: the right answers; kwargs has the responses alone."""
    responses = kwargs.get("responses")
    if responses is None:
        responses = [response_of(query, prompt) for query, prompt in zip(queries, prompts, strict=True)]
    rewards = [1.0 if grade_math(r, label or "") else 0.0 for r, label in zip(responses, labels, strict=True)]
    answered = [1.0 if extract_answer(response) else 0.0 for response in responses]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"accuracy": rewards, "answered": answered}}
