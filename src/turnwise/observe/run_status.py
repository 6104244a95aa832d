"""The file ``status.json`` of a run directory: written by the run about once a second, read by anybody. Knows no run.

It is replaced in one rename and never flushed to the disk: after a power failure nobody asks what the run was doing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATUS = "status.json"
STATUS_FORMAT = 1


def write_status(path: Path, status: Mapping[str, Any]) -> None:
    """Replace the file. A full disk or a removed folder is no reason to stop a run: nothing is written then."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(status) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read_status(path: Path) -> dict[str, Any] | None:
    """What the run wrote last; None if there is no such file, or one of another format."""
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return status if isinstance(status, dict) and status.get("format") == STATUS_FORMAT else None
