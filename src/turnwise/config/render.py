"""Settings as a config file in YAML: each with its help as a comment and where its value came from. Reads nothing."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from turnwise.config.files import BOOLEANS, NULLS
from turnwise.config.settings import Settings

PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./+-]*(:[A-Za-z0-9_./+-]+)?")  # text that YAML reads as itself
WIDTH = 110


def render_config(settings: Settings, origins: Mapping[str, str] | None = None, title: str = "") -> str:
    """YAML that ``read_config`` reads back to the same settings. ``origins``: where a value came from, by setting."""
    lines = [f"# {title}", ""] if title else []
    for f in fields(settings):
        value, origin = getattr(settings, f.name), (origins or {}).get(f.name, "default")
        if isinstance(value, dict) and not value:
            continue
        comment = f"{f.metadata['help']} [{origin}]" if origins is not None else f.metadata["help"]
        lines += [f"# {line}" for line in textwrap.wrap(" ".join(comment.split()), WIDTH)]
        if isinstance(value, dict):
            lines += [f"{f.name}:", *(f"  {scalar(key)}: {scalar(item)}" for key, item in value.items())]
        else:
            lines.append(f"{f.name}: {scalar(value)}")
    return "\n".join(lines) + "\n"


def scalar(value: Any) -> str:
    """A value on one line of YAML."""
    if isinstance(value, str):
        return (
            value
            if PLAIN.fullmatch(value) and value not in {*NULLS, *BOOLEANS} and not _number(value)
            else quoted(value)
        )
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(scalar, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{scalar(str(key))}: {scalar(item)}' for key, item in value.items())}}}"
    return repr(value)


def quoted(text: str) -> str:
    """Double-quoted YAML. JSON's escapes are YAML's, except that a character beyond 16 bits has one escape, not two."""
    return "".join(_escaped(c) for c in json.dumps(text, ensure_ascii=False))


def _escaped(character: str) -> str:
    code = ord(character)
    if 0x20 <= code < 0x7F:
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
