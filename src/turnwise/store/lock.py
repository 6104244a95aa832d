"""One writer per run: a lock that dies with its process.

Does not know what it guards. A record lock is used and not ``flock``: a child forked by the writer must not keep the
run locked after the writer was killed. Such locks do not see a second opener in the *same* process, hence the registry.
"""

from __future__ import annotations

import os
from pathlib import Path

from turnwise.errors import StoreError

try:
    import fcntl
except ImportError:  # not on POSIX: only a second opener in the same process is noticed
    fcntl = None  # type: ignore[assignment]

_held: set[str] = set()


class Lock:
    def __init__(self, path: Path) -> None:
        self._name = os.path.realpath(path)
        if self._name in _held:
            raise _busy(path, os.getpid())
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(f"the run in {path.parent} cannot be written to: {error}") from error
        if fcntl is not None:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.read(self._descriptor, 32).decode("ascii", "replace").strip()
                os.close(self._descriptor)
                raise _busy(path, owner or "unknown") from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        _held.add(self._name)

    def release(self) -> None:
        """Idempotent. The file stays: removing it would let two processes lock two different files of one name."""
        if self._name in _held:
            _held.discard(self._name)
            os.close(self._descriptor)


def _busy(path: Path, owner: int | str) -> StoreError:
    return StoreError(
        f"the run in {path.parent} is in use by process {owner}; wait for it to end, stop it, or use another run name"
    )
