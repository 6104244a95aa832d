"""What ids spell, and the ids of a text. In a byte-level vocabulary each id stands for some bytes, so a text is a join over a
table: five times faster than asking the tokenizer, which a step with half a thousand episodes feels. Environments repeat
themselves (siblings ask alike), so the ids of the latest texts are remembered.

Knows tokenizers; neither templates nor dialogues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], tuple[int, ...]]
REMEMBERED = 4096  # texts
SAMPLES = 64  # runs of ids on which a table must agree with its tokenizer before it is believed


def decoder(tokenizer: Any) -> Decode:
    """The tokenizer's decoding with special tokens, by the fastest way that gives the same texts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    # what ``tokenizer.decode`` comes to, which first looks a list through number by number
    stock = lambda ids: backend.decode(list(ids), skip_special_tokens=False)  # noqa: E731
    if type(backend.decoder).__name__ != "ByteLevel":
        return stock
    quick, size = _Spelled(backend.id_to_token), backend.get_vocab_size()
    samples = ([(k * SAMPLES + j) * 7919 % size for j in range(SAMPLES)] for k in range(SAMPLES))
    return quick if all(quick(ids) == stock(ids) for ids in samples) else stock


def encoder(tokenizer: Any) -> Encode:
    """The tokenizer's encoding, without special tokens of its own."""
    backend = getattr(tokenizer, "backend_tokenizer", None)

    @lru_cache(REMEMBERED)
    def encode(text: str) -> tuple[int, ...]:
        # ``tokenizer.encode`` first sets what others may have set otherwise, and asks for a batch of one
        if backend is None or backend.truncation or backend.padding or tokenizer.split_special_tokens:
            return tuple(tokenizer.encode(text, add_special_tokens=False))
        return tuple(backend.encode(text, add_special_tokens=False).ids)

    probe = "a 1\nb <|c|> é  d"
    if backend is not None and list(encode(probe)) != list(tokenizer.encode(probe, add_special_tokens=False)):
        return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))
    return encode


class _Spelled:
    """The bytes of each id in a list, found when it is first met. Ids nobody has are silent, as in the tokenizer."""

    def __init__(self, token_of: Callable[[int], str | None]) -> None:
        self.token_of = token_of
        self.table: list[bytes | None] = []

    def __call__(self, ids: Sequence[int]) -> str:
        try:  # a list, not a dict, and all at once: a large vocabulary lies all over the memory
            said = b"".join(itemgetter(*ids)(self.table))
        except (TypeError, IndexError):  # some are met for the first time; or there are fewer than two
            said = b"".join(map(self._met, ids))
        return said.decode("utf-8", "replace")

    def _met(self, one: int) -> bytes:
        self.table += [None] * (one + 1 - len(self.table))
        known = self.table[one]
        if known is None:
            token = self.token_of(one) or ""
            found = [BYTES.get(letter) for letter in token]
            known = token.encode() if None in found else bytes(b for b in found if b is not None)
            self.table[one] = known
        return known


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level vocabularies write bytes: those that can be seen stand for themselves, the others for the
    letters from U+0100 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [b for b in range(256) if b not in seen]
    return {chr(b): b for b in seen} | {chr(0x100 + n): b for n, b in enumerate(hidden)}


BYTES = _byte_letters()
