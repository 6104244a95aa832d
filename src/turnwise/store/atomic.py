"""Writing aside: a file or directory appears whole under its name, or not at all.

Does not know what is written, nor who reads it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from turnwise.errors import StoreError

FULL = (errno.ENOSPC, errno.EDQUOT)
TAKEN = (errno.EEXIST, errno.ENOTEMPTY)


@contextlib.contextmanager
def aside(target: Path, replace: bool = True) -> Iterator[Path]:
    """Yield a path beside ``target`` to write to (make it a file or a directory); rename it over ``target`` at the end.

    ``replace=False`` fails when ``target`` has come into being meanwhile. When the block raises, ``target`` is as it
    was and nothing is left behind. A kill leaves at most a dot-file, which the next write to the same target (or
    :func:`sweep`) removes.
    """
    with in_words(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if replace:
            _recover(target)
            sweep(target.parent, target.name)
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    try:
        with in_words(target):
            yield temporary
            _sync_tree(temporary)
            if replace:
                _move(temporary, target)
            else:
                _claim(temporary, target)
            sync(target.parent)
    finally:
        remove(temporary)


@contextlib.contextmanager
def in_words(target: Path) -> Iterator[None]:
    """Turn what the disk says into a :class:`StoreError` a person can act on."""
    try:
        yield
    except OSError as error:
        raise _explained(target, error, error.errno in FULL) from error
    except SafetensorError as error:
        # safetensors writes from Rust: a full disk arrives as text, not as an OSError
        raise _explained(target, error, "No space left" in str(error) or "StorageFull" in str(error)) from error


def write_json(target: Path, value: Mapping[str, Any]) -> None:
    """A JSON file, whole or not at all."""
    with aside(target) as path:
        path.write_text(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")


def sweep(directory: Path, name: str = "*") -> None:
    """Remove what killed writers left. Only the one writer of a run may call this."""
    for path in directory.glob(f".{name}.*.tmp"):
        remove(path)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Force a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explained(target: Path, error: Exception, full: bool) -> StoreError:
    if full:
        return StoreError(
            f"no room left on the disk while writing {target}; what was there before is untouched. "
            "Free some space (or keep fewer checkpoints) and resume the run"
        )
    return StoreError(f"could not write {target}: {error}")


def _sync_tree(path: Path) -> None:
    if path.is_dir():
        for child in path.iterdir():
            _sync_tree(child)
    sync(path)


def _retired(target: Path) -> Path:
    return target.parent / f".{target.name}.old"


def _move(temporary: Path, target: Path) -> None:
    """A file replaces its elder in one system call; a directory cannot, so its elder steps aside first."""
    if not target.is_dir():
        os.replace(temporary, target)
        return
    os.rename(target, _retired(target))
    os.rename(temporary, target)
    remove(_retired(target))


def _claim(temporary: Path, target: Path) -> None:
    try:
        os.rename(temporary, target)  # refuses a directory with something in it
    except OSError as error:
        if error.errno in TAKEN:
            raise StoreError(f"{target} already exists and will not be overwritten; choose another name") from error
        raise


def _recover(target: Path) -> None:
    """Finish what a kill between the two renames of :func:`_move` left undone."""
    old = _retired(target)
    if old.exists() and not target.exists():
        os.rename(old, target)
    remove(old)
