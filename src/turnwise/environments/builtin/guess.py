"""Guess: find the hidden thing by yes/no questions, in about as few turns as halving the candidates allows.

A thing is its own description (size, colour, shape), so all a player needs is the list, of which each answer leaves what
is still possible. Candidates are drawn so that greedy halving always ends in time; a player that asks badly has to guess
among several in its last turn. A guess ends it.

It does not know what the player remembers: each observation stands alone. ``state_key`` is the set still possible.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import Quiz, draw, say, user

FEATURES = (("big", "small"), ("red", "blue", "green", "black"), ("ball", "box", "cup", "hat"))
ATTRIBUTES = tuple(word for feature in FEATURES for word in feature)
PARTS = {" ".join(words): frozenset(words) for words in product(*FEATURES)}
THINGS = tuple(PARTS)
CANDIDATES = {1: 4, 2: 7, 3: 12}
QUESTIONS = {1: 2, 2: 3, 3: 4}  # the least with which halving can succeed; the guess is one turn more

ASK = re.compile(r"(?:is it )?(?:a )?(\w+) ?\?")
GUESS = re.compile(r"guess:? ([a-z])\.?")
LETTERS = "abcdefghijkl"
PROMPT = "one of these is hidden. ask: is it WORD? when you know: guess LETTER."


@dataclass(frozen=True, slots=True)
class Problem:
    candidates: tuple[str, ...]
    hidden: str

    @property
    def key(self) -> str:
        """The candidates alone: a held-out list is new whatever is hidden in it."""
        return ", ".join(sorted(self.candidates))


def has(thing: str, attribute: str) -> bool:
    return attribute in PARTS[thing]


def divide(things: Sequence[str], attribute: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those that have the attribute, and the others."""
    return tuple(t for t in things if has(t, attribute)), tuple(t for t in things if not has(t, attribute))


def best(things: Sequence[str]) -> str:
    """The attribute that tells most: of a yes/no answer, the one nearest to halving. First of equals."""
    return min(ATTRIBUTES, key=lambda attribute: abs(2 * sum(has(t, attribute) for t in things) - len(things)))


def in_time(things: Sequence[str], questions: int) -> bool:
    """Whether greedy halving is down to one thing after so many questions, whatever is hidden."""
    if len(things) == 1 or len(things) > 2**questions:
        return len(things) == 1
    return all(in_time(half, questions - 1) for half in divide(things, best(things)))


@lru_cache(maxsize=1024)
def problem_of(difficulty: int, split: str, seed: int) -> Problem:
    """Cached, because a whole group of episodes starts from one seed."""
    return draw(lambda rng: _make(rng, difficulty), seed, split, lambda problem: problem.key)


def _make(rng: random.Random, difficulty: int) -> Problem:
    while True:
        things = tuple(rng.sample(THINGS, CANDIDATES[difficulty]))
        if in_time(things, QUESTIONS[difficulty]):
            return Problem(things, rng.choice(things))


class Guess(Quiz):
    """Reward 1 for the right guess in time, else 0."""

    difficulties = (1, 2, 3)
    limits: ClassVar[Mapping[int, int]] = {difficulty: questions + 1 for difficulty, questions in QUESTIONS.items()}
    max_turns = limits[3]
    facts = ("question", "answer")
    inline = True
    suggests: ClassVar[Mapping[str, Any]] = {
        "difficulty": (1, 2),
        "history": 1,
        "context": 96,
        "max_tokens": 8,
        "copying": True,
        "cold_batch": 32,
    }
    symbols: ClassVar[str] = rf"(?:, | not | )?(?:{'|'.join(ATTRIBUTES)})| [a-l]\b"
    problem: Problem
    remaining: tuple[str, ...]

    def reset(self, seed: int) -> Sequence[Message]:
        self.begin(seed)
        return [{"role": "system", "content": PROMPT}, user(self._left())]

    def begin(self, seed: int) -> None:
        super().begin(seed)
        self.problem = problem_of(self.difficulty, self.split, seed)
        self.remaining = self.problem.candidates

    def step(self, action: Action) -> Step:
        if self.over:
            return self._answer("it is over.")
        self.turns += 1
        text = action.text.strip().lower()
        if (asked := ASK.fullmatch(text)) and asked[1] in ATTRIBUTES:
            return self._tell(asked[1])
        if (guess := GUESS.fullmatch(text)) and guess[1] in self._letters():
            self.said = guess[1]
            text = "right." if self.won else f"wrong: {self.right}."
            return self._answer(text, reward=float(self.won), told="answer")
        return self._answer(f"say: is it WORD? or: guess LETTER. {self._left()}", errors=1)

    def _tell(self, attribute: str) -> Step:
        yes = has(self.problem.hidden, attribute)
        with_it, without = divide(self.remaining, attribute)
        self.remaining = with_it if yes else without
        return self._answer(f"it is {'' if yes else 'not '}{attribute}. {self._left()}", told="question")

    def _left(self) -> str:
        """What is still possible, and how many turns are left."""
        listed = ", ".join(f"{thing} {self._letter(thing)}" for thing in self.remaining)
        return f"{listed}. {self.max_turns - self.turns} left."

    def _answer(self, text: str, reward: float = 0.0, errors: int = 0, told: str = "") -> Step:
        return self.reply([user(text)], reward, {told: 1.0} if told else None, tool_errors=errors)

    @property
    def right(self) -> str:
        return self._letter(self.problem.hidden)

    def answer(self) -> str:
        return f"guess {self.right}"

    def _letters(self) -> str:
        return LETTERS[: len(self.problem.candidates)]

    def _letter(self, thing: str) -> str:
        return LETTERS[self.problem.candidates.index(thing)]

    def state_key(self) -> str:
        return ", ".join(sorted(self.remaining))

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"remaining": list(self.remaining)}

    def restore(self, snapshot: Any) -> None:
        super().restore(snapshot)
        self.remaining = tuple(snapshot["remaining"])

    def oracle(self) -> Action:
        """Halve until one is left; with one turn to go, take the first that is still possible."""
        last = self.turns >= self.max_turns - 1
        if last or len(self.remaining) == 1:
            return say(f"guess {self._letter(self.remaining[0])}")
        return say(f"is it {best(self.remaining)}?")

    def random_action(self, rng: random.Random) -> Action:
        if rng.random() < 0.5:
            return say(f"guess {rng.choice(self._letters())}")
        return say(f"is it {rng.choice(ATTRIBUTES)}?")

    def demonstrate(self, rng: random.Random) -> Action:
        """Forgets what it asked on every other turn, and then asks, or at the end guesses, blindly."""
        if rng.random() < 0.45:
            return self.oracle()
        if self.turns >= self.max_turns - 1:
            return say(f"guess {rng.choice(self._letters())}")
        return say(f"is it {rng.choice(ATTRIBUTES)}?")
