"""An agent that talks to the policy through the OpenAI chat API, as any agent framework does.

While run_agent runs, the policy answers at `self.session_url(session_id)` on this machine; every call is recorded
token by token, and everything the policy wrote in it is trained on with the reward that run_agent returns.
Needs: pip install 'openrlhf-agents[server]' openai. Pass this file to --train.agent_func_path.
"""

from openai import AsyncOpenAI

from openrlhf.agents.chat.executor import OpenAIServerExecutor

ATTEMPTS = 3


class AgentExecutor(OpenAIServerExecutor):
    """Asks, checks the answer against the label, and asks again."""

    async def run_agent(self, prompt, label, session_id):
        messages: list = [{"role": "user", "content": prompt}]
        async with AsyncOpenAI(base_url=self.session_url(session_id), api_key=self.api_key) as client:
            for attempt in range(1, ATTEMPTS + 1):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                text = answer.choices[0].message.content or ""
                if label and label in text:
                    return {"reward": 1.0 / attempt, "scores": 1.0, "extra_logs": {"attempts": attempt}}
                messages.append({"role": "assistant", "content": text})
                messages.append({"role": "user", "content": "That is not right. Please try again."})
        return {"reward": 0.0, "scores": 0.0, "extra_logs": {"attempts": ATTEMPTS}}
