"""Explains errors of a machine that ran out of something, or of a folder that cannot be written: one line, no traceback."""

from __future__ import annotations

import errno
from collections.abc import Iterator

REASONS = {
    errno.ENOSPC: "no space left on the disk: free some, or write --keep-checkpoints 1",
    errno.EDQUOT: "the disk quota is used up: free some space, or write --keep-checkpoints 1",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n 4096), or write a smaller --groups or --slots",
    errno.ENFILE: "the machine has too many open files; end other programs",
    errno.ENOMEM: "no memory left: write a smaller --micro-batch-tokens, --slots, --groups or model",
    errno.EBADF: "an open file, perhaps the standard output, was closed from elsewhere: an environment, a reward or a library "
    "must not close descriptors that it did not open",
    errno.EROFS: "the file system cannot be written to: write --out another folder",
    errno.EACCES: "permission denied: write --out a folder of your own, or change its permissions",
    errno.EPERM: "not permitted: write --out a folder of your own, or change its permissions",
}
NO_MEMORY = ("can't allocate memory", "not enough memory", "cannot allocate memory", "out of memory", "bad_alloc")
NO_LIBRARY = ("failed to map segment", "cannot open shared object", "cannot allocate")
NO_THREAD = "can't start new thread"


def explain(error: BaseException) -> str:
    """What ran out, and what to write instead; empty for an error of another kind."""
    return next(filter(None, map(_explain_one, _chain(error))), "")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _explain_one(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.errno in REASONS:
        where = f" ({error.filename})" if error.filename else ""
        return REASONS[error.errno] + where
    if isinstance(error, MemoryError) or any(words in text.lower() for words in NO_MEMORY):
        return REASONS[errno.ENOMEM]
    if isinstance(error, ImportError) and any(words in text for words in NO_LIBRARY):
        return (
            f"no memory left for a library ({text.splitlines()[0]}); raise the limit of the address space (ulimit -v)"
        )
    if isinstance(error, RuntimeError) and NO_THREAD in text:
        return "no more threads: raise the limits of processes and memory (ulimit -u, ulimit -v), or write --threads 1"
    return ""
