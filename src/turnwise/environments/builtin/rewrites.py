"""Word problems in other words: harder to read, with the answer of the original.

    background    the problem inside a story that has nothing to do with it
    term          an invented word for what is asked
    sub_problem   one number replaced by a small problem whose result it is

Each takes a problem and a random generator and returns a problem. Knows no episode and no policy.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class WordProblem:
    """A question, the expression that solves it, and the values of its names."""

    question: str
    expression: str
    numbers: tuple[tuple[str, int], ...]  # (name, value)

    @property
    def answer(self) -> int:
        # the expression comes from a template, never from a model
        return int(eval(self.expression, {"__builtins__": {}}, dict(self.numbers)))

    @property
    def bindings(self) -> str:
        return ";".join(f"{name}={value}" for name, value in self.numbers)


PLACES = ("the harbour", "the old mill", "the night market", "the hill farm")
EVENTS = ("Rain stops the ferry", "A band plays", "The clerk counts the stock", "Guests wait for tea")
TERMS = ("gimble", "dorve", "quill", "zand")
_ASKED = re.compile(r"How many( \w+)??( are left)?\?$")
FREE_NAMES = ("p", "q")  # no template uses them


def background(problem: WordProblem, rng: random.Random) -> WordProblem:
    """Tell a story before the problem."""
    story = f"{rng.choice(EVENTS)} at {rng.choice(PLACES)}."
    return WordProblem(f"{story} {problem.question}", problem.expression, problem.numbers)


def term(problem: WordProblem, rng: random.Random) -> WordProblem:
    """Define a word for the asked quantity, and ask for the word."""
    word, asked = rng.choice(TERMS), _ASKED.search(problem.question)
    assert asked is not None, problem.question
    defined = f"A {word} is how many{asked[1] or ''} there are at the end."
    rest = problem.question[: asked.start()]
    return WordProblem(f"{defined} {rest}What is the {word}?", problem.expression, problem.numbers)


def sub_problem(problem: WordProblem, rng: random.Random) -> WordProblem:
    """Take the value of one name away and give a sum or a difference that has it. The name is then unknown to the interpreter."""
    name, value = rng.choice(problem.numbers)
    p, q = FREE_NAMES
    if rng.random() < 0.5:
        part = rng.randint(1, value - 1)
        given, words, sign = ((p, part), (q, value - part)), f"{name} is {p}={part} plus {q}={value - part}.", "+"
    else:
        part = rng.randint(12, 98)
        given, words, sign = ((p, value + part), (q, part)), f"{name} is {p}={value + part} minus {q}={part}.", "-"
    question = problem.question.replace(f"{name}={value}", name)
    expression = re.sub(rf"\b{name}\b", f"({p}{sign}{q})", problem.expression)
    numbers = (*(pair for pair in problem.numbers if pair[0] != name), *given)
    return WordProblem(f"{words} {question}", expression, numbers)


Rewrite = Callable[[WordProblem, random.Random], WordProblem]
REWRITES: tuple[Rewrite, ...] = (background, term, sub_problem)  # wordings 1, 2 and 3; wording 0 is the original


def reworded(problem: WordProblem, wording: int) -> WordProblem:
    """Wording ``wording`` of a problem, always the same. The answer is the original's."""
    if not wording:
        return problem
    make = REWRITES[wording - 1]
    written = make(problem, random.Random(f"rewrite/{wording}/{problem.question}"))
    assert written.answer == problem.answer, (problem, written)
    return written
