"""JSON files that a run resumes from, with a digest of their content inside, so that a cut or edited one is noticed.

A file without its digest is refused like a changed one. Does not know what is in them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.core.text import clean
from turnwise.errors import StoreError
from turnwise.store.atomic import write_json

DIGEST = "sha256"
ADVICE = "restore the file from a copy, or start a new run"


def write_sealed(target: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically, with its digest."""
    plain = json.loads(clean(json.dumps(value, ensure_ascii=False, default=str)))  # as it will be read
    write_json(target, {**plain, DIGEST: _digest(plain)})


def read_sealed(path: Path) -> dict[str, Any]:
    """The content without its digest; raises :class:`StoreError` when it is cut off or was changed."""
    value = read_object(path)
    if value.pop(DIGEST, None) != _digest(value):
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


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
