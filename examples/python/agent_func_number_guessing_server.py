"""Number guessing as in agent_func_number_guessing.py, but through the OpenAI chat API.

The prompt is the text of the first user message: train with prompts that are not rendered by a chat template.
Needs: pip install 'openrlhf-agents[server]' openai.
"""

from openai import AsyncOpenAI

from openrlhf.agents.chat.executor import OpenAIServerExecutor

GUESSES = 3


class AgentExecutor(OpenAIServerExecutor):
    """One game per session; all sessions share the connections of one client."""

    client: AsyncOpenAI | None = None

    async def run_agent(self, prompt, label, session_id):
        if self.client is None:
            self.client = AsyncOpenAI(base_url=self.base_url, api_key=self.api_key)
        api = self.client.with_options(base_url=self.session_url(session_id))
        number = int(label)
        messages: list = [{"role": "user", "content": prompt}]
        for guesses in range(1, GUESSES + 1):
            answer = await api.chat.completions.create(model="policy", messages=messages)
            text = answer.choices[0].message.content or ""
            guess = text.strip()
            valid = guess.isascii() and guess.isdigit()
            if valid and int(guess) == number:
                return {"reward": 1.0, "extra_logs": {"guesses": guesses}}
            hint = "?" if not valid else "+" if int(guess) < number else "-"
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
        return {"reward": 0.0, "extra_logs": {"guesses": GUESSES}}

    async def close(self):
        if self.client is not None:
            await self.client.close()
        await super().close()
