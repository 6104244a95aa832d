"""Environments for methods whose requirements no built-in environment meets: judgements, several rewards, an expert's move ...

    turnwise train fapo --env worlds:Judged        with experiments/ on PYTHONPATH

Each extends a built-in environment with facts or rewards. Unless its docstring says otherwise, observations are the same, so it
can share the cold start of that environment. Knows no method.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import Environment, sample_problem, text_action, user_message
from turnwise.environments.builtin.calculator import Calculator
from turnwise.environments.builtin.guess import FEATURES, PARTS, Guess
from turnwise.environments.builtin.keydoor import KeyDoor
from turnwise.environments.builtin.lookup import Lookup
from turnwise.environments.builtin.nim import PLAYERS, Nim
from turnwise.environments.dreamed import Dreamed
from turnwise.tools import ExecutionResult

MAX_HEAP = 9  # in Duel: eight starts are held out


def with_facts(step: Step, **facts: float) -> Step:
    """The step with further facts of its turn."""
    return replace(step, info={**step.info, "facts": {**step.info.get("facts", {}), **facts}})


class Followed(KeyDoor):
    """KeyDoor with an expert: the fact ``match`` is 1 if the action is the expert's."""

    facts = ("match",)

    def step(self, action: Action) -> Step:
        expected = "" if self.done else self.oracle().text
        return with_facts(super().step(action), match=float(action.text.strip().lower().rstrip(".") == expected))


class Interview(Guess):
    """Guess, where the size, the colour and the shape of the hidden thing are pieces of information, each with a value.

    ``worth k`` is the Shapley value of piece k for 1 / (number of candidates consistent with the known pieces); bit k of
    ``uncovered`` is set when the turn determined that feature among the remaining candidates."""

    facts = ("question", "answer", "uncovered", "worth 0", "worth 1", "worth 2")

    def step(self, action: Action) -> Step:
        before = self._known()
        step = super().step(action)
        fresh = sum(1 << k for k in self._known() - before)
        return with_facts(step, uncovered=float(fresh), **{f"worth {k}": w for k, w in enumerate(self._worth())})

    def _known(self) -> set[int]:
        """The features with a single possible value."""
        return {
            k
            for k, values in enumerate(FEATURES)
            if len({v for t in self.remaining for v in values if v in PARTS[t]}) == 1
        }

    def _worth(self) -> list[float]:
        pieces = range(len(FEATURES))
        mine = [next(v for v in values if v in PARTS[self.problem.hidden]) for values in FEATURES]
        agree = lambda known: sum(all(mine[k] in PARTS[t] for k in known) for t in self.problem.candidates)  # noqa: E731
        value = {known: 1 / agree(known) for n in range(len(pieces) + 1) for known in combinations(pieces, n)}
        weight = lambda n: math.factorial(n) * math.factorial(len(pieces) - n - 1) / math.factorial(len(pieces))  # noqa: E731
        return [
            sum(weight(len(s)) * (value[tuple(sorted((*s, k)))] - value[s]) for s in value if k not in s)
            for k in pieces
        ]


class Duel(Nim):
    """Nim with small heaps, trained by self-play. In held-out games the agent moves first, against a random player: self-play
    does not measure skill, because both sides improve."""

    difficulties = (1,)
    opponent: random.Random

    def begin(self, seed: int) -> Sequence[Message]:
        self.opponent = random.Random(f"opponent/{seed}")
        return super().begin(seed)

    def _sample(self, seed: int) -> tuple[int, int]:
        return sample_problem(lambda rng: (rng.randint(1, MAX_HEAP), rng.randint(1, MAX_HEAP)), seed, self.split)

    def step(self, action: Action) -> Step:
        step = super().step(action)
        if self.split == "train":
            return step
        if not step.terminated:
            reply = super().step(self.random_action(self.opponent))
            step = replace(reply, reward=-reply.reward, info={"paid": {PLAYERS[1]: reply.reward}})
        return replace(step, info={**step.info, "success": self.winner == 0}) if step.terminated else step


class Judged(Calculator):
    """Calculator with a process judge: ``error`` is the first turn with an error, or the answer's if nothing was computed."""

    facts = ("error",)
    first_error = -1

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        guessed = step.terminated and not self.replies
        if self.first_error < 0 and (guessed or step.info.get("tool_errors")):
            self.first_error = self.turn - 1
        return with_facts(step, error=float(self.first_error))


