"""What text may be. Every text that is stored, rendered, tokenized or printed passes through here, where it enters or leaves.

Text that comes in (a model's turn, an environment's message, a row of a data file) is ``clean``: valid Unicode, so that
every file, database and tokenizer accepts it. Text that goes out to people is ``printable``: it cannot move a cursor,
change a terminal's title, reverse the reading order or add a line to a report. Knows no message, file or console.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MAX_CHARACTERS = 2_000_000  # of one message of an environment: longer than any context window
MAX_DEPTH = 64  # of nested lists and dicts: what one recursive function can copy, so can every other

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# controls except tab and newline, line separators, marks that reorder or hide text (bidi, tags, zero-width spaces)
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e0fff]"
)
_BREAK = re.compile(r"[\t\n]")


def clean(text: str) -> str:
    """Valid Unicode: two surrogates that form a pair become their character, a lone one becomes U+FFFD."""
    if text.isascii() or not _LONE_SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def clean_tree(value: Any, depth: int = MAX_DEPTH) -> Any:
    """A value of dicts, lists and tuples with all its texts clean. Raises ``RecursionError`` where it is nested deeper than
    ``depth``, as the JSON reader does for its own limit."""
    if isinstance(value, str):
        return clean(value)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth <= 0:
        raise RecursionError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        return {clean_tree(key, depth - 1): clean_tree(item, depth - 1) for key, item in value.items()}
    items = [clean_tree(item, depth - 1) for item in value]
    return items if isinstance(value, list) else tuple(items)


def cut(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The first ``limit`` characters, with a note where some are missing."""
    return text if len(text) <= limit else f"{text[:limit]}\n[cut: {len(text)} characters, the limit is {limit}]"


def printable(text: object) -> str:
    """For terminals and Markdown: newlines and tabs stay, other control and invisible characters are written as escapes."""
    return _UNPRINTABLE.sub(_escape, str(text))


def printable_line(text: object, limit: int = 200) -> str:
    """The same on one line, for names and titles."""
    line = _BREAK.sub(_escape, printable(text))
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    short = {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r"}.get(number)
    return short or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")
