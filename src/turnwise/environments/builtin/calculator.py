"""Arithmetic word problems with a Python interpreter: write code, read its reply, correct it, answer.

The numbers of a problem are named, and the interpreter knows them by these names. They are too large to multiply in one's
head (least of all a small model's), so the only way is the tool. An episode ends with ``answer: X``, where X is a number or
the name of something the interpreter holds by then; reward 1 if that is right, else 0. The interpreter is a real, isolated
one, and each episode has a fresh one: after an error the name does not exist, and whoever ignores the error has no answer.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import Environment, call, draw, say, user
from turnwise.tools import Session, python_tool

TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python and see what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}

# (question, expression) over the numbers a..d; each difficulty has one more operation
QUESTIONS: dict[int, tuple[tuple[str, str], ...]] = {
    1: (
        ("{who} has {a} boxes of {b} {what}. How many {what}?", "a*b"),
        ("{who} buys {a} {what} for {b} coins each. How many coins?", "a*b"),
        ("{who} has {a} {what} and finds {b} more. How many {what}?", "a+b"),
        ("{who} has {a} {what} and sells {b}. How many {what} are left?", "a-b"),
    ),
    2: (
        ("{who} has {a} boxes of {b} {what} and finds {c} more. How many {what}?", "a*b+c"),
        ("{who} has {a} boxes of {b} {what} and sells {c}. How many {what} are left?", "a*b-c"),
        ("{who} has {a} {what} and buys {b} boxes of {c}. How many {what}?", "a+b*c"),
        ("{who} puts {a} red and {b} blue {what} in each of {c} boxes. How many {what}?", "(a+b)*c"),
    ),
    3: (
        ("{who} has {a} boxes of {b} {what} and {c} bags of {d}. How many {what}?", "a*b+c*d"),
        ("{who} has {a} boxes of {b} {what}, finds {c} and sells {d}. How many are left?", "a*b+c-d"),
        ("{who} puts {a} red and {b} blue {what} in {c} boxes and sells {d}. How many are left?", "(a+b)*c-d"),
        ("{who} has {a} {what}, buys {b} boxes of {c} and sells {d}. How many are left?", "a+b*c-d"),
    ),
}
WHO = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn")
WHAT = ("pens", "nuts", "eggs", "cups", "figs", "keys")
_ANSWER = re.compile(r"answer:\s*(-?\d[\d,]*\.?\d*|[A-Za-z_]\w*)")


@dataclass(frozen=True)
class Problem:
    question: str
    expression: str
    numbers: tuple[tuple[str, int], ...]  # what each name stands for

    @property
    def answer(self) -> int:
        return int(eval(self.expression, {"__builtins__": {}}, dict(self.numbers)))  # our own template, no model's text

    @property
    def bindings(self) -> str:
        return ";".join(f"{name}={value}" for name, value in self.numbers)


def make_problem(rng: random.Random, difficulty: int) -> Problem:
    question, expression = rng.choice(QUESTIONS[difficulty])
    numbers = tuple((name, rng.randint(12, 98)) for name in "abcd" if name in expression)
    words = {"who": rng.choice(WHO), "what": rng.choice(WHAT), **{name: f"{name}={value}" for name, value in numbers}}
    return Problem(question.format(**words), expression, numbers)


class Calculator(Environment):
    """``reset`` poses a problem; calls of ``python`` are run; ``answer: N`` ends the episode."""

    difficulties: ClassVar[tuple[int, ...]] = (1, 2, 3)
    max_turns = 5
    tools: Sequence[dict[str, Any]] = (TOOL,)

    def __init__(self, *, difficulty: int = 1, split: str = "train") -> None:
        super().__init__(difficulty=difficulty, split=split)
        self.problem: Problem | None = None
        self.replies: list[tuple[str, bool]] = []  # what the interpreter said, and whether it was no error
        self.session: Session | None = None
        self.style = ""
        self.turn = 0

    def reset(self, seed: int) -> list[Message]:
        make = lambda rng: make_problem(rng, self.difficulty)  # noqa: E731
        self.problem = draw(make, seed, self.split, key=lambda problem: problem.expression + problem.bindings)
        return [user(self.problem.question)]

    async def step(self, action: Action) -> Step:
        self.turn += 1
        found = _ANSWER.findall(action.text)
        if action.calls or action.faults:
            step = await self._run(action)
        elif found:
            right = await self._value(found[-1]) == self._problem.answer
            return Step([], float(right), terminated=True, info={"success": right})
        else:
            step = Step([user("Call python or write answer: X")], info={"tool_errors": 1})
        if self.turn >= self.max_turns:
            return replace(step, truncated=True, info={**step.info, "success": False})
        return step

    async def _run(self, action: Action) -> Step:
        messages: list[Message] = [{"role": "tool", "name": "python", "content": fault} for fault in action.faults]
        errors = len(action.faults)
        for request in action.calls:
            code = request.arguments.get("code")
            if request.name != "python" or not isinstance(code, str):
                reply, ok = 'error: the only tool is python with {"code": text}', False
            else:
                result = await (await self._interpreter()).arun(code)
                reply, ok = result.output.strip() or "(nothing printed)", result.ok
            self.replies.append((reply, ok))
            errors += not ok
            messages.append({"role": "tool", "name": "python", "content": reply})
        return Step(messages, info={"tool_calls": len(action.calls) + len(action.faults), "tool_errors": errors})

    async def _value(self, answer: str) -> float:
        """What an answer stands for; not a number where the name does not exist or holds no number."""
        if not answer[0].isalpha():
            return float(answer.replace(",", ""))
        result = await (await self._interpreter()).arun(answer)
        try:
            return float(result.output) if result.ok else math.nan
        except ValueError:
            return math.nan

    async def _interpreter(self) -> Session:
        if self.session is None:
            self.session = python_tool().open()
            await self.session.arun(self._problem.bindings)
        return self.session

    def close(self) -> None:
        if self.session is not None:
            self.session.close()

    def answer(self) -> str:
        return str(self._problem.answer)

    def hint(self) -> str:
        """What to compute; not what comes out."""
        return f"compute t={self._problem.expression};t"

    @property
    def _problem(self) -> Problem:
        assert self.problem is not None, "reset first"
        return self.problem

    @staticmethod
    def notice() -> str:
        """What a user should know before the first episode: how the untrusted code is held."""
        return f"python tool: {python_tool().describe()}"

    # ------------------------------------------------------------ players
    def oracle(self) -> Action:
        if self.replies and self.replies[-1][1]:
            return say("answer: t")
        return call("python", code=f"t={self._problem.expression};t")

    def random_action(self, rng: random.Random) -> Action:
        if rng.random() < 0.5:
            return say(f"answer: {rng.choice(['t', rng.randint(100, 9999)])}")
        names = [name for name, _ in self._problem.numbers]
        return call("python", code=f"t={rng.choice(names)}{rng.choice('+-*')}{rng.choice(names)};t")

    def demonstrate(self, rng: random.Random) -> Action:
        """A third plays well; the others guess, compute the wrong thing, or write broken code and ignore the error."""
        self.style = (
            self.style or rng.choices(("good", "guess", "wrong", "broken", "mended"), weights=(28, 22, 24, 16, 10))[0]
        )
        right = self._problem.expression
        if not self.replies:
            return self._first_call(right, rng)
        if self.replies[-1][1]:
            return say("answer: t")
        if self.style == "mended":
            return call("python", code=f"t={right};t")
        return say(f"answer: {rng.choice(['t', self._guess(rng)])}")

    def _first_call(self, right: str, rng: random.Random) -> Action:
        if self.style == "guess":
            return say(f"answer: {self._guess(rng)}")
        if self.style == "wrong":
            right = _spoil_sense(right, rng)
        if self.style in ("broken", "mended"):
            right = _spoil_syntax(right, rng)
        return call("python", code=f"t={right};t")

    def _guess(self, rng: random.Random) -> int:
        """Of about the right size and round, as people guess."""
        rough = self._problem.answer * rng.uniform(0.5, 1.5)
        return max(100, int(round(rough, 1 - len(str(int(rough))))))


def _spoil_sense(expression: str, rng: random.Random) -> str:
    """Another operator, or the last operation forgotten: runs, and is wrong."""
    signs = [i for i, ch in enumerate(expression) if ch in "+-*"]
    if len(signs) > 1 and "(" not in expression and rng.random() < 0.4:
        return expression[: signs[-1]]
    at = rng.choice(signs)
    other = rng.choice([sign for sign in "+-*" if sign != expression[at]])
    return expression[:at] + other + expression[at + 1 :]


def _spoil_syntax(expression: str, rng: random.Random) -> str:
    """Code that Python refuses: a sign of its own making, a name nobody gave, a statement cut short."""
    kind = rng.randrange(3)
    if kind == 0:
        return expression.replace("*", " x ", 1) if "*" in expression else expression + " x"
    if kind == 1:
        return expression.replace("b", "n")
    return expression + "="
