"""Laws of text: what is clean can be encoded, what is printable shows nothing but itself."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import turnwise
from turnwise.core.protocols import Action, ToolCall
from turnwise.core.text import MAX_DEPTH, clean, clean_tree, cut, printable, printable_line

ANY = st.text(st.characters(codec=None, categories=None), max_size=60)  # surrogates and control characters included
HOSTILE = "\ud800\x1b]0;title\x07\x1b[2J\x00\u202e\r\n# forged\x9b31m\u2028\U000e0041"
REORDERING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
TREES = st.recursive(
    ANY | st.none() | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY, inner, max_size=3),
    max_leaves=12,
)


@given(ANY)
def test_clean_text_is_valid_unicode(text: str) -> None:
    done = clean(text)
    assert done.encode().decode() == done
    assert clean(done) == done
    assert clean(text) == text or any("\ud800" <= c <= "\udfff" for c in text)


def test_surrogates() -> None:
    assert clean("a\ud800b") == "a\ufffdb"
    assert clean("\udc00\ud800") == "\ufffd\ufffd"
    assert clean("\ud83d\ude00!") == "😀!"  # two halves of one character
    assert clean("nul \0 stays") == "nul \0 stays"  # files, SQLite and tokenizers accept it


@given(TREES)
def test_clean_trees_can_be_written(value: object) -> None:
    done = clean_tree(value)
    json.dumps(done, ensure_ascii=False).encode()
    assert clean_tree(done) == done


def test_a_deep_tree_is_refused() -> None:
    deep: object = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert clean_tree(deep) == deep
    with pytest.raises(RecursionError, match="nested deeper than 64 levels"):
        clean_tree([deep])


@given(ANY)
def test_printed_text_has_no_control_character(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t"]
    assert not [c for c in shown if unicodedata.bidirectional(c) in REORDERING]
    assert printable(shown) == shown
    assert len(printable_line(text).splitlines()) <= 1


def test_hostile_text_is_shown_as_escapes() -> None:
    assert printable("\x1b[2J") == "\\x1b[2J"
    assert printable_line("a\n# b\tc") == "a\\n# b\\tc"
    assert printable_line("x" * 999) == "x" * 199 + "…"
    assert "\x1b" not in printable(HOSTILE) and "\u202e" not in printable(HOSTILE)
    assert printable("naïve 日本 👩‍💻 \t\n") == "naïve 日本 👩‍💻 \t\n"  # joiners and other scripts stay


def test_a_long_text_is_cut_with_a_note() -> None:
    assert cut("abc", 3) == "abc"
    assert cut("abcd", 3) == "abc\n[cut: 4 characters, the limit is 3]"


@given(ANY, TREES)
def test_an_action_holds_clean_text(text: str, value: object) -> None:
    action = Action(text, (ToolCall(text, {"a": value}, text),), (text,))
    call = action.calls[0]
    for part in (action.text, call.name, call.id, *action.faults, json.dumps(call.arguments, ensure_ascii=False)):
        part.encode()


def test_nothing_that_we_write_is_a_table_for_spreadsheets():
    """Text of a model in a cell that begins with = + - or @ would be a formula there. Who adds such an export must escape it."""
    source = Path(turnwise.__file__).parent
    text = {path.name: path.read_text(encoding="utf-8") for path in source.rglob("*.py")}
    assert len(text) > 300
    assert [name for name, code in text.items() if re.search(r"csv\.(writer|DictWriter)|to_csv|write_csv|text/csv", code)] == []
