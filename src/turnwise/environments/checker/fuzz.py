"""Fuzzing of an environment: many episodes of adversarial actions, called as training calls it. No action may make it raise,
hang or return an invalid value.

    report = fuzz_environment("calculator", episodes=10_000)
    assert not report.faults

A few malformed actions every environment must answer with a message. The random ones are texts that number parsers, regular
expressions and encoders stumble over, mutations of legal actions, and tool calls with arguments of any type.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise import environments
from turnwise.core.protocols import Action, ToolCall
from turnwise.environments.base import SPLITS, overrides
from turnwise.environments.calls import call_environment
from turnwise.environments.contract import read_messages, read_state_key, read_step, tool_fault

NUMBERS = (
    "1e30000000", "-1e999", "9" * 5_000, "0x" + "f" * 400, "1/0", "0/0", "1_0", "_", "__", "-", "+", ".", "1.", ".1",
    "1,,,", "nan", "inf", "-inf", "1e", "٣", "²", "½", "Ⅷ", "１２", "1\u0663", "१", "--5", "00007", "1j", "True", "None",
    "0" * 10_000 + "1",
)  # fmt: skip
ODD_TEXTS = (
    "", " ", "\n", "\x00", "\ud800", "a\udfffb", "\u202eabc", "\u200b", "\ufeff", "é\u0301" * 50, "🐈\u200d⬛", "\x1b[2J",
    "\r\n\r\n", "(" * 2_000, "[" * 2_000 + "]" * 2_000, "{" * 500, '"' * 99, "\\" * 99, "%s%n{0}{}", "<tool_call>",
    "</s><|im_end|><|endoftext|>", "<tool_call>{}</tool_call>", '<tool_call>{"name": 5, "arguments": []}</tool_call>',
    "İ" * 99, "ß" * 99, "a" * 100_000, " " * 100_000, "' OR 1=1 --", "__import__('os')._exit(1)", "../../etc/passwd",
    "A" * 1_000_000,
)  # fmt: skip
STEMS = (
    "answer: ", "answer:", "Answer: ", "guess ", "guess: ", "is it ", "left ", "right ", "north ", "open ", "", "t=",
)  # fmt: skip
NAMES = ("_", "__class__", "exit", "quit", "t", "a" * 3_000, "None", "ﬁ", "ª", "lambda")
ALPHABETS = (
    "0123456789.,-+*/() ",
    "abcdefghijklmnopqrstuvwxyz ?.:",
    "".join(map(chr, range(1, 0x250))),
    "٠١٢٣²½\u202e\u0000\ud800\U0001f408",
)


MALFORMED = {
    "empty text": Action(""),
    "garbage": Action("}{)(*&^ %$ \x00 \\ <tool_call> 1/0 __import__"),
    "huge text": Action("north 9*9 " * 20_000),
    "unicode": Action("ünïcødé ٣ 猫 🐈 \u202e \u0000 \ud800"),
    "unreadable tool call": Action("<tool_call>{", faults=("not JSON",)),
    "unknown tool": Action("", calls=(ToolCall("no_such_tool", {"x": 1}, id="1"),)),
}


def malformed_actions(tools: Any) -> dict[str, Action]:
    """By label. For each valid tool schema also a call without arguments, and one with arguments of the wrong type."""
    actions = dict(MALFORMED)
    for tool in () if tool_fault(tools) else tools:
        function = tool["function"]
        # what JSON can hold and no tool expects
        odd = {key: [None, {"x": float("nan")}] for key in function["parameters"].get("properties", {})}
        actions[f"{function['name']} without arguments"] = Action("", calls=(ToolCall(function["name"], {}),))
        actions[f"{function['name']} with odd arguments"] = Action("", calls=(ToolCall(function["name"], odd),))
    return actions


def adversarial_action(rng: random.Random, legal: Callable[[], Action] | None, tools: Sequence[Any]) -> Action:
    """One action. ``legal`` returns an action in the environment's own format, to be mutated."""
    kind = rng.random()
    if kind < 0.3 and tools:
        names = [tool["function"]["name"] for tool in tools]
        keys = [key for tool in tools for key in tool["function"]["parameters"].get("properties", {})]
        calls = tuple(
            ToolCall(
                rng.choice((*names, *names, _text(rng))),
                {rng.choice((*keys, *keys, _text(rng))): _value(rng, 3) for _ in range(rng.randint(0, 3))},
                rng.choice(("", "1", _text(rng))),
            )
            for _ in range(rng.choice((1, 1, 1, 2, 20)))
        )
        return Action(_text(rng), calls)
    if kind < 0.6 and legal is not None:
        action = legal()
        text = action.text
        for _ in range(rng.randint(1, 3)):  # a part is deleted, repeated, replaced or shouted
            start = rng.randint(0, len(text))
            end = min(len(text), start + rng.randint(0, 6))
            insert = rng.choice((_text(rng), "", text[start:end] * rng.choice((2, 1_000)), text[start:end].upper()))
            text = text[:start] + insert + text[end:]
        return Action(text, action.calls if rng.random() < 0.5 else ())
    if kind < 0.65:
        return Action(_text(rng), faults=(_text(rng), "not JSON"))
    return Action(rng.choice(STEMS) + _text(rng))


