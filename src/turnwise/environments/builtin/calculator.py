"""Arithmetic word problems with a Python interpreter: write code, read its output, correct it, answer.

The numbers of a problem are named, and the interpreter defines these names. They are too large for a small model to multiply
without the tool. An episode ends with ``answer: X``, where X is a number or a name that the interpreter has defined by then;
reward 1 if its value is right, else 0. Each episode has its own isolated interpreter: after an error the name does not exist,
so an agent that ignores the error has no answer. Knows no model and no reward other than this one.

    --env calculator,rewrites=3       each training task shows its question or one of three harder wordings of it

A wording keeps the answer: a story around the problem, an invented term for what is asked, a number given by a sub-problem.
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
from turnwise.environments import base
from turnwise.environments.base import Environment
from turnwise.errors import SettingError
from turnwise.tools import SandboxSession, python_tool

TOOL = base.tool_schema("python", "Run Python and see what it prints.", code="string")

# (question, expression) over the numbers a..d; each difficulty adds one operation
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
MAX_CALLS = 4  # per turn
STYLES = {"good": 28, "guess": 22, "wrong": 24, "broken": 16, "mended": 10}  # of demonstrations, in percent


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


def make_problem(rng: random.Random, difficulty: int) -> WordProblem:
    """A random problem of a difficulty."""
    question, expression = rng.choice(QUESTIONS[difficulty])
    numbers = tuple((name, rng.randint(12, 98)) for name in "abcd" if name in expression)
    words = {"who": rng.choice(WHO), "what": rng.choice(WHAT), **{name: f"{name}={value}" for name, value in numbers}}
    return WordProblem(question.format(**words), expression, numbers)


# ------------------------------------------------------------------ wordings

PLACES = ("the harbour", "the old mill", "the night market", "the hill farm")
EVENTS = ("Rain stops the ferry", "A band plays", "The clerk counts the stock", "Guests wait for tea")
TERMS = ("gimble", "dorve", "quill", "zand")
FREE_NAMES = ("p", "q")  # no template uses them


def background(problem: WordProblem, rng: random.Random) -> WordProblem:
    """Tell a story before the problem."""
    return replace(problem, question=f"{rng.choice(EVENTS)} at {rng.choice(PLACES)}. {problem.question}")


def term(problem: WordProblem, rng: random.Random) -> WordProblem:
    """Define a word for the asked quantity, and ask for the word."""
    word, question = rng.choice(TERMS), re.search(r"How many( \w+)??( are left)?\?$", problem.question)
    assert question is not None, problem.question
    defined = f"A {word} is how many{question[1] or ''} there are at the end."
    rest = problem.question[: question.start()]
    return replace(problem, question=f"{defined} {rest}What is the {word}?")


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


REWRITES = (background, term, sub_problem)  # wordings 1, 2 and 3; wording 0 is the original


def reworded(problem: WordProblem, wording: int) -> WordProblem:
    """Wording ``wording`` of a problem, always the same. The answer is the original's."""
    if not wording:
        return problem
    written = REWRITES[wording - 1](problem, random.Random(f"rewrite/{wording}/{problem.question}"))
    assert written.answer == problem.answer, (problem, written)
    return written


