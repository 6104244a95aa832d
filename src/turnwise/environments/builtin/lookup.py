"""Lookup: multi-hop questions, one to three hops, over a fictional encyclopedia with a BM25 search tool.

The note of each hop names what the next query must contain, so an agent has to read before it can continue. The difficulty is
the number of hops. Reward 1 for the right final ``answer: NAME``, else 0.

Does not know how notes are ranked (``search``) nor how a world is generated (``encyclopedia``).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.core.records import Message
from turnwise.environments.base import SingleAnswerEnvironment, sample_problem, text_action, tool_action, user_message
from turnwise.environments.builtin.encyclopedia import (
    RELATIONS,
    SYMBOLS,
    WORLDS,
    FictionalWorld,
    Question,
    fictional_world,
    sample_question,
)

RESULTS = 1  # notes per search
MAX_CALLS = 4  # per turn
MAX_QUERY = 200  # characters
ANSWER = re.compile(r"answer: *(\w+)[ .]*$")
EARLY_ANSWER = {1: 0.5, 2: 0.3, 3: 0.2}  # probability per turn of a demonstration: about half of them then fail
ORACLE_SHARE = 0.8  # of the other turns of a demonstration
ALL_RELATIONS = sorted({relation for each in RELATIONS.values() for relation in each})
HELP = "call search, or say answer: NAME"
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "find notes",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


class Lookup(SingleAnswerEnvironment):
    """Search, read, search again, answer."""

    difficulties = (1, 2, 3)
    limits: ClassVar[Mapping[int, int]] = {
        hops: 2 * hops + 2 for hops in difficulties
    }  # twice the minimum of one search per hop and the answer
    max_turns = limits[3]
    tools: Sequence[dict[str, Any]] = (SEARCH,)
    facts: ClassVar[tuple[str, ...]] = (
        "question",
        "answer",
        "uncovered",
    )  # uncovered: bit k, the note of hop k is found
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
    notes_read: dict[int, None]  # note numbers in the order of their latest reading
    world: FictionalWorld
    question: Question

    def reset(self, seed: int) -> Sequence[Message]:
        self.begin(seed)
        return [user_message(f"{self.question.text} use search, then say answer: NAME")]

    def begin(self, seed: int) -> None:
        super().begin(seed)
        self.notes_read = {}
        self.world, self.question = sample_problem(
            self._sample_question, seed, self.split, lambda drawn: drawn[1].content
        )

    def step(self, action: Action) -> Step:
        if self.is_over:
            return self._reply([user_message("it is over.")])
        self.turns += 1
        if action.calls or action.faults:
            return self._run_calls(action)
        if answer := ANSWER.search(action.text[-MAX_QUERY:].strip().lower()):
            self.final_answer = answer[1]
            text = "right." if self.succeeded else f"wrong: it is {self.correct_answer}."
            return self._reply([user_message(text)], reward=float(self.succeeded), facts={"answer": 1.0})
        return self._reply([user_message(f"{HELP}.")], errors=1)

    def _run_calls(self, action: Action) -> Step:
        """One tool message per call, and one per call that could not be parsed."""
        read_before = set(self.notes_read)
        results = [self._search(call, number) for number, call in enumerate(action.calls)]
        results += [(_result("search", f"error: {fault[:MAX_QUERY]}"), 1) for fault in action.faults[:MAX_CALLS]]
        errors = sum(error for _, error in results)
        found = [note in self.notes_read and note not in read_before for note in self.path]
        facts = {"question": 1.0, "uncovered": float(sum(2**hop for hop, is_new in enumerate(found) if is_new))}
        return self._reply([message for message, _ in results], calls=len(action.calls), errors=errors, facts=facts)

    def _search(self, call: ToolCall, number: int) -> tuple[Message, int]:
        query = call.arguments.get("query")
        if call.name != "search":
            return _result(call.name, "error: the only tool is search", call.id), 1
        if not isinstance(query, str) or not query.strip() or len(query) > MAX_QUERY:
            return _result("search", "error: query must be a few words", call.id), 1
        if number >= MAX_CALLS:
            return _result("search", f"error: at most {MAX_CALLS} calls at once", call.id), 1
        found = self.world.index.top(query, RESULTS)
        for note in found:  # move to the end
            self.notes_read.pop(note, None)
            self.notes_read[note] = None
        text = "\n".join(self.world.notes[note] for note in found) or "nothing found"
        return _result("search", text, call.id), 0

    def _reply(
        self,
        messages: list[Message],
        reward: float = 0.0,
        calls: int = 0,
        errors: int = 0,
        facts: Mapping[str, float] | None = None,
    ) -> Step:
        return self.reply(messages, reward, facts, tool_calls=calls, tool_errors=errors)

    @property
    def correct_answer(self) -> str:
        return self.question.answer

    def answer(self) -> str:
        return f"answer: {self.correct_answer}"

    def hint(self) -> str:
        """The first query, and the relation to follow in each note."""
        first, *others = self.question.relations
        then = "".join(f", then {relation} of what you read" for relation in others)
        return f"search {first} of {self.question.names[0]}{then}"

    def turns_to_solve(self) -> float:
        """One search for each unread note on the way, and the answer."""
        return sum(note not in self.notes_read for note in self.path) + 1.0

    def hints(self) -> Sequence[str]:
        """How to go on, the first query, all queries."""
        first = f"search {self.question.relations[0]} of {self.question.names[0]}"
        return ("search for one relation at a time", first, self.hint())

    def state_key(self) -> str:
        """The numbers of the notes that have been read."""
        return " ".join(map(str, sorted(self.notes_read)))

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"seen": list(self.notes_read)}

    def restore(self, snapshot: Any) -> None:
        super().restore(snapshot)
        self.notes_read = dict.fromkeys(snapshot["seen"])

    def _sample_question(self, rng: random.Random) -> tuple[FictionalWorld, Question]:
        world = fictional_world(self.split, rng.randrange(WORLDS))
        return world, sample_question(world, self.difficulty, rng)

    @property
    def path(self) -> list[int]:
        """The notes that lead to the answer, in order."""
        return [self.world.number[step] for step in zip(self.question.names, self.question.relations)]

    def oracle(self) -> Action:
        """Search for the first unread note on the path; then answer."""
        for name, relation, note in zip(self.question.names, self.question.relations, self.path):
            if note not in self.notes_read:
                return _search_action(relation, name)
        return text_action(self.answer())

    def random_action(self, rng: random.Random) -> Action:
        """Searches for a random relation of, or answers with, a random name read so far."""
        name = rng.choice(sorted({self.question.names[0], *map(self._last_name, self.notes_read)}))
        return _search_action(rng.choice(ALL_RELATIONS), name) if rng.random() < 0.5 else text_action(f"answer: {name}")

    def demonstrate(self, rng: random.Random) -> Action:
        """Often answers before all notes are read, and sometimes searches for the wrong relation."""
        last = next(reversed(self.notes_read), None)
        name = self.question.names[0] if last is None else self._last_name(last)
        complete = all(note in self.notes_read for note in self.path)
        if not complete and rng.random() < EARLY_ANSWER[self.difficulty]:
            return text_action(f"answer: {name}")
        if rng.random() < ORACLE_SHARE:
            return self.oracle()
        return _search_action(rng.choice(self.question.relations), name)

    def _last_name(self, note: int) -> str:
        """The name at the end of a note."""
        return self.world.notes[note].split()[-1].rstrip(".")


def _search_action(relation: str, name: str) -> Action:
    return tool_action("search", query=f"{relation} of {name}")


def _result(tool: str, text: str, id: str = "") -> Message:
    message: Message = {"role": "tool", "name": tool, "content": text}
    return message | ({"tool_call_id": id} if id else {})
