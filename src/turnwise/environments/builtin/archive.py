"""Archive: a list that is read page by page and is longer than the context; its two marked names are asked for at the end.

The policy edits its own context: ``keep`` replaces all pages read so far by notes in its own words, ``drop`` forgets the oldest
pages. Without edits the context overflows, and the episode has failed. ``editing=false`` offers no tools: then only the setting
``history``, a fixed window, makes room. The reward is the share of the marked names that the answer gives, in any order. Does
not know how long the context is.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.core.records import Message
from turnwise.environments import base
from turnwise.environments.base import LimitedEpisode

EDITING_TOOLS = (
    base.tool_schema("keep", "forget everything but the task and these notes", notes="string"),
    base.tool_schema("drop", "forget the oldest turns", turns="integer"),
)


class EditRefused(Exception):
    """An edit that cannot be made; the words are the tool's reply."""


@dataclass
class ContextEditor:
    """What the policy reads: the task, its notes, and the exchanges since."""

    task: list[Message]
    max_notes: int = 400  # characters
    notes: str = ""
    exchanges: list[list[Message]] = field(default_factory=list)  # each a turn and the reply to it

    def record(self, action: Action, reply: Sequence[Message]) -> None:
        """Add an exchange that is no edit."""
        self.exchanges.append([action.message, *reply])

    @property
    def context(self) -> list[Message]:
        """The messages that an edit leaves."""
        notes = [base.user_message(f"notes: {self.notes}")] if self.notes else []
        return [*self.task, *notes, *(message for exchange in self.exchanges for message in exchange)]

    def apply(self, call: ToolCall) -> list[Message]:
        """Make the edit of a call; the new context, to which the environment adds its reply."""
        notes, turns = call.arguments.get("notes"), call.arguments.get("turns")
        if call.name == "keep":
            if not isinstance(notes, str) or not notes.strip() or len(notes) > self.max_notes:
                raise EditRefused(f"error: notes must be a text of at most {self.max_notes} characters")
            self.notes, self.exchanges = " ".join(notes.split()), []
        elif call.name == "drop":
            if not isinstance(turns, int) or isinstance(turns, bool) or not 1 <= turns <= len(self.exchanges):
                raise EditRefused(f"error: turns must be a number from 1 to {len(self.exchanges)}")
            self.exchanges = self.exchanges[turns:]
        else:
            raise EditRefused(f"error: no tool {call.name[:40]}")
        return self.context


PAGES = {1: 4, 2: 6, 3: 8}  # by difficulty
ENTRIES = 2  # on a page
MARKED = 2  # names
CONSONANTS, VOWELS = "bdfgklmprstvz", "aeiou"
NAMES = tuple(f"{a}{b}{c}" for a in CONSONANTS for b in VOWELS for c in CONSONANTS)[7::40]
MARK = "*"
NAME = rf"[{CONSONANTS}][{VOWELS}][{CONSONANTS}]"
SYMBOLS = rf"\b{NAME}\b|[*]"
MAX_NOTES = 12  # characters: room for the marked names, not for more
SPARE_TURNS = 3
PAGES_KEPT = 1  # that the oracle lets stand before it tidies up
SPOILT = 0.15  # of the demonstrator's edits
ANSWER = re.compile(rf"answer: *({NAME}), *({NAME})[ .]*$")
HELP = "say next, call keep, or say answer: NAME, NAME"


@dataclass(frozen=True)
class Register:
    """The pages of one task, and its marked names in their order: ``Register((("bab", "dig"), ...), ("dig", "kop"))``."""

    pages: tuple[tuple[str, ...], ...]
    marked: tuple[str, ...]

    @property
    def answer(self) -> str:
        return ", ".join(self.marked)


