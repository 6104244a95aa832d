"""Countdown: one turn, one expression that evaluates to the target and uses each given number exactly once.

Every task is solvable, because its target is made by combining its numbers. Expressions are parsed with ``ast`` and evaluated
by a tree walk: model output is never executed. Does not store how the target was made; the oracle searches for a solution.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import Environment, sample_problem, text_action, user_message

MAX_NUMBER = {1: 20, 2: 12, 3: 10}  # by difficulty; a task has difficulty + 1 numbers
ORACLE_SHARE = {1: 0.32, 2: 0.4, 3: 0.42}  # of a demonstrator's actions; random ones add lucky hits
TARGETS = range(1, 100)
MAX_LENGTH = 120  # characters; also bounds the nesting depth of the parser
ALLOWED = re.compile(r"[0-9+\-*/() ]+")
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip

Term = tuple[int, str]  # a value and its expression


@dataclass(frozen=True, slots=True)
class CountdownProblem:
    """``Problem((3, 7, 2), 20)``: (3+7)*2."""

    numbers: tuple[int, ...]
    target: int

    @property
    def key(self) -> str:
        """Problems that differ only in the order of their numbers have the same key."""
        return f"{sorted(self.numbers)} {self.target}"


class IllegalExpression(ValueError):
    """An expression that is not legal; the message says why."""


class Countdown(Environment):
    """Reward 1 for the right value, else 0. ``info["rewards"]["format"]`` is 1 for any legal expression."""

    difficulties = (1, 2, 3)
    max_turns = 1
    inline = True
    deterministic = True
    wordings = 3  # the numbers in another order

    def reset(self, seed: int) -> Sequence[Message]:
        self.problem = sample_problem(lambda rng: make_problem(rng, self.difficulty), seed, self.split, lambda p: p.key)
        shift = self.wording % len(self.problem.numbers)
        numbers = " ".join(map(str, [*self.problem.numbers[shift:], *self.problem.numbers[:shift]]))
        rules = "use each number exactly once with + - * / and ( ). say only the expression."
        return [user_message(f"numbers: {numbers}. target: {self.problem.target}. {rules}")]

    def step(self, action: Action) -> Step:
        legal, right = 1.0, False
        try:
            value = evaluate(action.text, self.problem.numbers)
            right = value == self.problem.target
            text = f"right: {value}." if right else f"wrong: that is {value}, not {self.problem.target}."
        except IllegalExpression as fault:
            legal, text = 0.0, f"not legal: {fault}."
        info = {"success": right, "rewards": {"format": legal}, "tool_errors": int(not legal)}
        return Step([user_message(text)], float(right), terminated=True, info=info)

    def answer(self) -> str:
        return solve(self.problem)

    def hint(self) -> str:
        """The operators of a solution, without their order."""
        return f"the operators are {' '.join(sorted(c for c in solve(self.problem) if c in '+-*/'))}"

    def hints(self) -> Sequence[str]:
        """What to look for, the operators, the first half of a solution."""
        solution = solve(self.problem)
        return ("combine two numbers first", self.hint(), f"it begins {solution[: len(solution) // 2]}")

    def oracle(self) -> Action:
        return text_action(self.answer())

    def random_action(self, rng: random.Random) -> Action:
        """A random legal expression of the given numbers."""
        texts = [str(n) for n in self.problem.numbers]
        while len(texts) > 1:
            left, right = (texts.pop(rng.randrange(len(texts))) for _ in range(2))
            texts.append(f"({left}{rng.choice('+-*/')}{right})")
        return text_action(_without_parentheses(texts[0]))

    def demonstrate(self, rng: random.Random) -> Action:
        return self.oracle() if rng.random() < ORACLE_SHARE[self.difficulty] else self.random_action(rng)


def make_problem(rng: random.Random, difficulty: int) -> CountdownProblem:
    """Random numbers, and a target made by combining all of them at random."""
    while True:
        numbers = tuple(rng.randint(1, MAX_NUMBER[difficulty]) for _ in range(difficulty + 1))
        terms = [(n, str(n)) for n in numbers]
        while len(terms) > 1:
            left, right = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
            terms.append(rng.choice(list(_combine(left, right))))
        if terms[0][0] in TARGETS:
            return CountdownProblem(numbers, terms[0][0])


def evaluate(text: str, numbers: Sequence[int]) -> Fraction:
    """The exact value of an expression that uses every number exactly once; raises ``IllegalExpression`` otherwise."""
    text = text.strip()
    # names, calls and powers never reach the parser
    if len(text) > MAX_LENGTH or not ALLOWED.fullmatch(text):
        raise IllegalExpression("say only numbers, + - * / and ( )")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise IllegalExpression("the expression cannot be read") from None
    used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    if Counter(used) != Counter(numbers):
        raise IllegalExpression("use each number exactly once")
    return _value(tree)


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        # exact: 1/3*3 is 1
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        raise IllegalExpression("use only + - * / between two numbers")
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Div) and right == 0:
        raise IllegalExpression("it divides by 0")
    return OPERATORS[type(node.op)](left, right)


@lru_cache(maxsize=4096)
def solve(problem: CountdownProblem) -> str:
    """The first solution of an exhaustive search. Positive whole intermediate values suffice: tasks are made of them."""
    solution = _search([(n, str(n)) for n in problem.numbers], problem.target)
    assert solution is not None, f"{problem} was made by combining its numbers"
    return _without_parentheses(solution)


def _search(terms: list[Term], target: int) -> str | None:
    if len(terms) == 1:
        return terms[0][1] if terms[0][0] == target else None
    for i, left in enumerate(terms):
        for j in range(i + 1, len(terms)):
            others = terms[:i] + terms[i + 1 : j] + terms[j + 1 :]
            for term in _combine(left, terms[j]):
                if (solution := _search([*others, term], target)) is not None:
                    return solution
    return None


def _combine(left: Term, right: Term) -> Iterator[Term]:
    """All positive whole values of two terms."""
    (a, s), (b, t) = left, right
    yield a + b, f"({s}+{t})"
    yield a * b, f"({s}*{t})"
    if a > b:
        yield a - b, f"({s}-{t})"
    if b > a:
        yield b - a, f"({t}-{s})"
    # whole quotients, once where both are equal
    if a % b == 0:
        yield a // b, f"({s}/{t})"
    if b % a == 0 and a != b:
        yield b // a, f"({t}/{s})"


def _without_parentheses(text: str) -> str:
    """The expression without its outermost parentheses, which every combined term has."""
    return text[1:-1] if text.startswith("(") else text
