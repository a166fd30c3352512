"""The import path of agent files: `from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor`."""

from openrlhf.agents.executor import AgentExecutorBase as AgentExecutorBase
from openrlhf.agents.executor import AgentInstanceBase as AgentInstanceBase
from openrlhf.agents.executor import MultiTurnAgentExecutor as MultiTurnAgentExecutor
from openrlhf.agents.executor import SingleTurnExecutor as SingleTurnExecutor
