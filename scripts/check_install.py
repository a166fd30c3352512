"""Import every module below the named packages from installed wheels, and make sure that they came from there.

Run by the interpreter of the environment under test: `check_install.py openrlhf.agents --without starlette,uvicorn`,
where a module may fail only for lack of a package named after `--without` (an extra that was not installed).
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
# Modules that start a program when they are imported as `__main__` only.
SKIPPED_SUFFIX = ".__main__"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--without", default="")
    options = parser.parse_args()
    absent = set(options.without.split(","))
    imported = [name for package in options.packages for name in below(package) if importable(name, absent)]
    strangers = [name for name in imported if is_checkout(getattr(sys.modules[name], "__file__", None))]
    for name in strangers:
        print(f"{name} was imported from the checkout, not from the wheel", file=sys.stderr)
    print(f"imported {len(imported)} modules of {', '.join(options.packages)}")
    return 1 if strangers or len(imported) < len(options.packages) else 0


def importable(name: str, absent: set[str]) -> bool:
    """Import a module; False if it needs one of the absent packages. Every other failure is raised."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in absent:
            raise
        print(f"{name} needs {error.name}, which is not installed here")
        return False
    return True


def below(name: str) -> list[str]:
    """A package and all modules in it. A namespace package is walked as well; it is no module to import by itself."""
    package = importlib.import_module(name)
    found = [info.name for info in pkgutil.walk_packages(package.__path__, f"{name}.")]
    return [name, *(module for module in found if not module.endswith(SKIPPED_SUFFIX))]


def is_checkout(file: str | None) -> bool:
    return file is not None and (CHECKOUT / "packages") in Path(file).resolve().parents


if __name__ == "__main__":
    sys.exit(main())
