"""Scratch directories that untrusted code has filled: measured while a session runs, removed after it has ended.

The content may have any depth, number, name and mode, so nothing here recurses, builds long paths to delete, or raises: what
cannot be removed is left behind and reported. Knows directories only; the caller decides what too much is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import time
from collections import deque
from collections.abc import Iterator

MAX_ENTRIES = 4096  # of one session, as many as its private file system has where there is one
SET_FLAGS = 0x40086602  # FS_IOC_SETFLAGS
MOVED = ".removing-"  # prefix of nested directories that were moved to the top


def used(path: str, max_bytes: int, max_entries: int = MAX_ENTRIES) -> bool:
    """Whether a tree holds more than this. Directories whose path is too long for the kernel count as too much."""
    total, entries, waiting = 0, 0, [path]
    while waiting:
        try:
            for entry in _listing(waiting.pop()):
                entries += 1
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                if total > max_bytes or entries > max_entries:
                    return True
        except FileNotFoundError:
            continue
        except OSError:  # the path is too long, or the directory cannot be opened even by its owner
            return True
    return False


def _listing(path: str) -> Iterator[os.DirEntry[str]]:
    try:
        listing = os.scandir(path)
    except PermissionError:
        os.chmod(path, 0o700)
        listing = os.scandir(path)
    with listing:
        yield from listing


def held_by(pid: int) -> int:
    """Bytes of files that a process has open and that have no name any more, so that no listing shows them."""
    sizes: dict[tuple[int, int], int] = {}
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                facts = os.stat(f"/proc/{pid}/fd/{number}")
                if stat.S_ISREG(facts.st_mode) and not facts.st_nlink:
                    sizes[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return sum(sizes.values())


# ------------------------------------------------------------------ removal


class Trash:
    """Directories to remove from one base directory, a slice of time at a time."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._names: deque[str] = deque()
        self._work: Iterator[None] | None = None

    def add(self, name: str) -> None:
        self._names.append(name)

    @property
    def pending(self) -> bool:
        return self._work is not None or bool(self._names)

    def work(self, seconds: float) -> bool:
        """Remove for at most this long; True when nothing is left to do."""
        deadline = time.monotonic() + seconds
        while self.pending:
            self._work = self._work or _removals(self._base, self._names.popleft())
            for _ in self._work:
                if time.monotonic() > deadline:
                    return False
            self._work = None
        return True


def remove_tree(path: str, seconds: float = 10.0) -> bool:
    """Remove a directory; False when something is left. Never raises."""
    trash = Trash(os.path.dirname(path))
    trash.add(os.path.basename(path))
    return trash.work(seconds) and not os.path.lexists(path)


def _removals(base: str, name: str) -> Iterator[None]:
    """Remove ``base/name``, yielding after every entry.

    A directory inside it is first moved to the base under a short name. So no path grows with the depth of the tree, and
    two descriptors are enough.
    """
    try:
        top = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        waiting, moved = [name], 0
        while waiting:
            directory = waiting.pop()
            for entry in _entries(top, directory):
                if entry is None:
                    yield
                    continue
                handle, inner = entry
                moved += 1
                target = f"{MOVED}{name}-{moved}"
                if _move(handle, inner, top, target):
                    waiting.append(target)
                yield
            with contextlib.suppress(OSError):
                os.rmdir(directory, dir_fd=top)
    finally:
        os.close(top)


def _entries(top: int, name: str) -> Iterator[tuple[int, str] | None]:
    """Unlink the files of a directory (None for each); yield its directories with its descriptor."""
    handle = _open(top, name)
    if handle < 0:
        with contextlib.suppress(OSError):  # a file or a link, or gone
            os.unlink(name, dir_fd=top)
        return
    try:
        while True:  # the order of a listing may change while entries are removed: list again until nothing is removed
            removed = 0
            with os.scandir(handle) as listing:
                for entry in listing:
                    if entry.is_dir(follow_symlinks=False):
                        yield handle, entry.name
                        try:
                            os.stat(entry.name, dir_fd=handle, follow_symlinks=False)
                        except OSError:  # the caller has moved it
                            removed += 1
                    else:
                        removed += _unlink(entry.name, handle)
                        yield None
            if not removed:
                return
    except OSError:
        return
    finally:
        os.close(handle)


def _open(top: int, name: str) -> int:
    """A descriptor of a directory that its owner may have made inaccessible; -1 if it is none."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
            with contextlib.suppress(OSError):
                os.chmod(name, 0o700, dir_fd=top)
            return os.open(name, flags, dir_fd=top)
    return -1


def _move(handle: int, name: str, top: int, target: str) -> bool:
    for attempt in (None, "chmod", "flags"):
        with contextlib.suppress(OSError):
            if attempt == "chmod":
                os.chmod(name, 0o700, dir_fd=handle)  # a directory changes when its parent does
            elif attempt == "flags":
                _clear_flags(handle, name)
            os.rename(name, target, src_dir_fd=handle, dst_dir_fd=top)
            return True
    return False


def _unlink(name: str, handle: int) -> bool:
    for attempt in range(2):
        try:
            os.unlink(name, dir_fd=handle)
            return True
        except FileNotFoundError:
            return False
        except OSError:
            if not attempt:
                _clear_flags(handle, name)
    return False


def _clear_flags(handle: int, name: str) -> None:
    """Make an immutable or append-only entry removable, where we may."""
    with contextlib.suppress(OSError):
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=handle)
        try:
            fcntl.ioctl(file, SET_FLAGS, struct.pack("l", 0))
        finally:
            os.close(file)
