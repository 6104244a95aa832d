"""Small fictional worlds and notes about them: people, companies, cities and lands, and their relations.

Names are invented, so no fact is known from pretraining. All worlds share the same names with different meanings, so memorised
facts of other worlds are wrong. Worlds are immutable, cached and shared between episodes.

Notes are found by BM25, the Okapi ranking function:

    score(q, d) = Σ_{t ∈ q} idf(t) · tf(t, d) / (tf(t, d) + k1 · (1 − b + b · |d| / mean |d|))
    idf(t)      = ln(1 + (N − n(t) + ½) / (n(t) + ½))

(Robertson and Zaragoza 2009; the idf is Lucene's, which is never negative, and the constant factor k1 + 1 is omitted,
as in Lucene: it changes no ranking.) A word is a run of letters and digits, in lower case; twice in the query counts twice.

Does not know how questions are scored, nor turns.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

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
    names = tuple(rng.sample(_names(), sum(COUNTS.values())))
    kinds = dict(zip(names, (kind for kind, count in COUNTS.items() for _ in range(count))))
    facts = _facts(rng, {kind: [n for n in names if kinds[n] == kind] for kind in COUNTS})
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


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    """The invented names of all worlds: few, so that a small model soon represents each as a word."""
    rng = random.Random("names")
    shape = (CONSONANTS, VOWELS, CONSONANTS, VOWELS)
    names: dict[str, None] = {}
    while len(names) < NAMES:
        names["".join(rng.choice(letters) for letters in shape)] = None
    return tuple(names)


def _facts(rng: random.Random, of: Mapping[str, list[str]]) -> dict[str, dict[str, str]]:
    """Consistent facts: marriages are mutual, a capital lies in its land."""
    people, cities, lands = of["person"], of["city"], of["land"]
    facts: dict[str, dict[str, str]] = {}
    for company in of["company"]:
        facts[company] = {"founder": rng.choice(people), "seat": rng.choice(cities)}
    for one, other in zip(people[::2], people[1::2]):
        facts[one] = {"birthplace": rng.choice(cities), "spouse": other}
        facts[other] = {"birthplace": rng.choice(cities), "spouse": one}
    for number, city in enumerate(cities):
        facts[city] = {"land": lands[number % len(lands)], "mayor": rng.choice(people)}
    for land in lands:
        facts[land] = {"capital": rng.choice([city for city in cities if facts[city]["land"] == land])}
    return facts
