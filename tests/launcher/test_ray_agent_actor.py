"""An agent worker's actor: the engines that it knows, the samples that it gives back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.agents.config import AgentConfig
from openrlhf.agents.context import EpisodeSettings
from openrlhf.agents.engine import Generation
from openrlhf.agents.files import CodeFile
from openrlhf.agents.recorder import Outcome, Recorder
from openrlhf.agents.types import PromptItem, StopReason
from openrlhf.launcher.ray.agent_actor import AgentActor, AgentSpec, build_worker
from openrlhf.launcher.ray.engine_actor import EngineActor
from openrlhf.launcher.ray.remote import Remote
from openrlhf.rollout.requests import GenerateRequest
from support.agents_templates import QWEN3
from support.launcher_tokenizer import byte_tokenizer


async def value(content: Any) -> Any:
    return content


def test_an_engine_that_stays_keeps_its_client() -> None:
    first, second, new = (Remote[EngineActor](f"engine {i}", object()) for i in (0, 1, 1))
    spec: Any = None

    async def main() -> None:
        worker = AgentActor(spec, [first, second], 0)
        before = worker._clients
        await worker.set_engines([first, new])
        assert worker._clients[0] is before[0]
        assert worker._clients[1].engine is new
        assert await worker.engines_down() == {}

    asyncio.run(main())


@pytest.mark.parametrize("reward_model", [False, True])
def test_b148_only_a_reward_model_may_be_left_to_score_a_sample(reward_model: bool) -> None:
    """Without one, an agent that returns no reward would end the run in the controller."""
    item = PromptItem(group_id="g", prompt="p")
    unscored = Recorder([1]).finish(item, 0, Outcome(stop_reason=StopReason.DONE))
    spec = SimpleNamespace(reward_model=reward_model, rewards_optional=False, settings=SimpleNamespace(max_length=64))
    actor = AgentActor(spec, [], 0)  # type: ignore[arg-type]
    actor._worker = SimpleNamespace(run_group=lambda *args, **options: value([unscored]))  # type: ignore[assignment]
    infos, trajectories = asyncio.run(actor.run_group(item, None))
    assert [info.failed for info in infos] == [t.failed for t in trajectories] == [not reward_model]


CALLS = """
import asyncio, json, urllib.request
from openrlhf.agents.chat.executor import OpenAIServerExecutor


class AgentExecutor(OpenAIServerExecutor):
    async def run_agent(self, prompt, label, session_id):
        tools = [{"type": "function", "function": {"name": "add"}}]
        body = {"model": "policy", "messages": [{"role": "user", "content": prompt}], "tools": tools}
        body |= {"tool_choice": "required", "temperature": 0.25}
        values = self.environment(session_id)
        url, headers = values["OPENAI_BASE_URL"] + "/chat/completions", {"Content-Type": "application/json"}
        headers["Authorization"] = "Bearer " + values["OPENAI_API_KEY"]
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        answer = json.load(await asyncio.to_thread(urllib.request.urlopen, request))
        message = answer["choices"][0]["message"]
        assert message["reasoning"] == "hm", message
        return float(message["tool_calls"][0]["function"]["name"] == "add")
"""


def test_vllms_parsers_and_constraints_reach_an_agent(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    tokenizer = byte_tokenizer(chat_template=QWEN3)
    tokenizer.save_pretrained(tmp_path)
    answer = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>'
    asked: list[GenerateRequest] = []

    class Client:
        name = "engine 0"

        async def generate(self, request: GenerateRequest) -> Generation:
            asked.append(request)
            ids = tokenizer.encode(answer, add_special_tokens=False)
            return Generation(token_ids=ids, logprobs=[-0.5] * len(ids), versions=[0] * len(ids), finish_reason="stop")

        async def health(self) -> None: ...

    agent = AgentConfig(tool_parser="auto", reasoning_parser="qwen3", client_sampling="honour")
    settings = EpisodeSettings(max_length=4096, agent=agent, guided=True)
    file = CodeFile(path="/agent.py", source=CALLS)

    async def main() -> Any:
        loaded = await build_worker(
            AgentSpec(tokenizer_path=str(tmp_path), settings=settings, agent_file=file), [Client()], 0
        )
        try:
            return await loaded.worker.run_group(PromptItem(group_id="g", prompt="1+1?"))
        finally:
            await loaded.worker.close()
            await loaded.router.close()

    (sample,) = asyncio.run(main())
    assert not sample.failed, sample.failure
    assert (sample.reward, sample.turns[0].temperature) == (1.0, 0.25)
    assert tokenizer.decode(sample.token_ids).endswith(answer)
    assert '"at_least_one": true' in asked[0].sampling.structure
