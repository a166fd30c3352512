"""What the end of a run needs of a folder, tried at its start: making, writing, renaming and removing files; room."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from openrlhf.learner.folders.files import sync_directory
from openrlhf.learner.folders.manifest import NEW_PREFIX

PROBE = b"\0" * (1 << 16)


def try_folder(folder: str | Path, name: str, *, room: int = 0) -> None:
    """Write, rename and remove a small file in an existing folder; `room` bytes must be free.

    name: how the user calls the folder. Raises ValueError with what does not work.
    """
    path = Path(os.path.realpath(folder))
    probe = path / f"{NEW_PREFIX}{secrets.token_hex(4)}"
    renamed = path / f"{NEW_PREFIX}{secrets.token_hex(4)}"
    try:
        with open(probe, "wb") as file:
            file.write(PROBE)
            file.flush()
            os.fsync(file.fileno())
        os.rename(probe, renamed)
        sync_directory(path)
        renamed.unlink()
        free = shutil.disk_usage(path).free
    except OSError as error:
        raise ValueError(f"{name} {str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        for leftover in (probe, renamed):
            with suppress(OSError):
                leftover.unlink()
    if free < room:
        raise ValueError(
            f"{name} {str(path)!r}: {_gib(free)} GiB are free on its disk, the run will write {_gib(room)} GiB there. "
            "Free some, or give another folder"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}"
