"""Tokens of the servers on this machine: every start makes a new one, and processes of the same user find it by its port.

A file that no other user can read holds the token as long as the server runs. Knows no protocol.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
import urllib.parse
from pathlib import Path

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
STALE_SECONDS = 30 * 86_400.0  # after which the file of a server that was killed is removed
TOKEN_BYTES = 24


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def same_token(given: str, expected: str) -> bool:
    """Compared in the same time for every wrong token. An empty one is wrong, also where none is expected."""
    return bool(expected) and secrets.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def token_file(port: int) -> Path:
    """Where the token of the server on a port of this machine is. Machines may share a home folder, so their names are in it."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "turnwise" / "servers" / f"{socket.gethostname()}-{port}"


def write_token(port: int, token: str) -> Path | None:
    """Write the token of a server for the processes of this user; None where there is no place for it."""
    file = token_file(port)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in file.parent.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - old.stat().st_mtime > STALE_SECONDS:
                    old.unlink()
        # a new file, with its mode from the beginning: one that is there may be open elsewhere, or a link
        temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as out:
            out.write(token)
        temporary.replace(file)
    except (OSError, RuntimeError):  # no home folder, or one that cannot be written
        return None
    return file


def remove_token(port: int, token: str) -> None:
    """The server has ended. A file of another one that has the port now stays."""
    with contextlib.suppress(OSError, RuntimeError):
        if token_file(port).read_text(encoding="utf-8") == token:
            token_file(port).unlink()


def find_token(url: str) -> str:
    """The token of a server of ours on this machine, by its address; empty where there is none."""
    parts = urllib.parse.urlsplit(url)
    if (parts.hostname or "") not in LOOPBACK_NAMES:
        return ""  # a token is never sent to another machine, unless the user says so
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        return token_file(parts.port or 80).read_text(encoding="utf-8").strip()
    return ""
