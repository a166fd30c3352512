"""Files and folders that survive a crash, with the modes that the umask asks for."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import stat
from pathlib import Path

RENAME_EXCHANGE = 2
AT_FDCWD = -100
NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def sync_tree(root: Path) -> None:
    """fsync every file and directory under `root`."""
    for folder, _, files in os.walk(root):
        for name in files:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                sync_directory(Path(path))
        sync_directory(Path(folder))


def sync_directory(path: Path) -> None:
    """fsync a file, or a directory so that the names in it survive a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, text: str) -> None:
    """Write a small file so that readers see the old or the new content, never a part."""
    fresh = path.parent / f".openrlhf-new-{secrets.token_hex(4)}"
    try:
        with open(fresh, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def move_file(source: Path, target: Path) -> None:
    """Rename, also where `target` lies on another disk (a folder in the folder may be a mount point of its own)."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        fresh = target.parent / f".openrlhf-new-{secrets.token_hex(4)}"
        shutil.copy2(source, fresh)
        sync_directory(fresh)
        os.replace(fresh, target)
        source.unlink()


def exchange(one: Path, other: Path) -> bool:
    """Swap two names at one moment; False where the file system cannot (then nothing was done)."""
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "renameat2", None)
    if call is None:
        return False
    if call(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def usual_modes(root: Path, like: Path) -> None:
    """Give all below `root` the mode of a new file, as `like` has it: writers of tensors make theirs private.

    The mode is read from a file that was just written there and not from the umask: a default access control list of
    the folder counts instead of it.
    """
    mode = stat.S_IMODE(like.stat().st_mode) & 0o666
    folder_mode = mode | (mode & 0o444) >> 2
    for folder, _, files in os.walk(root):
        if Path(folder) != root:
            os.chmod(folder, folder_mode)
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) != mode:
                os.chmod(path, mode)


def tree_size(root: Path) -> int:
    """Bytes of all files under `root`."""
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, files in os.walk(root) for name in files)


def files_below(root: Path) -> list[str]:
    """Relative paths of all files (and links) below `root`, sorted; folders do not count."""
    found = []
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found += [os.path.relpath(os.path.join(folder, name), root) for name in [*files, *links]]
    return sorted(found)


def remove_empty_folders(root: Path, paths: list[str]) -> None:
    """Remove the folders between `root` and the files `paths` of it that are empty now, deepest first."""
    parents = {parent for path in paths for parent in Path(path).parents if parent != Path(".")}
    for parent in sorted(parents, key=lambda p: len(p.parts), reverse=True):
        folder = root / parent
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            try:
                folder.rmdir()
            except OSError:  # a mount point, or somebody was quicker
                continue