class Calculator(Environment):
    """``reset`` states a problem, calls of ``python`` are executed, ``answer: X`` ends the episode."""

    difficulties: ClassVar[tuple[int, ...]] = (1, 2, 3)
    max_turns = 5
    deterministic = True
    tools: Sequence[dict[str, Any]] = (TOOL,)
    wordings = 1 + len(REWRITES)
    facts: ClassVar[tuple[str, ...]] = ("error",)  # the first wrong turn so far, −1 for none

    def __init__(self, *, difficulty: int = 1, split: str = "train", rewrites: int = 0) -> None:
        super().__init__(difficulty=difficulty, split=split)
        if not 0 <= rewrites <= len(REWRITES):
            raise SettingError(f"rewrites is {rewrites}; write 0 to {len(REWRITES)}")
        self.rewrites = rewrites if split == "train" else 0  # held-out questions stay as they are
        self.replies: list[tuple[str, bool]] = []  # (output of the interpreter, whether it ran without an error)
        self.session: SandboxSession | None = None
        self.style = ""
        self.turn, self.first_error = 0, -1

    def reset(self, seed: int) -> list[Message]:
        make = lambda rng: make_problem(rng, self.difficulty)  # noqa: E731
        plain = base.sample_problem(make, seed, self.split, lambda problem: problem.expression + problem.bindings)
        drawn = random.Random(f"wording/{seed}").randrange(1 + self.rewrites)
        self.problem = reworded(plain, (self.wording or drawn) % self.wordings)
        return [base.user_message(self.problem.question)]

    async def step(self, action: Action) -> Step:
        """A turn is wrong if a call fails or cannot be read, or if it answers and nothing was computed."""
        self.turn += 1
        answers = re.findall(r"answer:\s*(-?\d[\d,]*\.?\d*|[A-Za-z_]\w*)", action.text)
        if action.calls or action.faults:
            step = await self._run(action)
        elif answers:
            right = await self._value(answers[-1]) == self.problem.answer
            step = Step([], float(right), terminated=True, info={"success": right})
        else:
            step = Step([base.user_message("Call python or write answer: X")], info={"tool_errors": 1})
        if self.turn >= self.max_turns and not step.terminated:
            step = replace(step, truncated=True, info={**step.info, "success": False})
        if self.first_error < 0 and (step.info.get("tool_errors") or (step.terminated and not self.replies)):
            self.first_error = self.turn - 1
        return replace(step, info={**step.info, "facts": {"error": float(self.first_error)}})

    async def _run(self, action: Action) -> Step:
        messages, errors = [base.tool_message("python", fault) for fault in action.faults], len(action.faults)
        for number, request in enumerate(action.calls):
            code = request.arguments.get("code")
            if number >= MAX_CALLS:  # each may take the tool's whole time limit
                reply, ok = f"error: at most {MAX_CALLS} calls at once", False
            elif request.name != "python" or not isinstance(code, str):
                reply, ok = 'error: the only tool is python with {"code": text}', False
            else:
                result = await (await self._interpreter()).arun(code)
                reply, ok = result.output.strip() or "(nothing printed)", result.ok
            self.replies.append((reply, ok))
            errors += not ok
            messages.append(base.tool_message("python", reply))
        return Step(messages, info={"tool_calls": len(action.calls) + len(action.faults), "tool_errors": errors})

    async def _value(self, answer: str) -> float:
        """The value of an answer, a number or a name; NaN if the name is not defined or holds no number."""
        text = answer.replace(",", "")
        if answer.isidentifier():
            result = await (await self._interpreter()).arun(answer)
            text = result.output if result.ok else ""
        try:
            return float(text)
        except ValueError:
            return math.nan

    async def _interpreter(self) -> SandboxSession:
        if self.session is None:
            self.session = python_tool().open()
            await self.session.arun(self.problem.bindings)
        return self.session

    def close(self) -> None:
        if self.session is not None:
            self.session.close()

    def answer(self) -> str:
        return str(self.problem.answer)

    def hint(self) -> str:
        """The expression to compute, without its value."""
        return f"compute t={self.problem.expression};t"

    def hints(self) -> list[str]:
        """The tool, the names that occur, the expression."""
        names = ", ".join(name for name, _ in self.problem.numbers)
        return ["call python", f"combine {names} in python", self.hint()]

    @staticmethod
    def notice() -> str:
        """A message for the user before the first episode: how untrusted code is isolated."""
        return f"python tool: {python_tool().describe()}"

    # --------------------------------------------------- scripted policies
    def oracle(self) -> Action:
        if self.replies and self.replies[-1][1]:
            return base.text_action("answer: t")
        return base.tool_action("python", code=f"t={self.problem.expression};t")

    def random_action(self, rng: random.Random) -> Action:
        if rng.random() < 0.5:
            return base.text_action(f"answer: {rng.choice(['t', rng.randint(100, 9999)])}")
        names = [name for name, _ in self.problem.numbers]
        return base.tool_action("python", code=f"t={rng.choice(names)}{rng.choice('+-*')}{rng.choice(names)};t")

    def demonstrate(self, rng: random.Random) -> Action:
        """About a third of the episodes is correct; the others guess, compute a wrong expression, or write invalid code and
        ignore the error."""
        # drawn once: a demonstrator does not change its mind within an episode
        self.style = self.style or rng.choices(tuple(STYLES), weights=tuple(STYLES.values()))[0]
        expression = self.problem.expression
        if self.replies and self.replies[-1][1]:
            return base.text_action("answer: t")
        if self.replies and self.style != "mended":
            return base.text_action(f"answer: {rng.choice(['t', self._guess(rng)])}")
        if not self.replies:
            if self.style == "guess":
                return base.text_action(f"answer: {self._guess(rng)}")
            if self.style == "wrong":
                expression = _wrong_expression(expression, rng)
            if self.style in ("broken", "mended"):
                expression = _invalid_expression(expression, rng)
        return base.tool_action("python", code=f"t={expression};t")

    def _guess(self, rng: random.Random) -> int:
        """A rounded number of about the right magnitude."""
        rough = self.problem.answer * rng.uniform(0.5, 1.5)
        return max(100, int(round(rough, 1 - len(str(int(rough))))))


def _wrong_expression(expression: str, rng: random.Random) -> str:
    """A valid but wrong expression: another operator, or without the last operation."""
    signs = [i for i, ch in enumerate(expression) if ch in "+-*"]
    if len(signs) > 1 and "(" not in expression and rng.random() < 0.4:
        return expression[: signs[-1]]
    at = rng.choice(signs)
    other = rng.choice([sign for sign in "+-*" if sign != expression[at]])
    return expression[:at] + other + expression[at + 1 :]


def _invalid_expression(expression: str, rng: random.Random) -> str:
    """An expression that Python rejects: an unknown operator, an undefined name, or an incomplete statement."""
    kind = rng.randrange(3)
    if kind == 0:
        return expression.replace("*", " x ", 1) if "*" in expression else expression + " x"
    if kind == 1:
        name = "b" if "b" in expression else next(ch for ch in expression if ch.isalpha())
        return expression.replace(name, "n")
    return expression + "="
