"""Archive: a list that is read page by page and is longer than the context; two of its numbers are asked for at the end.

The policy edits its own context: ``keep`` replaces all pages read so far by notes in its own words, ``drop`` forgets the oldest
pages. Without edits the context overflows, and the episode has failed. ``editing=false`` offers no tools: then only the setting
``history``, a fixed window, makes room. The reward is the share of the numbers that the answer gets right.

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
ENTRIES = 4  # on a page
ASKED = 2  # names whose numbers are asked for
CONSONANTS, VOWELS = "bdfgklmprstvz", "aeiou"
NAMES = tuple(f"{a}{b}{c}" for a in CONSONANTS for b in VOWELS for c in CONSONANTS)[7::17]
SYMBOLS = rf"\b[{CONSONANTS}][{VOWELS}][{CONSONANTS}]\b|[0-9]"
MAX_NOTES = 24  # characters: room for the numbers asked for, not for a page
SPARE_TURNS = 3
PAGES_KEPT = 2  # that the oracle lets stand before it tidies up
SPOILT = 0.25  # of the demonstrator's edits
ENTRY = rf"([{CONSONANTS}][{VOWELS}][{CONSONANTS}]) ([0-9])"
ANSWER = re.compile(rf"answer: *{ENTRY}, *{ENTRY}[ .]*$")
HELP = "say next, call keep, or say answer: NAME NUMBER, NAME NUMBER"


@dataclass(frozen=True)
class Register:
    """The pages of one task, and the names asked for: ``Register(((("bab", 3), ...), ...), ("bab", "dig"))``."""

    pages: tuple[tuple[tuple[str, int], ...], ...]
    asked: tuple[str, ...]

    @property
    def numbers(self) -> dict[str, int]:
        return {name: number for page in self.pages for name, number in page}

    @property
    def answer(self) -> str:
        return ", ".join(f"{name} {self.numbers[name]}" for name in self.asked)


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
        task = user_message(f"find {' and '.join(self.register.asked)}.")
        page = user_message(self._page())
        self.editor = ContextEditor([task], MAX_NOTES, exchanges=[[page]])
        return [task, page]

    def _sample(self, rng: random.Random) -> Register:
        count = PAGES[self.difficulty]
        names = rng.sample(NAMES, count * ENTRIES)
        entries = [(name, rng.randrange(10)) for name in names]
        pages = tuple(tuple(entries[i : i + ENTRIES]) for i in range(0, len(entries), ENTRIES))
        return Register(pages, tuple(rng.sample(names, ASKED)))

    def _page(self) -> str:
        """The current page, or the question behind the last."""
        if self.page > len(self.register.pages):
            return f"the end. {' '.join(self.register.asked)}?"
        entries = ", ".join(f"{name} {number}" for name, number in self.register.pages[self.page - 1])
        return f"page {self.page}: {entries}"

    def step(self, action: Action) -> Step:
        if self.done:
            return Step([user_message("it is over.")], terminated=True)
        self.turns += 1
        if action.calls or action.faults:
            return self._edit(action)
        if match := ANSWER.search(action.text[-40:].strip().lower()):
            return self._answer({match[1]: int(match[2]), match[3]: int(match[4])})
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

    def _answer(self, numbers: Mapping[str, int]) -> Step:
        self.done = True
        right = sum(numbers.get(name) == self.register.numbers[name] for name in self.register.asked)
        text = f"{right} of {ASKED} are right: {self.register.answer}."
        return Step([user_message(text)], right / ASKED, True, False, {"success": right == ASKED})

    def answer(self) -> str:
        return f"answer: {self.register.answer}"

    # ---- scripted policies
    @property
    def _found(self) -> list[str]:
        """What can still be read of the numbers asked for: in the notes, or on pages that were not forgotten."""
        text = " ".join(message["content"] for message in self.editor.context)
        entries = [f"{name} {self.register.numbers[name]}" for name in self.register.asked]
        return [entry for entry in entries if entry in text]

    def oracle(self) -> Action:
        """Keep what the page has of the numbers asked for, and tidy up before pages pile up; without tools, go on."""
        if self.page > len(self.register.pages):
            known = dict(entry.split() for entry in self._found)
            return text_action("answer: " + ", ".join(f"{name} {known.get(name, '0')}" for name in self.register.asked))
        found = self._found
        is_new = any(entry not in self.editor.notes for entry in found)
        if not self.editing or not (is_new or len(self.editor.exchanges) >= PAGES_KEPT):
            return text_action("next")
        return tool_action("keep", notes=", ".join(found) or "none")

    def random_action(self, rng: random.Random) -> Action:
        """Goes on, keeps any entry of the page, forgets a page, or answers anything."""
        if self.page > len(self.register.pages):
            return text_action("answer: " + ", ".join(f"{name} {rng.randrange(10)}" for name in self.register.asked))
        name, number = rng.choice(self.register.pages[self.page - 1])
        kept = tool_action("keep", notes=f"{name} {number}")
        edits = [kept, tool_action("drop", turns=1)] if self.editing else []
        return rng.choice([text_action("next"), *edits])

    def demonstrate(self, rng: random.Random) -> Action:
        """The oracle, but some of its edits are not made or keep the wrong thing."""
        action = self.oracle()
        return self.random_action(rng) if action.calls and rng.random() < SPOILT else action
