"""The text of `--help`, from the dataclasses."""

from __future__ import annotations

import shutil
import textwrap

from openrlhf.launcher.commands import Command
from openrlhf.launcher.flags import Flag

INDENT = " " * 6
WIDEST = 120
COMMON = (
    ("--config FILE", "Read flags from a TOML file; flags on the command line win."),
    ("--print_config", "Print the resolved configuration as TOML and end."),
    ("--help", "Print this text and end."),
)


def sections(command: Command) -> dict[str, list[Flag]]:
    """The flags of a command by the first part of their name; flat ones are under the empty name."""
    found: dict[str, list[Flag]] = {}
    for flag in command.flags.values():
        found.setdefault(flag.section, []).append(flag)
    return found


def help_text(command: Command) -> str:
    """All flags of a command, by section, with types, defaults and meanings."""
    width = min(WIDEST, shutil.get_terminal_size().columns)
    lines = [f"usage: {command.program} [flags]", "", command.summary, ""]
    for option, text in COMMON:
        lines += [f"  {option}", *_wrapped(text, width)]
    for section, flags in sections(command).items():
        lines += ["", f"{section or 'general'}:"]
        for flag in flags:
            lines += [f"  {flag.option} {flag.shape.hint}".rstrip(), *_wrapped(meaning(flag), width)]
    return "\n".join(lines)


def meaning(flag: Flag) -> str:
    """Help and default of a flag in one line."""
    if flag.off:
        return flag.help
    default = "required" if flag.required else f"default: {flag.show(flag.default)}"
    return f"{flag.help} ({default})"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=INDENT, subsequent_indent=INDENT, break_long_words=False)
