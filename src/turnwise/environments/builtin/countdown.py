"""Countdown: one turn, one expression that reaches the target from the given numbers, each used exactly once.

Every task is solvable, because it is made by combining its own numbers. Expressions are read with ``ast`` and walked by
hand: nothing the model writes is ever run. It does not know how the numbers were combined when the task was made; the
oracle searches like any other player.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import Environment, draw, say, user

HIGHEST = {1: 20, 2: 12, 3: 10}  # largest given number; there are difficulty + 1 of them
GOOD = {1: 0.32, 2: 0.4, 3: 0.42}  # how often the demonstrator is right on purpose; blind luck comes on top
TARGETS = range(1, 100)
LONGEST = 120  # characters: also keeps the parser far from its nesting limit
READABLE = re.compile(r"[0-9+\-*/() ]+")
OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}

Term = tuple[int, str]  # a value and the text that makes it


@dataclass(frozen=True, slots=True)
class Problem:
    """``Problem((3, 7, 2), 20)``: (3+7)*2."""

    numbers: tuple[int, ...]
    target: int

    @property
    def key(self) -> str:
        """The order of the numbers is not content."""
        return f"{sorted(self.numbers)} {self.target}"


class Unreadable(ValueError):
    """What was wrong with an expression, in words."""


class Countdown(Environment):
    """Reward 1 for the right value, else 0. ``info["rewards"]["format"]`` is 1 for any legal expression."""

    difficulties = (1, 2, 3)
    max_turns = 1
    inline = True

    def reset(self, seed: int) -> Sequence[Message]:
        self.problem = draw(lambda rng: make_problem(rng, self.difficulty), seed, self.split, lambda p: p.key)
        numbers = " ".join(map(str, self.problem.numbers))
        return [
            user(
                f"numbers: {numbers}. target: {self.problem.target}. "
                "use each number exactly once with + - * / and ( ). say only the expression."
            )
        ]

    def step(self, action: Action) -> Step:
        legal, right = 1.0, False
        try:
            value = evaluate(action.text, self.problem.numbers)
            right = value == self.problem.target
            text = f"right: {value}." if right else f"wrong: that is {value}, not {self.problem.target}."
        except Unreadable as problem:
            legal, text = 0.0, f"not legal: {problem}."
        info = {"success": right, "rewards": {"format": legal}, "tool_errors": int(not legal)}
        return Step([user(text)], float(right), terminated=True, info=info)

    def answer(self) -> str:
        return solve(self.problem)

    def oracle(self) -> Action:
        return say(solve(self.problem))

    def random_action(self, rng: random.Random) -> Action:
        """A legal expression of the right numbers, otherwise blind."""
        texts = [str(n) for n in self.problem.numbers]
        while len(texts) > 1:
            left, right = (texts.pop(rng.randrange(len(texts))) for _ in range(2))
            texts.append(f"({left}{rng.choice('+-*/')}{right})")
        return say(_bare(texts[0]))

    def demonstrate(self, rng: random.Random) -> Action:
        return self.oracle() if rng.random() < GOOD[self.difficulty] else self.random_action(rng)


def make_problem(rng: random.Random, difficulty: int) -> Problem:
    """Numbers, and a target made by combining them all at random."""
    while True:
        numbers = tuple(rng.randint(1, HIGHEST[difficulty]) for _ in range(difficulty + 1))
        terms = [(n, str(n)) for n in numbers]
        while len(terms) > 1:
            left, right = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
            terms.append(rng.choice(list(_combine(left, right))))
        if terms[0][0] in TARGETS:
            return Problem(numbers, terms[0][0])


def evaluate(text: str, numbers: Sequence[int]) -> Fraction:
    """The exact value of an expression that uses every number exactly once; raises ``Unreadable`` in words."""
    text = text.strip()
    if len(text) > LONGEST or not READABLE.fullmatch(text):
        raise Unreadable("say only numbers, + - * / and ( )")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unreadable("the expression cannot be read") from None
    used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    if Counter(used) != Counter(numbers):
        raise Unreadable("use each number exactly once")
    return _value(tree)


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        raise Unreadable("use only + - * / between two numbers")
    left, right = _value(node.left), _value(node.right)
    match OPERATORS[type(node.op)]:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    if right == 0:
        raise Unreadable("it divides by 0")
    return left / right


@lru_cache(maxsize=4096)
def solve(problem: Problem) -> str:
    """The first solution found by trying all pairs; whole positive values on the way suffice, tasks are made so."""
    found = _search([(n, str(n)) for n in problem.numbers], problem.target)
    assert found is not None, f"{problem} was made by combining its numbers"
    return _bare(found)


def _search(terms: list[Term], target: int) -> str | None:
    if len(terms) == 1:
        return terms[0][1] if terms[0][0] == target else None
    for i, left in enumerate(terms):
        for j in range(i + 1, len(terms)):
            rest = terms[:i] + terms[i + 1 : j] + terms[j + 1 :]
            for term in _combine(left, terms[j]):
                if (found := _search([*rest, term], target)) is not None:
                    return found
    return None


def _combine(left: Term, right: Term) -> Iterator[Term]:
    """Every whole positive value of two terms."""
    (a, s), (b, t) = left, right
    yield a + b, f"({s}+{t})"
    yield a * b, f"({s}*{t})"
    if a > b:
        yield a - b, f"({s}-{t})"
    if b > a:
        yield b - a, f"({t}-{s})"
    if a % b == 0:
        yield a // b, f"({s}/{t})"
    if b % a == 0 and a != b:
        yield b // a, f"({t}/{s})"


def _bare(text: str) -> str:
    """Without the outermost parentheses, which every combined term has."""
    return text[1:-1] if text.startswith("(") else text
