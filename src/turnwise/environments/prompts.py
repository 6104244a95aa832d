"""Prompts of a file as an environment: one prompt, one answer. What the answer earns is said by reward functions, not here.

    prompt_class({"train": {0: problem, ...}, "held_out": {...}})    a class; a task's seed is the number of its row
    tool_prompts(prompt_class(...), ("python", "search.py:search"))  its episodes may call tools before they answer

Where every row has a reference answer, the class has scripted policies that give it, so that a model that knows no language can
begin by imitating them. With tools, a turn with calls is answered by their results, and the first turn without a call is the
answer. Knows no file and no reward.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from turnwise.config.named_object import load_object
from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import AnsweredEnvironment, Environment, tool_message
from turnwise.errors import EnvironmentFault, SettingError
from turnwise.tools import SandboxSession, Toolbox, python_tool

NAME = "prompts"  # of the environment in tasks and settings
PYTHON = "python"  # the tool that is no function of the user's: an isolated interpreter
MAX_TURNS = 6  # with tools
MAX_CALLS = 8  # per turn; each may take the tool's whole time limit


@dataclass(frozen=True)
class PromptProblem:
    """One prompt, and the reference answer where there is one."""

    messages: tuple[Message, ...]
    answer: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    hints: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()  # of a solution


class PromptEnvironment(Environment):
    """One answer to one prompt. ``prompt_class`` makes a subclass for each file."""

    max_turns = 1
    inline = True
    deterministic = True
    verdict: ClassVar[bool] = False  # the environment itself does not say whether an answer is right
    problems: ClassVar[Mapping[str, Mapping[int, PromptProblem]]]  # by split and row number
    seeds: ClassVar[Mapping[str, Sequence[int]]]  # the tasks of each split, which end

    def reset(self, seed: int) -> Sequence[Message]:
        problems = self.problems[self.split]
        if seed not in problems:
            raise EnvironmentFault(f"no {self.split} row has the number {seed}; there are {len(problems)} rows")
        self.problem = problems[seed]
        self.tools = self.problem.tools
        return [dict(message) for message in self.problem.messages]

    def step(self, action: Action) -> Step:
        return Step(terminated=True, info={"tool_calls": len(action.calls), "tool_errors": len(action.faults)})


class HintedPrompts(Environment):
    """Every row has hints."""

    problem: PromptProblem

    def hints(self) -> Sequence[str]:
        return self.problem.hints


class SolvedPrompts(Environment):
    """Every row has a solution: one answer of several steps, or with tools a turn for each of them."""

    problem: PromptProblem

    def solution(self) -> Sequence[str]:
        return self.problem.steps if self.max_turns > 1 else ("\n".join(self.problem.steps),)


class AnsweredPromptEnvironment(AnsweredEnvironment, PromptEnvironment):
    """Every row has a reference answer."""

    def answer(self) -> str:
        return str(self.problem.answer)

    def other_answer(self, rng: random.Random) -> str:
        return str(self.problems["train"][rng.choice(self.seeds["train"])].answer)


class ToolPromptEnvironment(PromptEnvironment):
    """One prompt, calls of tools, one answer."""

    max_turns = MAX_TURNS
    inline = False
    functions: ClassVar[tuple[Callable[..., Any], ...]] = ()  # of the user
    with_python: ClassVar[bool] = False

    def __init__(self, *, difficulty: int = 1, split: str = "train") -> None:
        super().__init__(difficulty=difficulty, split=split)
        # code that raises is no failed call of the toolbox, so it is counted here
        self.turn = self.failed_code = 0
        self.session: SandboxSession | None = None
        self.programs: list[str] = []  # that the interpreter has run

        async def python(code: str) -> str:
            """Run Python and see what it prints."""
            result = await self._run(code)
            self.failed_code += not result.ok
            return result.output.strip() or "(nothing printed)"

        self.toolbox = Toolbox([*([python] if self.with_python else []), *self.functions])

    async def _run(self, code: str) -> Any:
        if self.session is None:
            self.session = python_tool().open()
        self.programs.append(code)
        return await self.session.arun(code)

    def reset(self, seed: int) -> Sequence[Message]:
        messages = super().reset(seed)
        if self.problem.tools:
            raise EnvironmentFault("the row has tools of its own, which --tools cannot run; leave one of them out")
        self.tools = self.toolbox.schemas
        return messages

    async def step(self, action: Action) -> Step:  # type: ignore[override]
        self.turn += 1
        if not (action.calls or action.faults):
            return Step(terminated=True)
        # none is run: half of a list of calls is not what the model asked for
        if len(action.calls) > MAX_CALLS:
            refusal = f"error: {len(action.calls)} calls at once; at most {MAX_CALLS}"
            messages, errors = [tool_message(call.name, refusal) for call in action.calls], len(action.calls)
        else:
            failed_before = self.failed_code
            messages, errors = await self.toolbox.arun(action)
            errors += self.failed_code - failed_before
        info = {"tool_calls": len(action.calls) + len(action.faults), "tool_errors": errors}
        return Step(messages, truncated=self.turn >= self.max_turns, info=info)

    # functions of the user are not called again for a fork: they may cost something, or act on the world
    def snapshot(self) -> dict[str, Any]:
        return {"turn": self.turn, "programs": list(self.programs)}

    async def restore(self, snapshot: Any) -> None:  # type: ignore[override]
        self.turn = snapshot["turn"]
        for code in snapshot["programs"]:
            await self._run(code)

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


def prompt_class(
    problems: Mapping[str, Mapping[int, PromptProblem]],
    verdict: bool = False,
    answered: bool | None = None,
    hinted: bool = False,
    solved: bool = False,
) -> type[PromptEnvironment]:
    """The class whose tasks are these problems, by split and row number. ``verdict``: rewards say whether an answer is right.
    ``answered``: whether every problem has an answer, where that is known without a look at each. ``hinted``, ``solved``: whether
    every one has hints, and a solution."""
    if answered is None:
        answered = all(p.answer is not None for rows in problems.values() for p in rows.values())
    bases = (*(HintedPrompts,) * hinted, *(SolvedPrompts,) * solved)
    base = AnsweredPromptEnvironment if answered else PromptEnvironment
    seeds = {split: tuple(rows) for split, rows in problems.items()}
    body = {"problems": problems, "seeds": seeds, "verdict": verdict}
    return type(NAME, (*bases, base), {**body, "__doc__": "Prompts of a file.", "__module__": __name__})


def tool_prompts(base: type[PromptEnvironment], names: Sequence[str]) -> type[PromptEnvironment]:
    """The prompts of ``base`` with these tools."""
    for name in names:
        if names.count(name) > 1:
            raise SettingError(f"the tool {name!r} is named twice; write it once")
        if name != PYTHON and ":" not in name:
            raise SettingError(f"no tool {name!r}; write python, module:function or file.py:function")
    functions = tuple(load_object(name, f"tool {name!r}", callable, "function") for name in names if name != PYTHON)
    body: dict[str, Any] = {"functions": functions, "with_python": PYTHON in names, "__doc__": base.__doc__}
    if PYTHON in names:
        body["notice"] = staticmethod(lambda: f"python tool: {python_tool().describe()}")
    made = type(base.__name__, (ToolPromptEnvironment, base), {**body, "__module__": base.__module__})
    made()  # a function that cannot be shown to a model is refused here, not in the first episode
    return made


def environment(member: str) -> type[PromptEnvironment]:
    """The class without prompts, for checks that need none."""
    if member:
        raise SettingError(f"no environment prompts:{member}; write --data FILE and --reward FUNCTION")
    return PromptEnvironment
