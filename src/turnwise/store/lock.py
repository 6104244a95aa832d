"""A lock that allows one writing process per run and that the kernel releases when the process dies.

Uses a POSIX record lock and not ``flock``: a child forked by the writer inherits an ``flock`` and would keep the run
locked after the writer is killed. Record locks do not exclude a second opener in the *same* process, hence the
registry ``_held``. The file holds the process id while the lock is held and is emptied on release: an id in an unlocked
file is that of a process that died without releasing. Does not know what it guards.
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

from turnwise.errors import StoreError

try:
    import fcntl
except ImportError:  # not POSIX: only a second opener in the same process is detected
    fcntl = None  # type: ignore[assignment]

_held: set[str] = set()
FLOCK = {"linux": ("hhqqi", 0), "darwin": ("qqihh", 3)}  # struct flock of the system, and where its l_type is


class ProcessLock:
    """Acquired on construction; raises :class:`StoreError` with the holder's process id when the lock is taken.

    ``left_by``: the id of the last holder if it died without releasing, else empty."""

    def __init__(self, path: Path) -> None:
        self._name = os.path.realpath(path)
        if self._name in _held:
            raise _in_use(path, os.getpid())
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(f"the run in {path.parent} cannot be written to: {error}") from error
        if fcntl is not None:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.read(self._descriptor, 32).decode("ascii", "replace").strip()
                os.close(self._descriptor)
                raise _in_use(path, holder or "unknown") from error
        self.left_by = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
        self._process = os.getpid()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{self._process}\n".encode(), 0)
        _held.add(self._name)

    def release(self) -> None:
        """Idempotent. Keeps the file: removing it would let two processes lock two different files of one name."""
        if self._name in _held and self._process == os.getpid():  # a forked child holds nothing
            _held.discard(self._name)
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)

    def __enter__(self) -> ProcessLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_holder(path: Path) -> tuple[int, bool]:
    """The process that a lock file names, and whether it holds the lock; (0, False) where it was released.

    Takes no lock: a process that starts in this moment is not refused. In the holder's own process the file is not opened,
    because closing it would release the lock."""
    if os.path.realpath(path) in _held:
        return os.getpid(), True
    try:
        with path.open("rb") as file:
            text = file.read(32).decode("ascii", "replace").strip()
            locked = _is_locked(file.fileno())
    except OSError:
        return 0, False
    process = int(text) if text.isdigit() else 0
    if process and locked is None:  # the system does not tell: a living process of this number may hold it
        try:
            os.kill(process, 0)
        except OSError as error:
            return process, not isinstance(error, ProcessLookupError)
    return process, bool(process) and locked is not False


def _is_locked(descriptor: int) -> bool | None:
    """Whether another process has locked a file; None where the system does not tell."""
    if fcntl is None or sys.platform not in FLOCK:
        return None
    form, kind = FLOCK[sys.platform]
    request = [0] * len(form)
    request[kind] = fcntl.F_WRLCK
    try:  # F_GETLK asks who would be in the way, and takes nothing
        reply = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(form, *request))
    except OSError:
        return None
    return struct.unpack(form, reply)[kind] != fcntl.F_UNLCK


def _in_use(path: Path, holder: int | str) -> StoreError:
    return StoreError(
        f"the run in {path.parent} is in use by process {holder}; wait for it to end, stop it, or use another run name"
    )
