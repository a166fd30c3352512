"""Write the flag pages of `docs/` from the dataclasses, and the tables of algorithms in them from those of the code.

`--check` writes nothing and fails when one is stale.
"""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf.core.tables import ESTIMATORS, POLICY_LOSSES, Estimator, PolicyLoss
from openrlhf.launcher.commands import (
    LORA_COMBINER,
    REFUSED,
    SERVE_RM,
    TRAIN_DPO,
    TRAIN_PPO_RAY,
    TRAIN_RM,
    TRAIN_SFT,
    Command,
)
from openrlhf.launcher.flags import Flag
from openrlhf.launcher.help_text import sections
from openrlhf.launcher.old_names import REMOVED, all_old_names, new_form, new_names

DOCS = Path(__file__).parents[1] / "docs"

WRITTEN = "<!-- Written by scripts/flag_docs.py from the code; edit the docstrings there. -->"

FLAGS_HEAD = f"""# Common CLI options

{WRITTEN}

Every command reads `--config run.toml` (flags on the command line win), prints its resolved configuration with
`--print_config` and lists its flags with `--help`. A switch is written alone; two values are separated by a space;
`None` is the value of a flag that is off. Names are never abbreviated. The flags of supervised and preference training
are on [a page of their own](supervised_flags.md).
"""

SUPERVISED_HEAD = f"""# CLI options of supervised and preference training

{WRITTEN}

What the commands share is said on the page of the [common options](flags.md).
"""

MIGRATION_HEAD = f"""# Flag migration

{WRITTEN}

Flat flags of earlier releases are refused. The message names the flag of today and prints the whole command line
rewritten, ready to paste (secrets are masked): `--prompt_max_len P --generate_max_len G` becomes
`--data.max_len P+G --rollout.max_new_tokens G`, expressions of the shell stay ones. The later spelling of the
off-policy correction (`is_correction_level`, `is_correction_mode` and `is_correction_gating` under `algo.advantage`) is
understood where it means the same.
"""

TABLE = ("| flag | values | default | meaning |", "|---|---|---|---|")

ALGORITHMS = DOCS / "rl_training.md"
BLOCK = "<!-- {name}: written by scripts/flag_docs.py from core/tables.py -->"
BLOCK_END = "<!-- end -->"

SUPERVISED = (TRAIN_SFT, TRAIN_RM, TRAIN_DPO)


def pages() -> dict[Path, str]:
    """All generated pages."""
    common = [part for c in (TRAIN_PPO_RAY, SERVE_RM, LORA_COMBINER) for part in command_part(c)]
    supervised = [part for c in SUPERVISED for part in command_part(c)]
    old = [*migration_part("RL training", TRAIN_PPO_RAY), *migration_part("Supervised training", *SUPERVISED)]
    return {
        DOCS / "flags.md": "\n".join([FLAGS_HEAD, *common]),
        DOCS / "supervised_flags.md": "\n".join([SUPERVISED_HEAD, *supervised]),
        DOCS / "flag_migration.md": "\n".join([MIGRATION_HEAD, *old]),
        ALGORITHMS: with_tables(ALGORITHMS.read_text(encoding="utf-8")),
    }


def with_tables(text: str) -> str:
    """The page with its tables of estimators and policy losses renewed, between their marks."""
    for name, lines in (("estimators", estimators()), ("policy losses", policy_losses())):
        before, mark, rest = text.partition(BLOCK.format(name=name))
        _, end, after = rest.partition(BLOCK_END)
        assert mark, f"no mark for the {name}"
        assert end, f"no end of the {name}"
        text = "\n".join([before + mark, "", *lines, "", end + after])
    return text


def estimators() -> list[str]:
    """The table of estimators."""
    columns = ("name", "`--algo.advantage.estimator`", "advantage", "critic", "gamma", "whitened", "samples per prompt")
    rows = [
        (row.title, code(name), row.summary, *map(yes, (row.critic, row.discounts, row.whitens)), more(row), row.source)
        for name, row in ESTIMATORS.items()
    ]
    return markdown(*columns, "source", rows=rows)


def policy_losses() -> list[str]:
    """The table of policy losses."""
    rows = [
        (row.title, code(name), row.summary, settings(row), code(row.agg_mode or "") or "any", row.source)
        for name, row in POLICY_LOSSES.items()
    ]
    columns = ("name", "`--actor.policy_loss_type`", "loss", "its settings", "`--actor.loss_agg_mode`", "source")
    return markdown(*columns, rows=rows)


def markdown(*columns: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """A table."""
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def more(row: Estimator) -> str:
    """How many samples of a prompt an estimator takes."""
    return f"{row.min_samples} or more"


def settings(row: PolicyLoss) -> str:
    """The flags that a loss reads."""
    return ", ".join(code(f"--actor.{name}") for name in row.settings.split())


def yes(holds: bool) -> str:
    """A fact in a table."""
    return "yes" if holds else "no"


def migration_part(title: str, *commands: Command) -> list[str]:
    """Old flat names of one or several commands and what they are called now."""
    names = {old: now(command, old) for command in commands for old in all_old_names(command)}
    lines = [f"## {title}", "", "| old | now |", "|---|---|"]
    lines += [f"| {code(f'--{old}')} | {text} |" for old, text in sorted(names.items())]
    return [*lines, ""]


def now(command: Command, old: str) -> str:
    """What became of an old flag."""
    if form := new_form(command, old):
        return re.sub(r"--[\w.]+", lambda flag: code(flag[0]), form)
    return " and ".join(code(f"--{name}") for name in new_names(command, old)) or f"removed: {escape(REMOVED[old])}"


def command_part(command: Command) -> list[str]:
    """The tables of one command; short for the supervised ones, which have many flags in common."""
    lines = [f"## {command.name}", "", f"`{command.program}`: {command.summary}", ""]
    for section, flags in sections(command).items() if command not in SUPERVISED else [("", command.flags.values())]:
        title = [f"### {command.name}: {section or 'general'}", ""] if command not in SUPERVISED else []
        lines += [*title, *TABLE, *(row(command, flag) for flag in flags), ""]
    return lines


def row(command: Command, flag: Flag) -> str:
    """One flag. Refused flags say so, with the reason."""
    text = flag.help
    commands, reason = REFUSED.get(flag.path, ((), ""))
    if command.name in commands:
        text += f" **Refused:** {reason}."
    default = "" if flag.off else "required" if flag.required else code(flag.show(flag.default))
    return f"| {code(flag.option)} | {code(flag.shape.hint)} | {default} | {escape(text)} |"


def code(text: str) -> str:
    """Text as inline code in a table cell. GitHub and the site read a bar there alike only as an entity in HTML."""
    line = text.replace("\n", "\\n")
    if "|" in line:
        return f"<code>{html.escape(line, quote=False).replace('|', '&#124;')}</code>"
    return f"`{line}`" if line else ""


def escape(text: str) -> str:
    """Text in a table cell."""
    return text.replace("|", "&#124;").replace("<", "&lt;").replace("*", "\\*") if "**" not in text else text


def main() -> int:
    """Write or check the pages."""
    if "--check" not in sys.argv[1:]:
        for path, text in pages().items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path.name for path, text in pages().items() if path.read_text(encoding="utf-8") != text]
    if stale:
        print(f"{', '.join(stale)} stale: run python scripts/flag_docs.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
