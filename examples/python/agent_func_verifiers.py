"""Train on an environment of the verifiers library. Needs: pip install 'openrlhf-agents[verifiers]'.

Write the dataset first: python agent_func_verifiers.py prompts.jsonl
Then train with --train.agent_func_path agent_func_verifiers.py --data.prompt_dataset prompts.jsonl
--data.input_key prompt --data.label_key label, without --data.apply_chat_template.
"""

import sys

from openrlhf.agents.adapters.verifiers import VerifiersExecutor

PROMPTS = 1000
ENVIRONMENT = {
    "taskset": {"id": "gsm8k-v1"},  # any installed taskset
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
}


class AgentExecutor(VerifiersExecutor):
    """Each sample is one episode of the environment."""

    env_config = ENVIRONMENT


if __name__ == "__main__":
    print(AgentExecutor.write_prompts(sys.argv[1], limit=PROMPTS), "prompts written")
