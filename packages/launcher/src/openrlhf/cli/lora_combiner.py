"""`python -m openrlhf.cli.lora_combiner`: a LoRA adapter merged into its base model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf.launcher.command_line import run_command
from openrlhf.launcher.commands import LORA_COMBINER
from openrlhf.launcher.redaction import report_error
from openrlhf.launcher.supervised_config import LoraCombinerConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and merge; returns the exit status."""
    return run_command(LORA_COMBINER, argv, _merge)


def _merge(config: LoraCombinerConfig) -> int:
    from openrlhf.launcher.outputs import hold_merged
    from openrlhf.launcher.preflight import check_model  # --help needs none of it

    try:
        base = check_model(config.model_path, "--model_path")
        check_adapter(config.lora_path)
    except OSError as error:
        return report_error(error)
    from openrlhf.learner.lora import merge  # imports torch: --help must not
    from openrlhf.learner.models import DTYPES

    try:
        with hold_merged(config) as output:
            dtype = DTYPES[config.ds.param_dtype]
            merge(base, config.lora_path, str(output), reward_model=config.is_rm, dtype=dtype)
    except (OSError, ValueError) as error:
        return report_error(error)
    sys.stdout.write(f"merged model: {output}\n")
    return 0


def check_adapter(path: str) -> None:
    """FileNotFoundError where no adapter lies."""
    if not (Path(path) / "adapter_config.json").is_file():
        raise FileNotFoundError(f"--lora_path {path!r}: there is no adapter_config.json; give the folder of an adapter")


if __name__ == "__main__":
    sys.exit(main())
