"""The text of single tokens, by the tokenizer that a run stored with its first model; ids where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from turnwise.core.text import printable


@lru_cache(maxsize=8)
def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def token_texts(run: Path, ids: Sequence[int]) -> list[str]:
    """One text for each id. Bytes of a split character show as U+FFFD; invisible characters as escapes; a newline as ↵."""
    path = run / "initial" / "tokenizer.json"
    if not path.is_file():
        return [f"[{number}]" for number in ids]
    tokenizer = _tokenizer(path)
    texts = {number: tokenizer.decode([number], skip_special_tokens=False) for number in set(ids)}
    return [printable(texts[number]).replace("\n", "↵\n") or f"[{number}]" for number in ids]