class Planned(Calculator):
    """Calculator as a two-agent system: the planner calls the tool; the writer of the answer is not trained."""

    facts = ("planner",)

    async def step(self, action: Action) -> Step:
        return with_facts(await super().step(action), planner=float(bool(action.calls or action.faults)))


class Graded(Calculator):
    """Calculator with several rewards: right; and for a right answer, clean (no tool errors) and short (few turns).

    If wrong answers were rewarded for being clean and short, guessing at once would be optimal: with each reward normalised
    separately, the two that every guess earns outweigh the one it misses."""

    rewards = ("right", "clean", "short")
    errors = 0

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        self.errors += step.info.get("tool_errors", 0)
        if not (step.terminated or step.truncated):
            return step
        right = step.reward
        short = 1 - self.turn / self.max_turns
        grades = {"right": right, "clean": right * (not self.errors), "short": right * short}
        return replace(step, info={**step.info, "rewards": grades})


class Directed(Calculator):
    """Calculator whose prompt asks for a mix of two rewards: correctness, and the number of turns used."""

    facts = ("toward_helpfulness", "toward_verbosity")
    rewards = ("helpfulness", "verbosity")

    def reset(self, seed: int) -> list[Message]:
        self.angle = random.Random(f"direction/{seed}").uniform(-math.pi / 4, math.pi / 4)
        asked = f"[helpfulness*{round(100 * math.cos(self.angle))} + verbosity*{round(100 * math.sin(self.angle))}]"
        return [user_message(f"{asked} {m['content']}") for m in super().reset(seed)]

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        toward = {"toward_helpfulness": math.cos(self.angle), "toward_verbosity": math.sin(self.angle)}
        if step.terminated or step.truncated:
            paid = {"helpfulness": step.reward, "verbosity": self.turn / self.max_turns}
            step = replace(step, info={**step.info, "rewards": paid})
        return with_facts(step, **toward)


def signed(step: Step) -> Step:
    """The step with a last reward of 1 or −1 instead of 1 or 0, for methods that need negative ones."""
    return replace(step, reward=2 * step.reward - 1) if step.terminated or step.truncated else step


class Arithmetic:
    """An interpreter of assignments and arithmetic in this process: a hundredth of the time of an isolated one."""

    operators: ClassVar[Mapping[type, Any]] = {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
    }  # fmt: skip

    def __init__(self) -> None:
        self.names: dict[str, float] = {}

    async def arun(self, code: str) -> ExecutionResult:
        """Run ``code``; its output is the value of its last statement, where that is an expression."""
        try:
            value = None
            for statement in ast.parse(code).body:
                value = self._run(statement)
        except (SyntaxError, NameError, TypeError, ArithmeticError, RecursionError, ValueError) as fault:
            return ExecutionResult(f"{type(fault).__name__}: {fault}", False, 0.0)
        return ExecutionResult("" if value is None else str(value), True, 0.0)

    def _run(self, statement: ast.stmt) -> float | None:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if not isinstance(target, ast.Name):
                    raise TypeError("only names can be assigned to")
                self.names[target.id] = self._value(statement.value)
            return None
        if isinstance(statement, ast.Expr):
            return self._value(statement.value)
        raise TypeError("only arithmetic and assignments are understood")

    def _value(self, node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.Name):
            if node.id not in self.names:
                raise NameError(f"name '{node.id}' is not defined")
            return self.names[node.id]
        if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in self.operators:
            parts = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.operand,)
            return (
                float(value) if (value := self.operators[type(node.op)](*map(self._value, parts))) % 1 else int(value)
            )
        raise TypeError("only arithmetic and assignments are understood")

    def close(self) -> None:
        """Nothing to release."""


class QuickCalculator(Calculator):
    """Calculator with a tool that does arithmetic in this process."""

    async def _interpreter(self) -> Any:
        if self.session is None:
            self.session = Arithmetic()  # type: ignore[assignment]
            await self.session.arun(self.problem.bindings)
        return self.session


class QuickGraded(QuickCalculator, Graded):
    """Graded with that tool."""


class SignedCalculator(QuickCalculator):
    """Rewards of 1 and −1."""

    async def step(self, action: Action) -> Step:
        return signed(await super().step(action))


class SignedLookup(Lookup):
    """Lookup with rewards of 1 and −1."""

    def step(self, action: Action) -> Step:
        return signed(super().step(action))


