"""Arithmetic word problems with a Python interpreter: write code, read its reply, correct it, answer.

The numbers are too large to multiply in one's head (least of all a small model's), so the only way is the tool. An
episode ends with ``answer: NUMBER``; reward 1 if it is right, else 0. The interpreter is a real, isolated one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from turnwise.data import Message
from turnwise.environments.base import Environment, call, draw, say, user
from turnwise.ports import Action, Step
from turnwise.tools import Session, python_tool

TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python and see what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}

# (question, expression) with numbers a..f; the first difficulty is long and simple, the others short and worded
QUESTIONS: dict[int, tuple[tuple[str, str], ...]] = {
    1: (
        ("Add {a}, {b}, {c} and {d}.", "{a}+{b}+{c}+{d}"),
        ("Add {a}, {b}, {c}, {d} and {e}.", "{a}+{b}+{c}+{d}+{e}"),
        ("Add {a}, {b}, {c}, {d}, {e} and {f}.", "{a}+{b}+{c}+{d}+{e}+{f}"),
    ),
    2: (
        ("{who} has {a} boxes of {b} {what}. How many {what}?", "{a}*{b}"),
        ("{who} buys {a} {what} for {b} coins each. How many coins?", "{a}*{b}"),
        ("{a} rows of {b} {what}. How many {what}?", "{a}*{b}"),
    ),
    3: (
        ("{who} has {a} boxes of {b} {what} and finds {c} more. How many {what}?", "{a}*{b}+{c}"),
        ("{who} has {a} boxes of {b} {what} and sells {c}. How many {what} are left?", "{a}*{b}-{c}"),
        ("{who} has {a} {what} and buys {b} boxes of {c}. How many {what}?", "{a}+{b}*{c}"),
    ),
    4: (
        ("{who} has {a} boxes of {b} {what} and {c} bags of {d}. How many {what}?", "{a}*{b}+{c}*{d}"),
        ("{who} has {a} boxes of {b} {what}, finds {c} and sells {d}. How many are left?", "{a}*{b}+{c}-{d}"),
        ("{who} puts {a} red and {b} blue {what} in {c} boxes and sells {d}. How many are left?", "({a}+{b})*{c}-{d}"),
    ),
}
WHO = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn")
WHAT = ("pens", "nuts", "eggs", "cups", "figs", "keys")
_ANSWER = re.compile(r"answer:\s*(-?[\d,]*\.?\d+)")


@dataclass(frozen=True)
class Problem:
    question: str
    expression: str
    numbers: tuple[int, ...]

    @property
    def answer(self) -> int:
        return int(eval(self.expression, {"__builtins__": {}}))  # our own template, never the model's text


def make_problem(rng: random.Random, difficulty: int) -> Problem:
    question, expression = rng.choice(QUESTIONS[difficulty])
    numbers = {letter: rng.randint(12, 98) for letter in "abcdef"}
    words = {"who": rng.choice(WHO), "what": rng.choice(WHAT), **numbers}
    used = tuple(numbers[letter] for letter in "abcdef" if f"{{{letter}}}" in expression)
    return Problem(question.format(**words), expression.format(**words), used)


class Calculator(Environment):
    """``reset`` poses a problem; calls of ``python`` are run; ``answer: N`` ends the episode."""

    difficulties: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)
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
        self.problem = draw(make, seed, self.split, key=lambda problem: problem.expression)
        return [user(self.problem.question)]

    async def step(self, action: Action) -> Step:
        self.turn += 1
        found = _ANSWER.findall(action.text)
        if action.calls or action.faults:
            step = await self._run(action)
        elif found:
            right = float(found[-1].replace(",", "")) == self._problem.answer
            return Step([], float(right), terminated=True, info={"success": right})
        else:
            step = Step([user("Call python or write answer: NUMBER")], info={"tool_errors": 1})
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
                self.session = self.session or python_tool().open()
                result = await self.session.arun(code)
                reply, ok = result.output.strip() or "(nothing printed)", result.ok
            self.replies.append((reply, ok))
            errors += not ok
            messages.append({"role": "tool", "name": "python", "content": reply})
        return Step(messages, info={"tool_calls": len(action.calls) + len(action.faults), "tool_errors": errors})

    def close(self) -> None:
        if self.session is not None:
            self.session.close()

    def answer(self) -> str:
        return str(self._problem.answer)

    @property
    def _problem(self) -> Problem:
        assert self.problem is not None, "reset first"
        return self.problem

    # ------------------------------------------------------------ players
    def oracle(self) -> Action:
        if self.replies and self.replies[-1][1]:
            return say(f"answer: {self.replies[-1][0]}")
        return call("python", code=self._problem.expression)

    def random_action(self, rng: random.Random) -> Action:
        if rng.random() < 0.5:
            return say(f"answer: {rng.randint(100, 9999)}")
        a, b = rng.choice(self._problem.numbers), rng.choice(self._problem.numbers)
        return call("python", code=f"{a}{rng.choice('+-*')}{b}")

    def demonstrate(self, rng: random.Random) -> Action:
        """A third plays well; the others guess, compute the wrong thing, or write broken code and ignore the error."""
        self.style = (
            self.style or rng.choices(("good", "guess", "wrong", "broken", "mended"), weights=(32, 18, 24, 12, 14))[0]
        )
        if not self.replies:
            return self._first_call(rng)
        reply, ok = self.replies[-1]
        if ok:
            return say(f"answer: {reply}")
        if self.style == "mended":
            return call("python", code=self._problem.expression)
        return say(f"answer: {self._guess(rng)}")

    def _first_call(self, rng: random.Random) -> Action:
        right = self._problem.expression
        if self.style == "guess":
            return say(f"answer: {self._guess(rng)}")
        if self.style == "wrong":
            return call("python", code=_spoil_sense(right, rng))
        if self.style in ("broken", "mended"):
            return call("python", code=_spoil_syntax(right, rng))
        return call("python", code=right)

    def _guess(self, rng: random.Random) -> int:
        """Of about the right size and round, as people guess."""
        rough = self._problem.answer * rng.uniform(0.5, 1.5)
        return max(100, round(rough, -2 if rough < 1000 else -3))


def _spoil_sense(expression: str, rng: random.Random) -> str:
    """Another operator, or the last operation forgotten: runs, and is wrong."""
    signs = [i for i, ch in enumerate(expression) if ch in "+-*"]
    if len(signs) > 1 and "(" not in expression and rng.random() < 0.4:
        return expression[: signs[-1]]
    at = rng.choice(signs)
    other = rng.choice([sign for sign in "+-*" if sign != expression[at]])
    return expression[:at] + other + expression[at + 1 :]


def _spoil_syntax(expression: str, rng: random.Random) -> str:
    """Code that Python refuses."""
    kind = rng.randrange(3)
    if kind == 0:
        return expression.replace("*", " x ", 1) if "*" in expression else expression + " x"
    if kind == 1:
        return "total=" + expression + "="
    return expression + " pens"
