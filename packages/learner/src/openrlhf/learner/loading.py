"""Loading weights, and judging what transformers reports about them: silent when all is right, an error when not."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

REPORT = "LOAD REPORT"
"""In transformers' own report (5.x), a table on stderr that leaves the judgement to its reader."""
SHOWN = 5


def load_pretrained(auto_class: Any, path: str, *, fresh: Collection[str] = (), **options: Any) -> Any:
    """`auto_class.from_pretrained(path, **options)`, without its report.

    fresh: names of modules whose weights the files need not have, since they come from elsewhere. Raises ValueError
    that names the weights: the model would start from random ones, or would leave out some of the files' that belong
    into its layers.
    """
    with _quiet():
        model, info = auto_class.from_pretrained(path, output_loading_info=True, **options)
    judge(model, path, info, fresh=fresh)
    return model


def judge(model: nn.Module, path: str, info: dict[str, Any], *, fresh: Collection[str] = ()) -> None:
    """ValueError where files and model do not belong together.

    Weights of other heads, towers and prediction layers may lie in the files unused; what lies inside of a module that
    the model has may not.
    """
    missing = sorted(name for name in info["missing_keys"] if name.split(".")[0] not in fresh)
    if missing:
        kind = type(model).__name__
        raise ValueError(f"{path!r} lacks weights of a {kind}, which would start at random: {_list(missing)}")
    names = {name for name, _ in model.named_modules()}
    unused = sorted(key for key in info["unexpected_keys"] if _belongs(key, model, names))
    if unused:
        raise ValueError(
            f"{path!r} has weights that a {type(model).__name__} does not use inside of its layers: {_list(unused)}; "
            "its files are those of another architecture, quantised, or of adapters that are not merged"
        )


def _belongs(key: str, model: nn.Module, names: Collection[str]) -> bool:
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for spelled in {key, key.removeprefix(prefix), prefix + key}:
        owner, _, last = spelled.rpartition(".")
        if owner and owner in names:
            return last not in dict(model.get_submodule(owner).named_buffers(recurse=False))  # computed anyway
        while owner and owner not in names:
            owner = owner.rpartition(".")[0]
        if owner and next(model.get_submodule(owner).children(), None) is None:
            return True  # below a matrix: adapters, scales of a quantisation
    return False


def _list(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


@contextmanager
def _quiet() -> Iterator[None]:
    """While it is open, transformers logs no report."""

    def no_report(record: logging.LogRecord) -> bool:
        return REPORT not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(no_report)
    try:
        yield
    finally:
        logger.removeFilter(no_report)