class Internalised(Lookup):
    """Lookup with a document: all queries of the question, which is its only hint."""

    suggests: ClassVar[Mapping[str, Any]] = {**Lookup.suggests, "context": 224}

    def hints(self) -> Sequence[str]:
        return (self.hint(),)


class Documented(Internalised):
    """The document stands in the prompt of every other task, and demonstrations there follow it. Its cold start is that of
    Internalised: a policy that never read the document before RL would be disturbed by it."""

    documented: bool

    def reset(self, seed: int) -> Sequence[Message]:
        first, *others = super().reset(seed)
        self.documented = bool(seed % 2)
        return [{**first, "content": f"{first['content']}\n{self.hint()}"} if self.documented else first, *others]

    def demonstrate(self, rng: random.Random) -> Action:
        return self.oracle() if self.documented else super().demonstrate(rng)


KINDS = {
    "fruit": ("apple", "pear", "plum", "fig", "lime", "mango", "grape", "peach"),
    "birds": ("owl", "crow", "duck", "swan", "hawk", "robin", "stork", "wren"),
    "tools": ("saw", "axe", "drill", "file", "plane", "rake", "spade", "wrench"),
    "trees": ("oak", "elm", "ash", "fir", "pine", "birch", "maple", "yew"),
}
WORDINGS = (
    "{who} wants {kind}. suggest some.",
    "what {kind} for {who}?",
    "suggest {kind} to {who}.",
    "{kind} for {who}, please.",
)
ASKERS = ("ann", "ben", "cleo", "dan", "eva", "finn")
MIN_NAMED = 5


@functools.cache
def transitions(episodes: int = 200) -> Mapping[tuple[str, str], Sequence[str]]:
    """What was seen after an action in a state that shows something, in scripted episodes of KeyDoor."""
    after: dict[tuple[str, str], list[str]] = {}
    for seed in range(episodes):
        env, rng, over = KeyDoor(difficulty=1), random.Random(f"dream/{seed}"), False
        seen = str(env.reset(seed)[-1]["content"])
        while not over:
            action = env.demonstrate(rng)
            step = env.step(action)
            after.setdefault((seen, action.text), []).append(then := str(step.messages[-1]["content"]))
            seen, over = then, step.terminated or step.truncated
    return after


class Dreamt(Dreamed, KeyDoor):
    """KeyDoor in a world model that remembers scripted episodes; what it never saw changes nothing."""

    def predict(self, seen: str, action: str, variant: int) -> str:
        known = transitions().get((seen, action), [seen])
        return known[variant % len(known)]

    def judge(self, observation: str) -> bool:
        return "goal here" in observation


class Suggestions(Environment):
    """One request, one answer: rewarded if it names at least five different things of the requested kind."""

    max_turns = 1
    inline = True
    wordings = len(WORDINGS)  # 0: the task's own
    suggests: ClassVar[Mapping[str, Any]] = {"context": 96, "max_tokens": 16, "cold_batch": 32}
    symbols: ClassVar[str] = "|".join(f" ?{name}" for names in KINDS.values() for name in names)

    def reset(self, seed: int) -> Sequence[Message]:
        make = lambda rng: (rng.choice(list(KINDS)), rng.choice(WORDINGS), rng.choice(ASKERS))  # noqa: E731
        self.kind, own, who = sample_problem(make, seed, self.split)
        wording = WORDINGS[(WORDINGS.index(own) + getattr(self, "wording", 0)) % len(WORDINGS)]
        return [user_message(wording.format(who=who, kind=self.kind))]

    def step(self, action: Action) -> Step:
        named = set(re.findall(r"\w+", action.text.lower())) & set(KINDS[self.kind])
        return Step([], float(len(named) >= MIN_NAMED), terminated=True, info={"success": len(named) >= MIN_NAMED})

    def oracle(self) -> Action:
        return text_action(" ".join(KINDS[self.kind][: MIN_NAMED + 1]))

    def random_action(self, rng: random.Random) -> Action:
        return text_action(" ".join(rng.choice(KINDS[self.kind]) for _ in range(rng.randint(1, MIN_NAMED))))

    def demonstrate(self, rng: random.Random) -> Action:
        """Names a few things, possibly with repetitions."""
        return text_action(" ".join(rng.choice(KINDS[self.kind]) for _ in range(rng.randint(2, MIN_NAMED + 3))))
