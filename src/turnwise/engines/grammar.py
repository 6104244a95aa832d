"""What the text of a turn must match, as the ids that may come next. The only module that names a grammar library (llguidance).

A grammar is a text, ``kind:source``: ``json_schema:{...}``, ``regex:...``, ``lark:...`` (the library's own notation) or
``either:[...]``, alternatives of texts and grammars that follow each other. What it allows is a pure function of that text, of
the tokenizer and of the ids so far: a generator asks while it samples, and a learner asks again with the recorded ids.
Knows ids and texts; neither models nor requests.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.errors import GrammarError
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

MISSING = "response_format, regex and forced tools need the package llguidance; install it: pip install 'turnwise-rl[grammar]'"
# JSON as json.dumps and the chat templates write it. Free white space would be a second way to write every value, and a model
# that is not trained yet fills its budget with it
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
COMPILED = 256  # grammars that are kept compiled
MAX_SOURCE = 1 << 18  # characters of one


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise GrammarError(MISSING) from None


@functools.lru_cache(maxsize=4)
def _vocabulary(tokenizer: str, stop_ids: tuple[int, ...]) -> Any:
    """The library's view of a tokenizer: a tree of the bytes of all ids. It takes a second for 150,000 of them."""
    try:
        return _library().LLTokenizer(tokenizer, eos_token=list(stop_ids))
    except ValueError as fault:
        raise GrammarError(f"the tokenizer cannot follow a grammar: {fault}") from fault


def check_grammar(grammar: str) -> None:
    """Refuse a grammar that no tokenizer could follow, and a missing library, before a model is loaded."""
    faulty, messages = _library().LLMatcher.validate_grammar_with_warnings(_notation(grammar, {}))
    if faulty:
        raise GrammarError(f"this {grammar.partition(':')[0]} cannot be obeyed: {messages[0].strip()}")


def _notation(grammar: str, special: Mapping[str, int]) -> str:
    """A grammar as the library reads it. ``special``: ids of the special tokens."""
    kind, _, source = grammar.partition(":")
    if len(source) > MAX_SOURCE:
        raise GrammarError(f"a {kind} of {len(source):,} characters; write at most {MAX_SOURCE:,}")
    matcher = _library().LLMatcher
    readers = {
        "json_schema": lambda text: matcher.grammar_from_json_schema(text, JSON_FORM),
        "regex": matcher.grammar_from_regex,
        "lark": matcher.grammar_from_lark,
        "either": lambda text: matcher.grammar_from_lark(_alternatives(json.loads(text), special)),
    }
    if kind not in readers:
        raise GrammarError(f"a grammar is {grammar!r:.60}; write json_schema:, regex: or lark: and its text")
    try:
        return str(readers[kind](source))
    except ValueError as fault:
        raise GrammarError(f"this {kind} cannot be obeyed: {fault}") from None


def _alternatives(alternatives: Sequence[Sequence[Any]], special: Mapping[str, int]) -> str:
    """Alternatives in the library's notation. A special token in a text is that token: its letters are other ids."""
    at_special = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")

    def written(part: Any) -> str:
        if isinstance(part, str):
            pieces = [piece for piece in at_special.split(part) if piece] if special else [part] if part else []
            return " ".join(f"<[{special[x]}]>" if x in special else json.dumps(x) for x in pieces)
        ((kind, source),) = part.items()
        if kind == "json_schema":
            return f"%json {json.dumps({'x-guidance': JSON_FORM, **source})}"
        return "/" + re.sub(r"(?<!\\)/", r"\\/", source) + "/"

    rules = [" ".join(text for text in map(written, parts) if text) for parts in alternatives]
    names = [f"part{n}" for n in range(len(rules))]
    return "\n".join([f"start: {' | '.join(names)}", *(f"{name}: {rule}" for name, rule in zip(names, rules))])