def _text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(NUMBERS)
    if kind < 0.45:
        return rng.choice(NAMES)
    if kind < 0.6:
        return rng.choice(ODD_TEXTS)
    alphabet, length = rng.choice(ALPHABETS), int(10 ** rng.uniform(0, 2.5))
    return "".join(rng.choices(alphabet, k=length))


def _value(rng: random.Random, depth: int) -> Any:
    """A value of any type that JSON can hold, and a few that it cannot."""
    if depth and rng.random() < 0.2:
        return rng.choice(([_value(rng, depth - 1)] * rng.randint(0, 3), {_text(rng): _value(rng, depth - 1)}))
    plain: tuple[Any, ...] = (
        None, True, 0, -1, 10**400, 1e308, math.nan, math.inf, [], {}, "print(1)", "while True: pass" * (rng.random() < 0.02),
    )  # fmt: skip
    return rng.choice((*plain, _text(rng), _text(rng), _text(rng)))


CONCURRENT = 16  # episodes at once
TURNS = 40  # of one episode at most
SHOWN = 80  # characters of an action in a fault


@dataclass
class FuzzReport:
    """What happened. ``faults``: one line for each distinct fault, with the seed and the action that caused it first."""

    name: str
    episodes: int = 0
    turns: int = 0
    slowest: float = 0.0  # seconds of the slowest call
    faults: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = f"{self.episodes} episodes, {self.turns} turns, slowest call {self.slowest:.2g} s"
        head = f"{self.name}: {counts}, {len(self.faults)} faults"
        return "\n".join([head, *(f"  {fault}: {first}" for fault, first in self.faults.items())])


def fuzz_environment(env: str | type[Any], episodes: int = 100, seed: int = 0, seconds: float = 30.0) -> FuzzReport:
    """Play ``episodes`` episodes of adversarial actions, over all difficulties and splits; ``seconds`` limits each call."""
    cls = environments.load(env) if isinstance(env, str) else env
    report = FuzzReport(env if isinstance(env, str) else cls.__name__)

    async def play_all() -> None:
        for start in range(0, episodes, CONCURRENT):
            numbers = range(start, min(start + CONCURRENT, episodes))
            await asyncio.gather(*(_play(cls, seed + number, seconds, report) for number in numbers))

    asyncio.run(play_all())
    return report


async def _play(cls: type[Any], seed: int, seconds: float, report: FuzzReport) -> None:
    """One episode; what it raises is a fault."""
    rng, action, inline = random.Random(seed), None, bool(getattr(cls, "inline", False))
    choices = {"difficulty": rng.choice(getattr(cls, "difficulties", (1,))), "split": rng.choice(SPLITS)}
    env = cls(**{key: choices[key] for key in environments.settings(cls)})
    legal = (lambda: env.random_action(rng)) if overrides(cls, "random_action") else None

    async def call(function: Any, *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return await call_environment(function, *args, seconds=seconds, inline=inline)
        finally:
            report.slowest = max(report.slowest, time.perf_counter() - began)

    report.episodes += 1
    try:
        read_messages(await call(env.reset, seed), "reset")
        for _ in range(TURNS):
            action = adversarial_action(rng, legal, getattr(env, "tools", ()))
            step = read_step(await call(env.step, action))
            report.turns += 1
            if callable(getattr(env, "state_key", None)):
                read_state_key(await call(env.state_key))
            if step.terminated or step.truncated:
                break
    except Exception as fault:
        last = traceback.extract_tb(fault.__traceback__)[-1]  # a message may quote the action, so the line is the key
        key = f"{type(fault).__name__} in {last.name}, line {last.lineno}"
        report.faults.setdefault(key, f"{str(fault)!a:.{SHOWN}} (seed {seed}, {action!a:.{SHOWN}})")
    finally:
        if hasattr(env, "close"):
            await call(env.close)
