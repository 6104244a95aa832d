"""Scratch directories that untrusted code has filled: measured while a session runs, removed after it has ended.

The content may have any depth, number, name and mode, so nothing here recurses, builds long paths to delete, or raises: what
cannot be removed is left behind and reported. Knows directories only; the caller decides what too much is.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import stat
import struct
import time
from collections import deque
from collections.abc import Iterator

MAX_ENTRIES = 4096  # of one session, as many as its private file system has where there is one
SET_FLAGS = 0x40086602  # FS_IOC_SETFLAGS
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MOVED = ".removing-"  # prefix of nested directories that were moved to the top


def usage(path: str, max_bytes: int, max_entries: int = MAX_ENTRIES) -> tuple[int, int]:
    """Bytes and entries of a tree; stops above either limit. A tree that cannot be walked is infinitely large.

    The code that fills it may run meanwhile and put a link where a directory was: every step is from a descriptor to a name
    in it, and no link is followed. A descriptor is closed as soon as its last directory is entered, so a chain needs two.
    """
    size = entries = 0
    frames: list[
        tuple[int, list[str]]
    ] = []  # open directories, and those of their directories that are not entered yet
    try:
        handle = os.open(path, DIRECTORY)
    except OSError:
        return 0, 0  # it is gone
    try:
        device = os.fstat(handle).st_dev
        while handle >= 0:
            inner = list[str]()
            frames.append((handle, inner))
            with os.scandir(handle) as listing:
                for entry in listing:
                    entries += 1
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        facts = entry.stat(follow_symlinks=False)
                        # a file system may allocate late, and a sparse file may be filled later
                        size += max(facts.st_blocks * 512, facts.st_size)
                        if stat.S_ISDIR(facts.st_mode) and facts.st_dev == device:
                            inner.append(entry.name)
                    if size > max_bytes or entries > max_entries:
                        return size, entries
            handle = -1
            while frames and handle < 0:
                parent, names = frames[-1]
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it has become something else
                    handle = open_directory(parent, names.pop()) if names else -1
                if not names:
                    os.close(frames.pop()[0])
        return size, entries
    except OSError:  # a tree so deep and wide that it needs too many descriptors
        return max_bytes + 1, entries
    finally:
        for parent, _ in frames:
            os.close(parent)


def open_directory(parent: int, name: str) -> int:
    """A descriptor of a directory in another one, which its owner may have closed to himself; raises for anything else."""
    try:
        return os.open(name, DIRECTORY, dir_fd=parent)
    except PermissionError:
        unlock(parent, name)
        return os.open(name, DIRECTORY, dir_fd=parent)


def unlock(parent: int, name: str) -> None:
    """Let the owner of a directory do anything with it. Changes the directory that was opened, whatever has its name by then:
    ``chmod`` of a name follows a link that was swapped in."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)  # a descriptor of a path has no fchmod
    finally:
        os.close(handle)


def held_by(pid: int) -> float:
    """Bytes of files that a process holds and that have no name any more, so that no listing shows them. Infinite where that
    cannot be seen: another user's process, or a file that is only mapped, whose size the kernel tells nobody."""
    sizes: dict[tuple[int, int], int] = {}
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                facts = os.stat(f"/proc/{pid}/fd/{number}")
                if stat.S_ISREG(facts.st_mode) and not facts.st_nlink:
                    sizes[facts.st_dev, facts.st_ino] = max(facts.st_blocks * 512, facts.st_size)
        with open(f"/proc/{pid}/maps", "rb") as maps:
            # memory that is shared without a file has the name of a device
            gone = (line for line in maps if line.endswith(b" (deleted)\n"))
            mapped = any(line.split(maxsplit=5)[5] != b"/dev/zero (deleted)\n" for line in gone)
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has ended
    except OSError:
        return math.inf
    return math.inf if mapped else sum(sizes.values())


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
        top = os.open(base, DIRECTORY)
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
    try:
        handle = open_directory(top, name)
    except OSError:  # a file or a link, or gone
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=top)
        return
    try:
        with contextlib.suppress(OSError):  # entries can be removed only where the owner may write
            os.fchmod(handle, 0o700)
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


def _move(handle: int, name: str, top: int, target: str) -> bool:
    for attempt in (None, unlock, _clear_flags):
        with contextlib.suppress(OSError):
            if attempt:
                attempt(handle, name)  # a directory changes when its parent does
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
            facts = os.fstat(file)
            # not a second name of a file that is elsewhere, nor a device
            if stat.S_ISDIR(facts.st_mode) or (stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1):
                fcntl.ioctl(file, SET_FLAGS, struct.pack("l", 0))
        finally:
            os.close(file)
