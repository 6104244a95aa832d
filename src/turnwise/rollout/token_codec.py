"""Token ids to text and back. In a byte-level vocabulary each id stands for some bytes, so decoding is a join over a table:
five times faster than the tokenizer, which matters in a step of five hundred episodes. Environments send the same texts to
many episodes, so the ids of recent texts are cached.

Knows tokenizers; neither templates nor dialogues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], tuple[int, ...]]
CACHED_TEXTS = 4096
LONG_TEXT = 16_384  # characters; about ten milliseconds
PROBES = 64  # runs of ids on which a byte table must agree with its tokenizer before it is used


def fast_decoder(tokenizer: Any) -> Decode:
    """The tokenizer's decoding with special tokens, by the fastest way that returns the same texts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    # the call that ``tokenizer.decode`` ends in, without its check of every id
    stock = lambda ids: backend.decode(list(ids), skip_special_tokens=False)  # noqa: E731
    if type(backend.decoder).__name__ != "ByteLevel":
        return stock
    by_table, size = _ByteTable(backend.id_to_token), backend.get_vocab_size()
    probes = ([(k * PROBES + j) * 7919 % size for j in range(PROBES)] for k in range(PROBES))
    return by_table if all(by_table(ids) == stock(ids) for ids in probes) else stock


def fast_encoder(tokenizer: Any) -> Encode:
    """The tokenizer's encoding, without the special tokens it adds by itself."""
    backend = getattr(tokenizer, "backend_tokenizer", None)

    @lru_cache(CACHED_TEXTS)
    def encode(text: str) -> tuple[int, ...]:
        # ``tokenizer.encode`` first resets truncation and padding, and encodes a batch of one
        if backend is None or backend.truncation or backend.padding or tokenizer.split_special_tokens:
            return tuple(tokenizer.encode(text, add_special_tokens=False))
        if len(text) > LONG_TEXT:  # of a batch, other threads go on meanwhile: ``encode`` holds the interpreter's lock
            return tuple(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return tuple(backend.encode(text, add_special_tokens=False).ids)

    probe = "a 1\nb <|c|> é  d"
    if backend is not None and list(encode(probe)) != list(tokenizer.encode(probe, add_special_tokens=False)):
        return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))
    return encode


class _ByteTable:
    """The bytes of each id, filled at first use. Ids outside the vocabulary decode to nothing, as in the tokenizer."""

    def __init__(self, token_of: Callable[[int], str | None]) -> None:
        self.token_of = token_of
        self.table: list[bytes | None] = []

    def __call__(self, ids: Sequence[int]) -> str:
        try:  # a list rather than a dict, in one call: lookups in a large dict miss the cache
            data = b"".join(itemgetter(*ids)(self.table))
        except (TypeError, IndexError):  # an id that is not in the table yet, or fewer than two ids
            data = b"".join(map(self._lookup, ids))
        return data.decode("utf-8", "replace")

    def _lookup(self, token_id: int) -> bytes:
        self.table += [None] * (token_id + 1 - len(self.table))
        entry = self.table[token_id]
        if entry is None:
            token = self.token_of(token_id) or ""
            values = [BYTES.get(letter) for letter in token]
            entry = token.encode() if None in values else bytes(b for b in values if b is not None)
            self.table[token_id] = entry
        return entry


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level vocabularies write bytes: printable ones stand for themselves, the others are written as
    the letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(hidden)}


BYTES = _byte_letters()
