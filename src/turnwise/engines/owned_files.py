"""Names of temporary files and folders that say which process made them, and removal of those whose process is gone.

A name holds the machine beside the process: a folder may be shared by several machines or containers, and the number of a process
means nothing outside its own. Knows names; not what the files hold.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import socket
from pathlib import Path

BOOT, NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def owned_prefix(kind: str) -> str:
    """How names of this process begin."""
    return f"{kind}{_machine()}-{os.getpid()}-"


def remove_orphans(base: Path, kind: str) -> None:
    """Remove what processes of this machine left that were killed."""
    if not NAMESPACE.exists():  # nothing tells which processes exist
        return
    for path in base.glob(f"{kind}{_machine()}-*"):
        process = path.name.removeprefix(f"{kind}{_machine()}-").split("-")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@functools.cache
def _machine() -> str:
    """This machine since its last start, and this container of it."""
    facts = [socket.gethostname()]
    for read in (BOOT.read_text, lambda: os.readlink(NAMESPACE)):
        try:
            facts.append(read())
        except OSError:
            facts.append("")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
