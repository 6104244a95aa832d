"""Lookup: multi-hop questions, one to three hops, over a fictional encyclopedia with a BM25 search tool.

The note of each hop names what the next query must contain, so an agent has to read before it can continue. The difficulty is
the number of hops. Reward 1 for the right final ``answer: NAME``, else 0.

Names of the worlds are invented, so no fact is known from pretraining. All worlds share the same names with different meanings,
so memorised facts of other worlds are wrong. Notes are ranked by BM25, the Okapi function:

    score(q, d) = Σ_{t ∈ q} idf(t) · tf(t, d) / (tf(t, d) + k1 · (1 − b + b · |d| / mean |d|))
    idf(t)      = ln(1 + (N − n(t) + ½) / (n(t) + ½))

(Robertson and Zaragoza 2009; the idf is Lucene's, which is never negative, and the constant factor k1 + 1 is omitted,
as in Lucene: it changes no ranking.) A word is a run of letters and digits, in lower case; twice in the query counts twice.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.core.records import Message
from turnwise.environments import base
from turnwise.environments.base import LimitedEpisode

WORLDS = 400  # per split: too many to memorise
COUNTS = {"company": 6, "person": 12, "city": 6, "land": 2}
RELATIONS = {
    "company": ("founder", "seat"),
    "person": ("birthplace", "spouse"),
    "city": ("land", "mayor"),
    "land": ("capital",),
}
CONSONANTS, VOWELS = "bdfgklmprstvz", "aeiou"  # no n: "name" would be a name
NAMES = 32  # in total; a world uses as many as ``COUNTS`` adds up to
SYMBOLS = rf"\b[{CONSONANTS}][{VOWELS}][{CONSONANTS}][{VOWELS}]\b|(?:{'|'.join(sum(RELATIONS.values(), ()))}) "


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return re.findall(r"\w+", text.lower())


class BM25Index:
    """``BM25Index(["a red cat", "a dog"]).top("red", 1) == [0]``"""

    def __init__(self, documents: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        assert k1 >= 0 and 0 <= b <= 1, (k1, b)
        split = [words(document) for document in documents]
        mean = sum(map(len, split)) / max(len(split), 1)
        self.size = len(split)
        self._weights: dict[str, dict[int, float]] = defaultdict(dict)  # word -> document -> its term of the score
        document_frequency = Counter(word for document in split for word in set(document))
        for number, document in enumerate(split):
            norm = k1 * (1 - b + b * len(document) / mean) if mean else 0.0
            for word, tf in Counter(document).items():
                n = document_frequency[word]
                idf = math.log(1 + (self.size - n + 0.5) / (n + 0.5))
                self._weights[word][number] = idf * tf / (tf + norm)

    def scores(self, query: str) -> list[float]:
        """One score per document."""
        out = [0.0] * self.size
        for word in words(query):
            for number, weight in self._weights.get(word, {}).items():
                out[number] += weight
        return out

    def top(self, query: str, count: int) -> list[int]:
        """The documents with the highest scores above 0, best first; ties go to the earlier document."""
        scores = self.scores(query)
        matching = [number for number, score in enumerate(scores) if score > 0]
        return sorted(matching, key=lambda number: -scores[number])[:count]


@dataclass(frozen=True, eq=False)
class FictionalWorld:
    """``facts["zelo"] == {"founder": "mika", "seat": "toba"}``; the note with that fact is ``number["zelo", "seat"]``."""

    names: tuple[str, ...]
    kinds: Mapping[str, str]
    facts: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...]
    number: Mapping[tuple[str, str], int]
    index: BM25Index


@dataclass(frozen=True, slots=True)
class Question:
    """``Question(("zelo", "mika", "toba"), ("founder", "birthplace"))``: relations lead from name to name."""

    names: tuple[str, ...]
    relations: tuple[str, ...]

    @property
    def text(self) -> str:
        phrase = self.names[0]
        for relation in self.relations:
            phrase = f"the {relation} of {phrase}"
        return f"what is {phrase}?"

    @property
    def answer(self) -> str:
        return self.names[-1]

    @property
    def content(self) -> str:
        """Text and path: no training question has the text and the path of a held-out one."""
        return f"{self.text} {' '.join(self.names)}"


@lru_cache(maxsize=2 * WORLDS)
def fictional_world(split: str, number: int) -> FictionalWorld:
    """World ``number`` of a split; cached."""
    rng = random.Random(f"world/{split}/{number}")
    # the invented names of all worlds: few, so that a small model soon represents each as a word
    letters, invented = random.Random("names"), dict[str, None]()
    while len(invented) < NAMES:
        invented["".join(letters.choice(kind) for kind in (CONSONANTS, VOWELS, CONSONANTS, VOWELS))] = None
    names = tuple(rng.sample(tuple(invented), sum(COUNTS.values())))
    kinds = dict(zip(names, (kind for kind, count in COUNTS.items() for _ in range(count))))
    companies, people, cities, lands = ([n for n in names if kinds[n] == kind] for kind in COUNTS)
    facts: dict[str, dict[str, str]] = {}
    for company in companies:
        facts[company] = {"founder": rng.choice(people), "seat": rng.choice(cities)}
    for one, other in zip(people[::2], people[1::2]):  # marriages are mutual
        facts[one] = {"birthplace": rng.choice(cities), "spouse": other}
        facts[other] = {"birthplace": rng.choice(cities), "spouse": one}
    for place, city in enumerate(cities):
        facts[city] = {"land": lands[place % len(lands)], "mayor": rng.choice(people)}
    for land in lands:  # a capital lies in its land
        facts[land] = {"capital": rng.choice([city for city in cities if facts[city]["land"] == land])}
    subjects = [(name, relation) for name in names for relation in facts[name]]
    notes = tuple(f"the {relation} of {name} is {facts[name][relation]}." for name, relation in subjects)
    index = BM25Index([f"{name} {note}" for (name, _), note in zip(subjects, notes)])  # the subject's name counts twice
    return FictionalWorld(names, kinds, facts, notes, {key: n for n, key in enumerate(subjects)}, index)


def sample_question(world: FictionalWorld, hops: int, rng: random.Random) -> Question:
    """A random walk over facts that visits no name twice, so that no hop can be skipped."""
    while True:
        names, relations = [rng.choice(world.names)], []
        for _ in range(hops):
            relation = rng.choice(RELATIONS[world.kinds[names[-1]]])
            relations.append(relation)
            names.append(world.facts[names[-1]][relation])
        if len(set(names)) == len(names):
            return Question(tuple(names), tuple(relations))


RESULTS = 1  # notes per search
MAX_CALLS = 4  # per turn
MAX_QUERY = 200  # characters
ANSWER = re.compile(r"answer: *(\w+)[ .]*$")
EARLY_ANSWER = {1: 0.5, 2: 0.3, 3: 0.2}  # probability per turn of a demonstration: about half of them then fail
ORACLE_SHARE = 0.8  # of the other turns of a demonstration
ALL_RELATIONS = sorted({relation for each in RELATIONS.values() for relation in each})
HELP = "call search, or say answer: NAME"


class Lookup(LimitedEpisode):
    """Search, read, search again, answer."""

    difficulties = (1, 2, 3)
    # twice the minimum of one search per hop and the answer
    limits: ClassVar[Mapping[int, int]] = {hops: 2 * hops + 2 for hops in difficulties}
    max_turns = limits[3]
    tools: Sequence[dict[str, Any]] = (base.tool_schema("search", "find notes", query="string"),)
    # bit k of uncovered: the note of hop k is found
    facts: ClassVar[tuple[str, ...]] = ("question", "answer", "uncovered")
    inline = True
    suggests: ClassVar[Mapping[str, Any]] = {
        "difficulty": (1, 2), "context": 192, "max_tokens": 12, "copying": True, "cold_steps": 60, "cold_demos": 2880,
    }  # fmt: skip
    symbols: ClassVar[str] = SYMBOLS
    deterministic = True
    notes_read: list[int]  # their numbers, in the order of their latest reading

    def begin(self, seed: int) -> Sequence[Message]:
        def sample(rng: random.Random) -> tuple[FictionalWorld, Question]:
            world = fictional_world(self.split, rng.randrange(WORLDS))
            return world, sample_question(world, self.difficulty, rng)

        self.notes_read = []
        self.world, self.question = base.sample_problem(sample, seed, self.split, lambda drawn: drawn[1].content)
        return [base.user_message(f"{self.question.text} use search, then say answer: NAME")]

    def act(self, action: Action) -> Step:
        counts: dict[str, Any] = {"tool_calls": len(action.calls), "tool_errors": 0}
        if action.calls or action.faults:  # one message per call, and one per call that could not be parsed
            read_before = set(self.notes_read)
            replies = [self._search(call, number) for number, call in enumerate(action.calls)]
            replies += [(base.tool_message("search", f"error: {f[:MAX_QUERY]}"), 1) for f in action.faults[:MAX_CALLS]]
            # what this turn alone has found on the way: credit of a turn reads it
            fresh = [note in self.notes_read and note not in read_before for note in self.path]
            uncovered = float(sum(2**hop for hop, is_new in enumerate(fresh) if is_new))
            counts["tool_errors"] = sum(error for _, error in replies)
            info = counts | {"facts": {"question": 1.0, "uncovered": uncovered}}
            return Step([message for message, _ in replies], info=info)
        if answer := ANSWER.search(action.text[-MAX_QUERY:].strip().lower()):
            right = answer[1] == self.question.answer
            text = "right." if right else f"wrong: it is {self.question.answer}."
            info = counts | {"facts": {"answer": 1.0}, "success": right}
            return Step([base.user_message(text)], float(right), terminated=True, info=info)
        return Step([base.user_message(f"{HELP}.")], info=counts | {"tool_errors": 1})

    def _search(self, call: ToolCall, number: int) -> tuple[Message, int]:
        """The reply to call ``number`` of a turn, and 1 if it is an error."""
        query = call.arguments.get("query")
        if call.name != "search":
            return base.tool_message(call.name, "error: the only tool is search", call.id), 1
        if not isinstance(query, str) or not query.strip() or len(query) > MAX_QUERY:
            return base.tool_message("search", "error: query must be a few words", call.id), 1
        if number >= MAX_CALLS:
            return base.tool_message("search", f"error: at most {MAX_CALLS} calls at once", call.id), 1
        notes = self.world.index.top(query, RESULTS)
        self.notes_read = [*(note for note in self.notes_read if note not in notes), *notes]
        text = "\n".join(self.world.notes[note] for note in notes) or "nothing found"
        return base.tool_message("search", text, call.id), 0

    def answer(self) -> str:
        return f"answer: {self.question.answer}"

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

    @property
    def path(self) -> list[int]:
        """The notes that lead to the answer, in order."""
        return [self.world.number[step] for step in zip(self.question.names, self.question.relations)]

    def oracle(self) -> Action:
        """Search for the first unread note on the path; then answer."""
        for name, relation, note in zip(self.question.names, self.question.relations, self.path):
            if note not in self.notes_read:
                return _search_action(relation, name)
        return base.text_action(self.answer())

    def random_action(self, rng: random.Random) -> Action:
        """Searches for a random relation of, or answers with, a random name read so far."""
        name = rng.choice(sorted({self.question.names[0], *map(self._last_name, self.notes_read)}))
        return (
            _search_action(rng.choice(ALL_RELATIONS), name)
            if rng.random() < 0.5
            else base.text_action(f"answer: {name}")
        )

    def demonstrate(self, rng: random.Random) -> Action:
        """Often answers before all notes are read, and sometimes searches for the wrong relation."""
        name = self._last_name(self.notes_read[-1]) if self.notes_read else self.question.names[0]
        # whoever has read all notes knows the answer
        complete = all(note in self.notes_read for note in self.path)
        if not complete and rng.random() < EARLY_ANSWER[self.difficulty]:
            return base.text_action(f"answer: {name}")
        if rng.random() < ORACLE_SHARE:
            return self.oracle()
        return _search_action(rng.choice(self.question.relations), name)

    def _last_name(self, note: int) -> str:
        """The name at the end of a note."""
        return self.world.notes[note].split()[-1].rstrip(".")


def _search_action(relation: str, name: str) -> Action:
    return base.tool_action("search", query=f"{relation} of {name}")
