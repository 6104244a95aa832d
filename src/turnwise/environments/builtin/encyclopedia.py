"""A small invented world and the notes about it: people, companies, cities and lands, and how they are related.

Names are invented, so nobody knows a fact from elsewhere. All worlds draw from the same names, and in each they stand for
something else: who remembers instead of reading is wrong. Worlds are made once and shared between episodes; none changes.

It does not know of questions being scored, nor of turns.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from turnwise.environments.builtin.search import Index

WORLDS = 400  # per split: so many that only reading pays
COUNTS = {"company": 6, "person": 12, "city": 6, "land": 2}
RELATIONS = {
    "company": ("founder", "seat"),
    "person": ("birthplace", "spouse"),
    "city": ("land", "mayor"),
    "land": ("capital",),
}
CONSONANTS, VOWELS = "bdfgklmprstvz", "aeiou"  # no n: "name" would be a name
NAMES = 32  # in all; a world has as many as it counts
SYMBOLS = rf"\b[{CONSONANTS}][{VOWELS}][{CONSONANTS}][{VOWELS}]\b|(?:{'|'.join(sum(RELATIONS.values(), ()))}) "


@dataclass(frozen=True, eq=False)
class World:
    """``facts["zelo"] == {"founder": "mika", "seat": "toba"}``; note ``number["zelo", "seat"]`` says so."""

    names: tuple[str, ...]
    kinds: Mapping[str, str]
    facts: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...]
    number: Mapping[tuple[str, str], int]
    index: Index


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
        """The whole way: what a held-out question asks was never asked, and answered so, in training."""
        return f"{self.text} {' '.join(self.names)}"


@lru_cache(maxsize=2 * WORLDS)
def world(split: str, number: int) -> World:
    rng = random.Random(f"world/{split}/{number}")
    names = tuple(rng.sample(_names(), sum(COUNTS.values())))
    kinds = dict(zip(names, (kind for kind, count in COUNTS.items() for _ in range(count))))
    facts = _facts(rng, {kind: [n for n in names if kinds[n] == kind] for kind in COUNTS})
    stated = [(name, relation) for name in names for relation in facts[name]]
    notes = tuple(f"the {relation} of {name} is {facts[name][relation]}." for name, relation in stated)
    index = Index([f"{name} {note}" for (name, _), note in zip(stated, notes)])  # whom it is about counts for more
    return World(names, kinds, facts, notes, {key: n for n, key in enumerate(stated)}, index)


def ask(world: World, hops: int, rng: random.Random) -> Question:
    """A random walk over facts that meets no name twice, so that no hop can be skipped by going back."""
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
    """The invented names of all worlds: few, so that a small model soon knows each as a word."""
    rng = random.Random("names")
    shape = (CONSONANTS, VOWELS, CONSONANTS, VOWELS)
    found: dict[str, None] = {}
    while len(found) < NAMES:
        found["".join(rng.choice(letters) for letters in shape)] = None
    return tuple(found)


def _facts(rng: random.Random, of: Mapping[str, list[str]]) -> dict[str, dict[str, str]]:
    """A consistent world: marriages are mutual, a capital lies in its land."""
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
