"""Masks the observations of a rendered dialogue: template tokens keep their ids, message contents become a placeholder.

The masked ids have the same length, so no position shifts. Knows text and tokens; not what they are compared for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.errors import RenderError

PLACEHOLDER = "No information found."


def sentinels(count: int) -> list[str]:
    """Texts that no template writes or changes (they have no case), to be rendered in place of message contents."""
    return [f"9046173205{n}9046173205" for n in range(count)]


def content_spans(rendered: str, with_sentinels: str, contents: Sequence[str]) -> list[tuple[int, int]]:
    """The span [begin, end) of each content in a rendering. Located by a second rendering with ``sentinels`` in their place,
    so that text of the template itself is never taken for content."""
    spans: list[tuple[int, int]] = []
    at, remaining = 0, with_sentinels
    for n, (sentinel, text) in enumerate(zip(sentinels(len(contents)), contents)):
        before, hit, remaining = remaining.partition(sentinel)
        begin = at + len(before)
        if not hit or not rendered.startswith(before, at):
            break  # the template does not render the content verbatim
        follows = remaining.partition(sentinels(len(contents))[n + 1])[0] if n + 1 < len(contents) else remaining
        at = begin + len(text) if rendered.startswith(text + follows, begin) else rendered.find(follows, begin)
        if at < begin:
            break
        spans.append((begin, at))
    return spans


def mask_spans(tokenizer: Any, text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    """``ids`` of ``text`` with the placeholder in each span, truncated or with its last token repeated. A token that crosses the
    border of a span also belongs to the template and keeps its id."""
    if not getattr(tokenizer, "is_fast", False):
        raise RenderError("this tokenizer reports no token offsets; masking needs a fast tokenizer")
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(offsets) != len(ids):
        raise RenderError(
            "this tokenizer encodes a text differently when asked for token offsets; masking needs both alike"
        )
    filler = list(tokenizer.encode(PLACEHOLDER, add_special_tokens=False))
    out = list(ids)
    for begin, end in spans:
        inside = [i for i, (a, b) in enumerate(offsets) if begin <= a < end and begin < b <= end]
        for n, i in enumerate(inside):
            out[i] = filler[min(n, len(filler) - 1)]
    return out
