"""Files: where a typed path is looked up, and how one is written whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the repository


def find_path(given: str, default: str | None = None) -> Path:
    """A relative path is looked up from where the user stands, then from the repository root.

    The default is anchored at the root, wherever the program is run from. A path that exists
    nowhere is taken from where the user stands. Returns an absolute path.
    """
    path = Path(given).expanduser()
    if given == default or (not path.exists() and (ROOT / path).exists()):
        return ROOT / path
    return path.absolute()


def write_atomically(path: Path, write: Callable, previous: Path | None = None) -> None:
    """Calls write(file) on a temporary binary file beside path, then renames it to path.

    At every instant path is the old whole file or the new whole file (fsync before the rename,
    and of the folder after it). With `previous`, the old one stays under that name. On an error the
    temporary file is removed and path is untouched.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            give_second_name(path, previous)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # Windows cannot open a folder, and needs no fsync of it
        folder = os.open(path.parent, os.O_RDONLY)
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(folder)
        os.close(folder)


def give_second_name(path: Path, second: Path) -> None:
    """Makes `second` another name of the file at path, in place of whatever had it."""
    temporary = second.with_name(second.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, temporary)
    os.replace(temporary, second)
    temporary.unlink(missing_ok=True)  # POSIX renames nothing if both are already one file
