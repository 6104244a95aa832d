"""Atomic writes: a file or directory appears complete under its final name, or not at all.

Writes go to a temporary path beside the target, which is fsynced and then renamed. JSON files that a run resumes from are also
sealed: they hold a digest of their content, and one that was cut, edited or lacks its digest is refused.
Does not know what is written, nor who reads it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
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
DIGEST = "sha256"
ADVICE = "restore the file from a copy, or start a new run"


@contextlib.contextmanager
def atomic_write(target: Path, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside ``target`` (create a file or a directory there); rename it to ``target`` at the end.

    ``replace=False`` fails when ``target`` has been created meanwhile. When the block raises, ``target`` is unchanged
    and the temporary path is removed. A kill leaves at most a dot-file, which the next write to the same target (or
    :func:`remove_temporaries`) removes.
    """
    backup, temporary = target.parent / f".{target.name}.old", target.parent / f".{target.name}.{os.getpid()}.tmp"
    with explain_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if replace:
            # a kill between the two renames below leaves the backup alone: it is the last complete version
            if backup.exists() and not target.exists():
                os.rename(backup, target)
            remove(backup)
            remove_temporaries(target.parent, target.name)
    try:
        with explain_write_errors(target):
            yield temporary
            _fsync_tree(temporary)
            if replace and target.is_dir():  # no system call replaces a directory: rename the old one first
                os.rename(target, backup)
                os.rename(temporary, target)
                remove(backup)
            elif replace:
                os.replace(temporary, target)
            else:
                os.rename(temporary, target)  # fails when the target is a non-empty directory
            # the new name survives a power failure only once its directory is on the disk
            fsync(target.parent)
    finally:
        remove(temporary)


@contextlib.contextmanager
def explain_write_errors(target: Path) -> Iterator[None]:
    """Re-raise errors of the file system and of safetensors as :class:`StoreError`, with what the user can do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number, text = getattr(error, "errno", None), str(error)
        # safetensors writes from Rust: it reports a full disk as text, not as an OSError
        if number in DISK_FULL or "No space left" in text or "StorageFull" in text:
            message = (
                f"no space left on the disk while writing {target}; the previous version is unchanged. "
                "Free some space (or keep fewer checkpoints) and resume the run"
            )
        elif number in TARGET_EXISTS and target.exists():
            message = f"{target} already exists and will not be overwritten; choose another name"
        else:
            message = f"could not write {target}: {error}"
        raise StoreError(message) from error


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


def _fsync_tree(path: Path) -> None:
    if path.is_dir():
        for child in path.iterdir():
            _fsync_tree(child)
    fsync(path)


def write_sealed(target: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically, with its digest."""
    # the digest is that of the text as it will be read: JSON has no tuples, and no half characters
    plain = json.loads(clean(json.dumps(value, ensure_ascii=False, default=str)))
    write_json(target, {**plain, DIGEST: content_digest(plain)})


def read_sealed(path: Path) -> dict[str, Any]:
    """The content without its digest; raises :class:`StoreError` when it is cut off or was changed."""
    value = read_object(path)
    if value.pop(DIGEST, None) != content_digest(value):
        raise StoreError(f"{path} was changed after it was written; {ADVICE}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file without a digest; raises :class:`StoreError` when it is cut off."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path} is cut off or no JSON ({error}); {ADVICE}") from error


def check_digest(path: Path, recorded: str | None, actual: str | None) -> None:
    """Compare a digest that a checkpoint holds with that of the file now. None: there is nothing to compare. A ledger that lost
    its last seal in a power failure has none; it is rolled back further instead."""
    if recorded is not None and actual is not None and recorded != actual:
        raise StoreError(f"{path} is not the file that belongs to the last checkpoint; {ADVICE}")


def content_digest(value: Mapping[str, Any]) -> str:
    """A digest of a value as JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
