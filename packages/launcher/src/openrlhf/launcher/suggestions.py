"""What to say about a flag that a command does not have."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from openrlhf.launcher.commands import Command
from openrlhf.launcher.flags import ChoiceError, Flag
from openrlhf.launcher.known_names import known_name
from openrlhf.launcher.old_names import became, is_old_name
from openrlhf.launcher.words import NOT_EXPANDED, is_shell

ABSENT = {
    "vllm.max_num_seqs": "engine arguments go through --vllm.engine_args '{\"max_num_seqs\": 256}'",
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
    if not name:
        return ["-- is no flag: the name is missing after the dashes"]
    if longer := [n for n in names if n.startswith(name)]:
        return [f"--{name} is not a flag, and abbreviations are not accepted; did you mean {_list(longer)}?"]
    if same := [n for n in names if n.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1].replace("-", "_")]:
        return [f"--{name} is not a flag; did you mean {_list(same)}?"]
    near = get_close_matches(name, names, n=SHOWN, cutoff=0.6)
    hint = f"did you mean {_list(near)}?" if near else "--help lists all flags"
    return [f"--{name} is not a flag; {hint}"]


def unknown_key(command: Command, key: str) -> list[str]:
    """The messages for a key of a configuration file that is no field of `command`."""
    if is_old_name(command, key):
        return [f"{key} {became(command, key, dashes='')}"]
    flag = command.flags.get(key)
    if flag is not None:
        return [f"{key} is a form of the command line; in a file write {flag.path} = false"]
    if within := [n for n in command.flags if n.startswith(f"{key}.")]:
        return [f"{key} is a table and takes no value; its keys are {_list(within, dashes='')}"]
    return unknown_flag(command, key)


def wrong_value(flag: Flag, error: ValueError) -> str:
    """What is wrong with a flag's value; for one that is no choice, the choice that was probably meant."""
    if not isinstance(error, ChoiceError):
        return str(error)
    if known := known_name(flag.path, error.value):
        return f"{error}; {known}"
    near = get_close_matches(error.value, error.choices, n=1, cutoff=0.6)
    return f"{error}; did you mean {near[0]!r}?" if near else str(error)


def missing_dashes(command: Command, values: Sequence[str]) -> str:
    """A hint where one of a flag's values is the name of another flag, or was meant for the shell."""
    for value in values:
        if is_shell(value):
            return f"; {value!r} {NOT_EXPANDED}"
        name = value.lstrip("-").partition("=")[0]
        if name in command.flags:
            return f"; {value!r} is a flag when it starts with two dashes: --{name}"
        if value == "--":
            return "; leave '--' out"
    return ""


def _list(names: Sequence[str], dashes: str = "--") -> str:
    shown = [f"{dashes}{name}" for name in names[:SHOWN]]
    more = f" or one of {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return " or ".join(shown) + more