class Grammars:
    """Grammars over the ids of one tokenizer. A text that is complete ends with one of ``stop_ids``."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        self.tokenizer, self.stop_ids = tokenizer, tuple(stop_ids)
        self._compiled = functools.lru_cache(maxsize=COMPILED)(self._compile)

    @functools.cached_property
    def _tokens(self) -> Any:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            name = type(self.tokenizer).__name__
            raise GrammarError(
                f"{name} has no fast form (tokenizer.json), which a grammar needs; take a model that has one"
            )
        if not self.stop_ids:
            raise GrammarError("a grammar needs an id that ends a turn; this generator has none")
        _library()
        plain = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
        return _vocabulary(json.dumps(plain), self.stop_ids)

    def _compile(self, grammar: str) -> Any:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {token.content: number for number, token in added.items() if token.special}
        compiled = _library().LLMatcher(self._tokens, _notation(grammar, special), log_level=0)
        if compiled.is_error():
            raise GrammarError(f"this {grammar.partition(':')[0]} cannot be obeyed: {compiled.get_error().strip()}")
        return compiled

    def start(self, grammar: str, ids: Sequence[int] = ()) -> GrammarState:
        """The state after ``ids``. Raises ``GrammarError`` where the grammar cannot be read, or does not allow them."""
        state = GrammarState(self._compiled(grammar).deep_copy(), self.stop_ids, (self._tokens.vocab_size + 31) // 32)
        if not all(map(state.read, ids)):
            raise GrammarError("the turn begins with ids that its grammar does not allow")
        return state

    def replay(self, grammar: str, begun: Sequence[int], tokens: Sequence[int]) -> list[bytes]:
        """The mask before each token, as ``core.kept_sets.MaskReplay``."""
        state, masks = self.start(grammar, begun), []
        for token in tokens:
            masks.append(state.mask().tobytes())
            state.read(token)
        return masks


def no_grammars(grammar: str, begun: Sequence[int], tokens: Sequence[int]) -> list[bytes]:
    """The replay of a learner without a tokenizer."""
    raise GrammarError(
        "these turns were sampled under a grammar; give the learner replay=Grammars(tokenizer, stop_ids).replay"
    )


class GrammarState:
    """How far the text of one turn is."""

    def __init__(self, matcher: Any, stop_ids: Sequence[int], words: int) -> None:
        self._matcher, self._stop_ids, self._words = matcher, stop_ids, words

    def read(self, token: int) -> bool:
        """Go on after a token; False where the grammar does not allow it. One that ends the turn ends the text."""
        return token in self._stop_ids or bool(self._matcher.consume_token(token))

    def mask(self) -> np.ndarray:
        """What may come next: a bit for every id, in words of 32."""
        row = np.zeros(self._words, np.int32)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if not row.any():  # a vocabulary without the bytes that must follow, or a text beyond the library's limits
            log.warning("a text ends before its grammar does: %s", self._matcher.get_error() or "no id continues it")
            for token in self._stop_ids:
                row.view(np.uint8)[token // 8] |= 1 << token % 8
        return row


class LaneMasks:
    """What the lanes of one batch may sample next; does nothing where no request has a grammar. ``vocabulary``: entries of a row
    of logits."""

    def __init__(self, lanes: Sequence[Any], vocabulary: int, device: torch.device) -> None:
        self._lanes = [(i, request) for i, request in enumerate(lanes) if request.grammar is not None]
        self._count, self._vocabulary, self._device = len(lanes), vocabulary, device

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def allowed(self) -> Tensor | None:
        """Which ids each lane may sample, [n, V]; lanes without a grammar, and those that have ended, any."""
        rows = [(i, request.grammar.mask()) for i, request in self._lanes if request.stop is None]
        if not rows:
            return None
        bits = np.unpackbits(np.stack([row for _, row in rows]).view(np.uint8), axis=1, bitorder="little")
        every = torch.ones(self._count, self._vocabulary, dtype=torch.bool)
        width = min(bits.shape[1], self._vocabulary)
        some = torch.zeros(len(rows), self._vocabulary, dtype=torch.bool)
        some[:, :width] = torch.from_numpy(bits[:, :width]).view(torch.bool)
        every[[i for i, _ in rows]] = some
        return every.to(self._device)

    def append(self, tokens: Sequence[int]) -> None:
        """Go on after the tokens [n] that were sampled."""
        for i, request in self._lanes:
            if request.stop is None:
                request.grammar.read(tokens[i])
