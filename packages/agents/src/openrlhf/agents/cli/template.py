"""`openrlhf-agents template MODEL`: does its chat template keep history as the model wrote it, and what follows?"""

from __future__ import annotations

import argparse
from typing import Any

from openrlhf.agents.chat.analysis import analyse_template
from openrlhf.agents.cli.models import make_tokenizer


def add_template(commands: Any) -> None:
    parser = commands.add_parser("template", help="is a model's chat template append-only? (needs the [hf] extra)")
    parser.add_argument("model", help="a Hugging Face model name or folder")


def run_template(arguments: argparse.Namespace) -> int:
    report = analyse_template(make_tokenizer(arguments.model))
    print(report)
    return int(not report.usable)
