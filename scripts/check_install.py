"""Import every module below the named packages from an installed wheel, and say where they came from.

Run by the interpreter of the environment under test, away from the checkout: `python check_install.py openrlhf.agents`.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
# Modules that start a program when they are imported as `__main__` only.
SKIPPED_SUFFIX = ".__main__"


def main(names: list[str]) -> int:
    modules = [module for name in names for module in below(name)]
    for name in modules:
        importlib.import_module(name)
    strangers = [name for name in modules if is_checkout(getattr(sys.modules[name], "__file__", None))]
    for name in strangers:
        print(f"{name} was imported from the checkout, not from the wheel", file=sys.stderr)
    print(f"imported {len(modules)} modules of {', '.join(names)}")
    return 1 if strangers or len(modules) < len(names) else 0


def below(name: str) -> list[str]:
    """A package and all modules in it. A namespace package is walked as well; it is no module to import by itself."""
    package = importlib.import_module(name)
    found = [info.name for info in pkgutil.walk_packages(package.__path__, f"{name}.")]
    return [name, *(module for module in found if not module.endswith(SKIPPED_SUFFIX))]


def is_checkout(file: str | None) -> bool:
    return file is not None and (CHECKOUT / "packages") in Path(file).resolve().parents


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
