"""Guess: identify a hidden thing by yes/no questions, in about as few turns as halving the candidates allows.

A thing is its own description (size, colour, shape), so each observation lists the candidates that are still possible.
Candidates are sampled so that greedy halving always ends within the turn limit; after bad questions the last turn has to guess
among several. A guess ends the episode.
Does not know what the agent remembers: each observation is self-contained. ``state_key`` is the set of possible candidates.
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
from turnwise.environments.base import LimitedEpisode, sample_problem, text_action, user_message

FEATURES = (("big", "small"), ("red", "blue", "green", "black"), ("ball", "box", "cup", "hat"))
ATTRIBUTES = tuple(word for feature in FEATURES for word in feature)
PARTS = {" ".join(words): frozenset(words) for words in product(*FEATURES)}
THINGS = tuple(PARTS)
CANDIDATES = {1: 4, 2: 7, 3: 12}
QUESTIONS = {1: 2, 2: 3, 3: 4}  # the least with which halving succeeds; the guess takes one more turn

ASK = re.compile(r"(?:is it )?(?:a )?(\w+) ?\?")
GUESS = re.compile(r"guess:? ([a-z])\.?")
LETTERS = "abcdefghijkl"
PROMPT = "one of these is hidden. ask: is it WORD? when you know: guess LETTER."


@dataclass(frozen=True, slots=True)
class GuessProblem:
    """The candidates and the hidden one."""

    candidates: tuple[str, ...]
    hidden: str

    @property
    def key(self) -> str:
        """The candidates alone: a held-out list is new, whichever of its things is hidden."""
        return ", ".join(sorted(self.candidates))


def has(thing: str, attribute: str) -> bool:
    """Whether a thing has an attribute."""
    return attribute in PARTS[thing]


def divide(things: Sequence[str], attribute: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(things with the attribute, things without it)."""
    return tuple(t for t in things if has(t, attribute)), tuple(t for t in things if not has(t, attribute))


def best_question(things: Sequence[str]) -> str:
    """The attribute with the largest information gain: the one closest to halving ``things``; the first of equals."""
    return min(ATTRIBUTES, key=lambda attribute: abs(2 * sum(has(t, attribute) for t in things) - len(things)))


def solvable(things: Sequence[str], questions: int) -> bool:
    """Whether greedy halving leaves one thing after ``questions`` questions, whichever is hidden."""
    # more things than yes and no can tell apart in so many questions
    if len(things) == 1 or len(things) > 2**questions:
        return len(things) == 1
    return all(solvable(half, questions - 1) for half in divide(things, best_question(things)))


@lru_cache(maxsize=1024)
def problem_of(difficulty: int, split: str, seed: int) -> GuessProblem:
    """Cached, because a whole group of episodes starts from one seed."""

    def make(rng: random.Random) -> GuessProblem:
        while True:
            things = tuple(rng.sample(THINGS, CANDIDATES[difficulty]))
            if solvable(things, QUESTIONS[difficulty]):
                return GuessProblem(things, rng.choice(things))

    return sample_problem(make, seed, split, lambda problem: problem.key)


class Guess(LimitedEpisode):
    """Reward 1 for the right guess within the turn limit, else 0."""

    difficulties = (1, 2, 3)
    limits: ClassVar[Mapping[int, int]] = {difficulty: questions + 1 for difficulty, questions in QUESTIONS.items()}
    max_turns = limits[3]
    facts = ("question", "answer")
    inline = True
    suggests: ClassVar[Mapping[str, Any]] = {
        "difficulty": (1, 2), "history": 1, "context": 96, "max_tokens": 8, "copying": True, "cold_batch": 32,
    }  # fmt: skip
    symbols: ClassVar[str] = rf"(?:, | not | )?(?:{'|'.join(ATTRIBUTES)})| [a-l]\b"
    deterministic = True

    def begin(self, seed: int) -> Sequence[Message]:
        self.problem = problem_of(self.difficulty, self.split, seed)
        self.remaining = self.problem.candidates
        return [{"role": "system", "content": PROMPT}, user_message(self._status())]

    def act(self, action: Action) -> Step:
        text = action.text.strip().lower()
        if (question := ASK.fullmatch(text)) and question[1] in ATTRIBUTES:
            attribute, yes = question[1], has(self.problem.hidden, question[1])
            matching, others = divide(self.remaining, attribute)
            self.remaining = matching if yes else others
            reply = f"it is {'' if yes else 'not '}{attribute}. {self._status()}"
            return Step([user_message(reply)], info={"tool_errors": 0, "facts": {"question": 1.0}})
        if (guess := GUESS.fullmatch(text)) and guess[1] in LETTERS[: len(self.problem.candidates)]:
            hidden = self._letter(self.problem.hidden)
            right = guess[1] == hidden
            reply = "right." if right else f"wrong: {hidden}."
            info = {"tool_errors": 0, "facts": {"answer": 1.0}, "success": right}
            return Step([user_message(reply)], float(right), terminated=True, info=info)
        reply = f"say: is it WORD? or: guess LETTER. {self._status()}"
        return Step([user_message(reply)], info={"tool_errors": 1})

    def _status(self) -> str:
        """The candidates still possible, and the number of turns left."""
        candidates = ", ".join(f"{thing} {self._letter(thing)}" for thing in self.remaining)
        return f"{candidates}. {self.max_turns - self.turns} left."

    def answer(self) -> str:
        return f"guess {self._letter(self.problem.hidden)}"

    def _letter(self, thing: str) -> str:
        return LETTERS[self.problem.candidates.index(thing)]

    def state_key(self) -> str:
        return ", ".join(sorted(self.remaining))

    def oracle(self) -> Action:
        """Halve until one candidate is left; in the last turn, guess the first possible one."""
        last = self.turns >= self.max_turns - 1
        if last or len(self.remaining) == 1:
            return text_action(f"guess {self._letter(self.remaining[0])}")
        return text_action(f"is it {best_question(self.remaining)}?")

    def random_action(self, rng: random.Random) -> Action:
        return self._blind(rng, guess=rng.random() < 0.5)

    def demonstrate(self, rng: random.Random) -> Action:
        """The oracle in 45 % of the turns; otherwise a random question, or in the last turn a random guess."""
        if rng.random() < 0.45:
            return self.oracle()
        return self._blind(rng, guess=self.turns >= self.max_turns - 1)

    def _blind(self, rng: random.Random, guess: bool) -> Action:
        letters = LETTERS[: len(self.problem.candidates)]
        return text_action(f"guess {rng.choice(letters)}" if guess else f"is it {rng.choice(ATTRIBUTES)}?")
