"""Atomic writes: a file or directory appears complete under its final name, or not at all.

Writes go to a temporary path beside the target, which is fsynced and then renamed.
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

from turnwise.core.text import clean
from turnwise.errors import StoreError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
TARGET_EXISTS = (errno.EEXIST, errno.ENOTEMPTY)


@contextlib.contextmanager
def atomic_write(target: Path, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside ``target`` (create a file or a directory there); rename it to ``target`` at the end.

    ``replace=False`` fails when ``target`` has been created meanwhile. When the block raises, ``target`` is unchanged
    and the temporary path is removed. A kill leaves at most a dot-file, which the next write to the same target (or
    :func:`remove_temporaries`) removes.
    """
    with explain_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if replace:
            _finish_interrupted_replace(target)
            remove_temporaries(target.parent, target.name)
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    try:
        with explain_write_errors(target):
            yield temporary
            _fsync_tree(temporary)
            if replace:
                _replace(temporary, target)
            else:
                _rename_to_new(temporary, target)
            fsync(target.parent)
    finally:
        remove(temporary)


@contextlib.contextmanager
def explain_write_errors(target: Path) -> Iterator[None]:
    """Re-raise errors of the file system and of safetensors as :class:`StoreError`, with what the user can do."""
    try:
        yield
    except OSError as error:
        raise _store_error(target, error, error.errno in DISK_FULL) from error
    except SafetensorError as error:
        # safetensors writes from Rust: it reports a full disk as text, not as an OSError
        raise _store_error(target, error, "No space left" in str(error) or "StorageFull" in str(error)) from error


def write_json(target: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    with atomic_write(target) as path:
        path.write_text(clean(json.dumps(value, indent=2, ensure_ascii=False, default=str)) + "\n", encoding="utf-8")


def remove_temporaries(directory: Path, name: str = "*") -> None:
    """Remove the temporary paths of killed writers. Only the single writer of a run may call this."""
    for path in directory.glob(f".{name}.*.tmp"):
        remove(path)


def remove(path: Path) -> None:
    """Remove a file or a directory tree; a missing one is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Force a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _store_error(target: Path, error: Exception, disk_full: bool) -> StoreError:
    if disk_full:
        return StoreError(
            f"no space left on the disk while writing {target}; the previous version is unchanged. "
            "Free some space (or keep fewer checkpoints) and resume the run"
        )
    return StoreError(f"could not write {target}: {error}")


def _fsync_tree(path: Path) -> None:
    if path.is_dir():
        for child in path.iterdir():
            _fsync_tree(child)
    fsync(path)


def _backup(target: Path) -> Path:
    return target.parent / f".{target.name}.old"


def _replace(temporary: Path, target: Path) -> None:
    """Replace a file in one system call. A directory cannot be replaced so: rename the old one to a backup first."""
    if not target.is_dir():
        os.replace(temporary, target)
        return
    os.rename(target, _backup(target))
    os.rename(temporary, target)
    remove(_backup(target))


def _rename_to_new(temporary: Path, target: Path) -> None:
    try:
        os.rename(temporary, target)  # fails when the target is a non-empty directory
    except OSError as error:
        if error.errno in TARGET_EXISTS:
            raise StoreError(f"{target} already exists and will not be overwritten; choose another name") from error
        raise


def _finish_interrupted_replace(target: Path) -> None:
    """Restore the backup after a kill between the two renames of :func:`_replace`."""
    backup = _backup(target)
    if backup.exists() and not target.exists():
        os.rename(backup, target)
    remove(backup)