class Archive(LimitedEpisode):
    """Read, keep notes, answer."""

    difficulties = (1, 2, 3)
    limits: ClassVar[Mapping[int, int]] = {difficulty: pages + SPARE_TURNS for difficulty, pages in PAGES.items()}
    max_turns = limits[3]
    deterministic = True
    tools: Sequence[dict[str, Any]] = EDITING_TOOLS
    inline = True
    suggests: ClassVar[Mapping[str, Any]] = {
        "difficulty": (2,), "context": 128, "max_tokens": 16, "hidden": 128, "copying": True, "cold_steps": 200,
        "cold_batch": 24,
    }  # fmt: skip
    symbols: ClassVar[str] = SYMBOLS
    page: int  # pages read

    def __init__(self, *, difficulty: int = 1, split: str = "train", editing: bool = True) -> None:
        super().__init__(difficulty=difficulty, split=split)
        self.editing, self.tools = editing, EDITING_TOOLS if editing else ()

    def begin(self, seed: int) -> Sequence[Message]:
        def sample(rng: random.Random) -> Register:
            names = rng.sample(NAMES, PAGES[self.difficulty] * ENTRIES)
            pages = tuple(tuple(names[i : i + ENTRIES]) for i in range(0, len(names), ENTRIES))
            return Register(pages, tuple(names[n] for n in sorted(rng.sample(range(len(names)), MARKED))))

        self.register, self.page = base.sample_problem(sample, seed, self.split), 0
        task, page = base.user_message(f"find the names with {MARK}."), self._next_page()
        self.editor = ContextEditor([task], MAX_NOTES, exchanges=[[page]])
        return [task, page]

    def _next_page(self) -> Message:
        """Turn the page; behind the last stands the question."""
        self.page = min(self.page, len(self.register.pages)) + 1
        if self.page > len(self.register.pages):
            return base.user_message("the end. which?")
        entries = ", ".join(MARK * (name in self.register.marked) + name for name in self.register.pages[self.page - 1])
        return base.user_message(f"page {self.page}: {entries}")

    def act(self, action: Action) -> Step:
        match = ANSWER.search(action.text[-40:].strip().lower())
        if match and not (action.calls or action.faults):
            right = sum(name in match.groups() for name in self.register.marked)
            text = f"{right} of {MARKED} are right: {self.register.answer}."
            return Step([base.user_message(text)], right / MARKED, terminated=True, info={"success": right == MARKED})
        counts: dict[str, int] = {}
        try:
            if action.faults or (action.calls and not self.editing):
                raise EditRefused(f"error: {action.faults[0][:80] if action.faults else 'there are no tools'}")
            if action.calls:  # the first call edits the context; the next page follows in the same turn
                context, page = self.editor.apply(action.calls[0]), self._next_page()
                self.editor.exchanges.append([page])  # what follows an edit belongs to no exchange before it
                return Step([page], info={"tool_calls": 1}, context=context)
            if base.plain_words(action.text) != "next":
                raise EditRefused(f"{HELP}.")
            reply = self._next_page()
        except EditRefused as refusal:
            reply, counts = base.user_message(str(refusal)), {"tool_calls": len(action.calls), "tool_errors": 1}
        self.editor.record(action, [reply])
        return Step([reply], info=counts)

    def answer(self) -> str:
        return f"answer: {self.register.answer}"

    # ---- scripted policies
    def oracle(self) -> Action:
        """Keep the marked names; tidy up before pages pile up. Without tools, go on."""
        # what can still be read: in the notes, or on pages that were not forgotten
        pages = " ".join(message["content"] for exchange in self.editor.exchanges for message in exchange)
        marked = [name for name in self.register.marked if name in self.editor.notes or f"{MARK}{name}" in pages]
        if self.page > len(self.register.pages):
            return base.text_action("answer: " + ", ".join([*marked, NAMES[0], NAMES[1]][:MARKED]))
        is_new = any(name not in self.editor.notes for name in marked)
        if not self.editing or not (is_new or len(self.editor.exchanges) >= PAGES_KEPT):
            return base.text_action("next")
        return base.tool_action("keep", notes=", ".join(marked) or "none")

    def random_action(self, rng: random.Random) -> Action:
        """Goes on, keeps any name of the page, forgets a page, or answers anything."""
        if self.page > len(self.register.pages):
            return base.text_action(f"answer: {', '.join(rng.sample(NAMES, MARKED))}")
        keep = base.tool_action("keep", notes=rng.choice(self.register.pages[self.page - 1]))
        edits = [keep, base.tool_action("drop", turns=1)] if self.editing else []
        return rng.choice([base.text_action("next"), *edits])

    def demonstrate(self, rng: random.Random) -> Action:
        """The oracle, but some of its edits are not made or keep the wrong thing."""
        action = self.oracle()
        return self.random_action(rng) if action.calls and rng.random() < SPOILT else action
