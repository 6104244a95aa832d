"""A small invented world and the articles about it: people, companies, cities and lands, and how they are related.

Names are invented, so nobody knows a fact from elsewhere, and every name belongs to one split for good: the worlds of
the two splits share no name and therefore no fact. Worlds are made once and shared between episodes; none changes.

It does not know of questions being scored, nor of turns.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from turnwise.environments.base import held_out
from turnwise.environments.search import Index

WORLDS = 16  # per split: enough that reading pays more than remembering
COUNTS = {"company": 16, "person": 32, "city": 12, "land": 4}
RELATIONS = {
    "company": ("founder", "seat"),
    "person": ("birthplace", "spouse"),
    "city": ("land", "mayor"),
    "land": ("capital",),
}
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True, eq=False)
class World:
    """``facts["zelor"] == {"founder": "mikan", "seat": "tobar"}``; article *i* is about ``names[i]``."""

    names: tuple[str, ...]
    kinds: Mapping[str, str]
    facts: Mapping[str, Mapping[str, str]]
    articles: tuple[str, ...]
    index: Index


@dataclass(frozen=True, slots=True)
class Question:
    """``Question(("zelor", "mikan", "tobar"), ("founder", "birthplace"))``: relations lead from name to name."""

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


@lru_cache(maxsize=2 * WORLDS)
def world(split: str, number: int) -> World:
    rng = random.Random(f"world/{split}/{number}")
    names = _names(rng, sum(COUNTS.values()), split != "train")
    kinds = dict(zip(names, (kind for kind, count in COUNTS.items() for _ in range(count))))
    facts = _facts(rng, {kind: [n for n in names if kinds[n] == kind] for kind in COUNTS})
    articles = tuple(_article(name, kinds[name], facts[name]) for name in names)
    return World(names, kinds, facts, articles, Index(articles))


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


def _names(rng: random.Random, count: int, hold_out: bool) -> tuple[str, ...]:
    """Different invented names of one split."""
    found: dict[str, None] = {}
    while len(found) < count:
        a, c, e = (rng.choice(CONSONANTS) for _ in range(3))
        b, d = (rng.choice(VOWELS) for _ in range(2))
        name = a + b + c + d + e
        if held_out(name) == hold_out:
            found[name] = None
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


def _article(name: str, kind: str, facts: Mapping[str, str]) -> str:
    known = " ".join(f"the {relation} of {name} is {other}." for relation, other in facts.items())
    return f"{name} is a {kind}. {known}"
