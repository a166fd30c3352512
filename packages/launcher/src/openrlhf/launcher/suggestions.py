"""What to say about a flag that a command does not have."""

from __future__ import annotations

from difflib import get_close_matches

from openrlhf.launcher.commands import Command
from openrlhf.launcher.old_names import is_old_name

ABSENT = {
    "ref.model_name_or_path": "the reference model is --actor.model_name_or_path as it was before training",
    "vllm.max_num_seqs": "engine arguments go through --vllm.engine_args '{\"max_num_seqs\": 256}'",
    "prompt_max_len": "a prompt may take --data.max_len minus --rollout.max_new_tokens tokens",
    "generate_max_len": "the length of responses is --rollout.max_new_tokens",
    "algo.kl.unbiased_gradient": "this form of the KL gradient is not built",
    "data.tokenizer_chat_template": "the template of the tokenizer in the model's folder is used",
}
"""Flags that people look for, and where what they want is to be found."""

SHOWN = 3


def unknown_flag(command: Command, name: str) -> list[str]:
    """The messages for a flag that `command` does not have; none for an old name, which has a message of its own."""
    if is_old_name(command, name):
        return []
    if name in ABSENT:
        return [f"--{name} does not exist: {ABSENT[name]}"]
    names = list(command.flags)
    if longer := [n for n in names if n.startswith(name)]:
        return [f"--{name} is not a flag, and abbreviations are not accepted; did you mean {_list(longer)}?"]
    if same := [n for n in names if n.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1].replace("-", "_")]:
        return [f"--{name} is not a flag; did you mean {_list(same)}?"]
    near = get_close_matches(name, names, n=SHOWN, cutoff=0.6)
    hint = f"did you mean {_list(near)}?" if near else "--help lists all flags"
    return [f"--{name} is not a flag; {hint}"]


def _list(names: list[str]) -> str:
    shown = [f"--{name}" for name in names[:SHOWN]]
    more = f" or one of {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return " or ".join(shown) + more
