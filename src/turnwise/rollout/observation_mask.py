"""A dialogue's latest words masked: the same ids as far as the chat template wrote them, a placeholder where somebody spoke.

The masked ids are exactly as many, so that no position shifts. Knows text and tokens; not what they are compared for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.errors import RenderError

PLACEHOLDER = "No information found."


def marks(count: int) -> list[str]:
    """Texts no template writes or changes (they have no case), to be rendered in place of what was said."""
    return [f"9046173205{n}9046173205" for n in range(count)]


def places(rendered: str, marked: str, said: Sequence[str]) -> list[tuple[int, int]]:
    """Where each text stands in a rendering, [begin, end); found by another one with ``marks`` in their place, so that a word
    the template itself writes is never taken for one that was said."""
    found: list[tuple[int, int]] = []
    at, rest = 0, marked
    for n, (mark, text) in enumerate(zip(marks(len(said)), said)):
        before, hit, rest = rest.partition(mark)
        begin = at + len(before)
        if not hit or not rendered.startswith(before, at):
            break  # the template shows something else than it was given
        follows = rest.partition(marks(len(said))[n + 1])[0] if n + 1 < len(said) else rest
        at = begin + len(text) if rendered.startswith(text + follows, begin) else rendered.find(follows, begin)
        if at < begin:
            break
        found.append((begin, at))
    return found


def masked(tokenizer: Any, text: str, ids: Sequence[int], where: Sequence[tuple[int, int]]) -> list[int]:
    """``ids`` of ``text`` with the placeholder in these places: cut short, or its last token repeated. A token that reaches
    beyond a place is the template's too, and stays."""
    if not getattr(tokenizer, "is_fast", False):
        raise RenderError("this tokenizer cannot tell which token stands where; masking needs a fast tokenizer")
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(offsets) != len(ids):
        raise RenderError("this tokenizer encodes a text differently when asked where its tokens stand")
    filler = list(tokenizer.encode(PLACEHOLDER, add_special_tokens=False))
    out = list(ids)
    for begin, end in where:
        inside = [i for i, (a, b) in enumerate(offsets) if begin <= a < end and begin < b <= end]
        for n, i in enumerate(inside):
            out[i] = filler[min(n, len(filler) - 1)]
    return out
