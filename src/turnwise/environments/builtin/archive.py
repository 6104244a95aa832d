"""Archive: a list that is read page by page and is longer than the context; its two marked names are asked for at the end.

The policy edits its own context: ``keep`` replaces all pages read so far by notes in its own words, ``drop`` forgets the oldest
pages. Without edits the context overflows, and the episode has failed. ``editing=false`` offers no tools: then only the setting
``history``, a fixed window, makes room. The reward is the share of the marked names that the answer gives, in any order.

Does not know how long the context is.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import Environment, sample_problem, text_action, tool_action, user_message
from turnwise.environments.context_editing import EDITING_TOOLS, ContextEditor, EditRefused

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


class Archive(Environment):
    """Read, keep notes, answer."""

    difficulties = (1, 2, 3)
    max_turns = PAGES[3] + SPARE_TURNS
    tools: Sequence[dict[str, Any]] = EDITING_TOOLS
    inline = True
    suggests: ClassVar[Mapping[str, Any]] = {
        "difficulty": (2,), "context": 128, "max_tokens": 16, "hidden": 128, "copying": True, "cold_steps": 200,
        "cold_batch": 24,
    }  # fmt: skip
    symbols: ClassVar[str] = SYMBOLS
    register: Register
    editor: ContextEditor
    page: int  # pages read
    turns: int
    done: bool

    def __init__(self, *, difficulty: int = 1, split: str = "train", editing: bool = True) -> None:
        super().__init__(difficulty=difficulty, split=split)
        self.editing, self.tools = editing, EDITING_TOOLS if editing else ()

    def reset(self, seed: int) -> Sequence[Message]:
        self.register = sample_problem(self._sample, seed, self.split, str)
        self.page, self.turns, self.done = 1, 0, False
        task = user_message(f"find the names with {MARK}.")
        page = user_message(self._page())
        self.editor = ContextEditor([task], MAX_NOTES, exchanges=[[page]])
        return [task, page]

    def _sample(self, rng: random.Random) -> Register:
        count = PAGES[self.difficulty]
        names = rng.sample(NAMES, count * ENTRIES)
        pages = tuple(tuple(names[i : i + ENTRIES]) for i in range(0, len(names), ENTRIES))
        marked = sorted(rng.sample(range(len(names)), MARKED))
        return Register(pages, tuple(names[n] for n in marked))

    def _page(self) -> str:
        """The current page, or the question behind the last."""
        if self.page > len(self.register.pages):
            return "the end. which?"
        entries = ", ".join(MARK * (name in self.register.marked) + name for name in self.register.pages[self.page - 1])
        return f"page {self.page}: {entries}"

    def step(self, action: Action) -> Step:
        if self.done:
            return Step([user_message("it is over.")], terminated=True)
        self.turns += 1
        if action.calls or action.faults:
            return self._edit(action)
        if match := ANSWER.search(action.text[-40:].strip().lower()):
            return self._answer({match[1], match[2]})
        if action.text.strip().lower().rstrip(".") != "next":
            return self._reply(action, f"{HELP}.", tool_errors=1)
        self.page += 1
        return self._reply(action, self._page())

    def _edit(self, action: Action) -> Step:
        """The first call edits the context; the next page follows in the same turn."""
        try:
            if action.faults or not self.editing:
                raise EditRefused(f"error: {action.faults[0][:80] if action.faults else 'there are no tools'}")
            context = self.editor.apply(action.calls[0])
        except EditRefused as refusal:
            return self._reply(action, str(refusal), tool_calls=len(action.calls), tool_errors=1)
        self.page += 1
        page = [user_message(self._page())]
        return self._bounded(Step(page, info={"tool_calls": 1}, context=context), page)

    def _reply(self, action: Action, text: str, **counts: int) -> Step:
        message = user_message(text)
        self.editor.record(action, [message])
        return self._bounded(Step([message], info=counts), [])

    def _bounded(self, step: Step, unread: list[Message]) -> Step:
        """At the turn limit an unfinished episode has failed. ``unread``: what follows an edit belongs to no exchange."""
        self.page = min(self.page, len(self.register.pages) + 1)
        self.editor.exchanges += [unread] if unread else []
        self.done = self.turns >= PAGES[self.difficulty] + SPARE_TURNS
        return Step(step.messages, 0.0, False, True, {**step.info, "success": False}) if self.done else step

    def _answer(self, names: set[str]) -> Step:
        self.done = True
        right = sum(name in names for name in self.register.marked)
        text = f"{right} of {MARKED} are right: {self.register.answer}."
        return Step([user_message(text)], right / MARKED, True, False, {"success": right == MARKED})

    def answer(self) -> str:
        return f"answer: {self.register.answer}"

    # ---- scripted policies
    @property
    def _found(self) -> list[str]:
        """The marked names that can still be read: in the notes, or on pages that were not forgotten."""
        pages = " ".join(message["content"] for exchange in self.editor.exchanges for message in exchange)
        return [name for name in self.register.marked if name in self.editor.notes or f"{MARK}{name}" in pages]

    def oracle(self) -> Action:
        """Keep the marked names; tidy up before pages pile up. Without tools, go on."""
        found = self._found
        if self.page > len(self.register.pages):
            return text_action("answer: " + ", ".join([*found, NAMES[0], NAMES[1]][:MARKED]))
        is_new = any(name not in self.editor.notes for name in found)
        if not self.editing or not (is_new or len(self.editor.exchanges) >= PAGES_KEPT):
            return text_action("next")
        return tool_action("keep", notes=", ".join(found) or "none")

    def random_action(self, rng: random.Random) -> Action:
        """Goes on, keeps any name of the page, forgets a page, or answers anything."""
        if self.page > len(self.register.pages):
            return text_action(f"answer: {', '.join(rng.sample(NAMES, MARKED))}")
        kept = tool_action("keep", notes=rng.choice(self.register.pages[self.page - 1]))
        edits = [kept, tool_action("drop", turns=1)] if self.editing else []
        return rng.choice([text_action("next"), *edits])

    def demonstrate(self, rng: random.Random) -> Action:
        """The oracle, but some of its edits are not made or keep the wrong thing."""
        action = self.oracle()
        return self.random_action(rng) if action.calls and rng.random() < SPOILT else action
