"""A program whose agent blocks the event loop with one statement of its step."""

BLOCKING = """
    import asyncio, time
    from openrlhf.agents.config import AgentConfig
    from openrlhf.agents.context import EpisodeSettings
    from openrlhf.agents.executor import MultiTurnAgentExecutor
    from openrlhf.agents.testing import ByteTokenizer, ScriptedEngine
    from openrlhf.agents.types import PromptItem
    from openrlhf.agents.watchdog import exit_process
    from openrlhf.agents.worker import AgentWorker

    class Agent:
        async def reset(self, states):
            return states

        async def step(self, states):
            {statement}

    async def main():
        settings = EpisodeSettings(max_length=99, agent=AgentConfig(timeout=0.5))
        worker = AgentWorker(
            MultiTurnAgentExecutor(Agent), ScriptedEngine(["x"]), ByteTokenizer(), settings, on_blocked=exit_process
        )
        await worker.start()
        await worker.run_group(PromptItem(group_id="g", prompt="p"))

    asyncio.run(main())
"""
