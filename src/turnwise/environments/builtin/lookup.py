"""Lookup: a question of one to three hops over an invented encyclopedia, and a real search tool to answer it with.

Each hop's note names what the next search must ask for, so an agent has to read before it can go on. The difficulty is
the number of hops. Reward 1 for the right final ``answer: NAME``, else 0.

It does not know how notes are ranked (``search``) nor how the world was made (``encyclopedia``).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.core.records import Message
from turnwise.environments.base import Quiz, call, draw, say, user
from turnwise.environments.builtin.encyclopedia import RELATIONS, SYMBOLS, WORLDS, Question, World, ask, world

SHOWN = 1  # notes per search
MOST_CALLS = 4  # per turn
LONGEST = 200  # characters of a query
ANSWER = re.compile(r"answer: *(\w+)[ .]*$")
HASTY = {1: 0.5, 2: 0.3, 3: 0.2}  # of a demonstration's turns: so that about half of the demonstrations fail
SURE = 0.8
ALL = sorted({relation for each in RELATIONS.values() for relation in each})
HELP = "call search, or say answer: NAME"
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "find notes",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


class Lookup(Quiz):
    """Search, read, search again, answer."""

    difficulties = (1, 2, 3)
    limits: ClassVar[Mapping[int, int]] = {
        hops: 2 * hops + 2 for hops in difficulties
    }  # twice what is needed: one search per hop and the answer
    max_turns = limits[3]
    tools: Sequence[dict[str, Any]] = (SEARCH,)
    facts = ("question", "answer", "uncovered")  # uncovered: bit k for the note of hop k
    inline = True
    suggests: ClassVar[Mapping[str, Any]] = {
        "difficulty": (1, 2),
        "context": 192,
        "max_tokens": 12,
        "copying": True,
        "cold_steps": 60,
        "cold_demos": 2880,
    }
    symbols: ClassVar[str] = SYMBOLS
    seen: dict[int, None]  # numbers of the notes that were read, the latest last
    world: World
    question: Question

    def reset(self, seed: int) -> Sequence[Message]:
        self.begin(seed)
        return [user(f"{self.question.text} use search, then say answer: NAME")]

    def begin(self, seed: int) -> None:
        super().begin(seed)
        self.seen = {}
        self.world, self.question = draw(self._ask, seed, self.split, lambda drawn: drawn[1].content)

    def step(self, action: Action) -> Step:
        if self.over:
            return self._reply([user("it is over.")])
        self.turns += 1
        if action.calls or action.faults:
            return self._use(action)
        if said := ANSWER.search(action.text[-LONGEST:].strip().lower()):
            self.said = said[1]
            text = "right." if self.won else f"wrong: it is {self.right}."
            return self._reply([user(text)], reward=float(self.won), told={"answer": 1.0})
        return self._reply([user(f"{HELP}.")], errors=1)

    def _use(self, action: Action) -> Step:
        """One answer per call, and one per call that could not be read."""
        known = set(self.seen)
        answers = [self._call(each, number) for number, each in enumerate(action.calls)]
        answers += [(_result("search", f"error: {fault[:LONGEST]}"), 1) for fault in action.faults[:MOST_CALLS]]
        errors = sum(error for _, error in answers)
        new = [note in self.seen and note not in known for note in self.way]
        told = {"question": 1.0, "uncovered": float(sum(2**hop for hop, came in enumerate(new) if came))}
        return self._reply([message for message, _ in answers], calls=len(action.calls), errors=errors, told=told)

    def _call(self, each: ToolCall, number: int) -> tuple[Message, int]:
        query = each.arguments.get("query")
        if each.name != "search":
            return _result(each.name, "error: the only tool is search", each.id), 1
        if not isinstance(query, str) or not query.strip() or len(query) > LONGEST:
            return _result("search", "error: query must be a few words", each.id), 1
        if number >= MOST_CALLS:
            return _result("search", f"error: at most {MOST_CALLS} calls at once", each.id), 1
        found = self.world.index.top(query, SHOWN)
        for note in found:  # the latest last
            self.seen.pop(note, None)
            self.seen[note] = None
        text = "\n".join(self.world.notes[note] for note in found) or "nothing found"
        return _result("search", text, each.id), 0

    def _reply(
        self,
        messages: list[Message],
        reward: float = 0.0,
        calls: int = 0,
        errors: int = 0,
        told: Mapping[str, float] | None = None,
    ) -> Step:
        return self.reply(messages, reward, told, tool_calls=calls, tool_errors=errors)

    @property
    def right(self) -> str:
        return self.question.answer

    def answer(self) -> str:
        return f"answer: {self.right}"

    def hint(self) -> str:
        """The first search, and what to ask of each note."""
        first, *others = self.question.relations
        then = "".join(f", then {relation} of what you read" for relation in others)
        return f"search {first} of {self.question.names[0]}{then}"

    def state_key(self) -> str:
        """Which notes have been read."""
        return " ".join(map(str, sorted(self.seen)))

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"seen": list(self.seen)}

    def restore(self, snapshot: Any) -> None:
        super().restore(snapshot)
        self.seen = dict.fromkeys(snapshot["seen"])

    def _ask(self, rng: random.Random) -> tuple[World, Question]:
        here = world(self.split, rng.randrange(WORLDS))
        return here, ask(here, self.difficulty, rng)

    @property
    def way(self) -> list[int]:
        """The notes that lead to the answer, in order."""
        return [self.world.number[step] for step in zip(self.question.names, self.question.relations)]

    def oracle(self) -> Action:
        """Search for the first note on the way that has not been read; then answer."""
        for name, relation, note in zip(self.question.names, self.question.relations, self.way):
            if note not in self.seen:
                return _search(relation, name)
        return say(self.answer())

    def random_action(self, rng: random.Random) -> Action:
        """Searches for anything about, or answers with, any name met so far."""
        name = rng.choice(sorted({self.question.names[0], *map(self._told, self.seen)}))
        return _search(rng.choice(ALL), name) if rng.random() < 0.5 else say(f"answer: {name}")

    def demonstrate(self, rng: random.Random) -> Action:
        """Hasty, so that it often answers before it has read enough; and now and then asks for the wrong thing."""
        last = next(reversed(self.seen), None)
        name = self.question.names[0] if last is None else self._told(last)
        enough = all(note in self.seen for note in self.way)
        if not enough and rng.random() < HASTY[self.difficulty]:
            return say(f"answer: {name}")
        if rng.random() < SURE:
            return self.oracle()
        return _search(rng.choice(self.question.relations), name)

    def _told(self, note: int) -> str:
        """The name at the end of a note."""
        return self.world.notes[note].split()[-1].rstrip(".")


def _search(relation: str, name: str) -> Action:
    return call("search", query=f"{relation} of {name}")


def _result(tool: str, text: str, id: str = "") -> Message:
    message: Message = {"role": "tool", "name": tool, "content": text}
    return message | ({"tool_call_id": id} if id else {})
