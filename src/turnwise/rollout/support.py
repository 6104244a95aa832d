"""Which help an episode gets, and what that help is for one task: a tier of hints, a share of a solution, an example.

Guidance decides on a ``Support``; ``SupportResolver`` turns it into text and ids for one task, once per task. Knows environments
and the renderer; no engine and no loss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from turnwise.core.records import Message, Task
from turnwise.core.stateful import remember
from turnwise.environments.calls import call_environment
from turnwise.environments.contract import read_hint, read_messages, read_step
from turnwise.errors import EnvironmentFault, SettingError
from turnwise.rewards.judge import REFLECTION_TOKENS, hint_question, read_hints
from turnwise.rollout.episode import EpisodeLimits, EpisodeSupport
from turnwise.rollout.helper import Helper
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import next_action, scripted_policy

CACHED = 1024  # tasks whose hints and solutions are kept
WRITTEN_HINTS = 4  # that a helper writes for a task
BEGINNING = "the following is the beginning of a solution, use it:"
PLAN = "plan:"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Support:
    """Help for one episode; a piece of guidance makes it.

    ``tier``: hints 1 to ``tier`` of the environment, together. ``share``: of the scripted solution, as text in the prompt, or
    ``played``: as turns that were already taken. ``turns_left``: all of the solution but so many turns is played; where it has
    no more, the episode starts at its prompt, without help. ``text``: as it is. ``recorded``: whether the record, and with it the
    policy that is trained, contains a hint; played turns are always recorded, as context."""

    tier: int = 0
    share: float = 0.0
    played: bool = False
    text: str = ""
    recorded: bool = True
    turns_left: int = 0
    opening: str = ""  # how the first turn begins: given, and recorded as context
    without_tools: tuple[str, ...] = ()  # an episode whose first turn begins so cannot call tools
    plan: bool = False  # a plan in words, made from the scripted solution
    title: str = "example"  # what ``text`` is, in the record
    taken: tuple[tuple[int, ...], ...] = ()  # of an earlier episode: ids of its turns, the last one as far as it went
    name: str = ""  # of that episode

    @property
    def label(self) -> str:
        """How the trajectory's guidance is recorded."""
        parts = [f"hints 1-{self.tier}"] * bool(self.tier) + [f"prefix {self.share:.2f}"] * bool(self.share)
        parts += [f"last {self.turns_left} turns"] * bool(self.turns_left)
        parts += [f"opening {self.opening!r}"] * bool(self.opening) + ["plan"] * self.plan
        parts += [f"continues {self.name}"] * bool(self.taken)
        return ", ".join(parts + [self.title] * bool(self.text)) or "support"


@dataclass(frozen=True)
class TaskHelp:
    """What one task offers: hints from abstract to concrete, the turns of the scripted solution, and what is read first."""

    hints: tuple[str, ...] = ()
    solution: tuple[str, ...] = ()
    first: tuple[Message, ...] = ()


@dataclass
class SupportResolver:
    """Makes the support of an episode. ``make`` builds an environment of a task, for a look at its hints and solution."""

    make: Callable[[Task], Any]
    renderer: Renderer
    limits: EpisodeLimits
    tools: Sequence[dict[str, Any]] = ()
    solutions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # given ones, by ``prompt_text`` of the task
    helper: Helper | None = None  # writes the hints, whatever the environment offers
    offered: dict[str, TaskHelp] = field(default_factory=dict)  # by task key, the latest ones

    async def resolve(self, support: Support, task: Task) -> EpisodeSupport:
        """Help as text and ids. Raises where the task offers nothing of the kind."""
        reads_task = support.tier or support.share or support.turns_left or support.plan
        help_ = await self.task_help(task) if reads_task else TaskHelp()
        written = await self._written_hints(help_) if support.tier and self.helper is not None else help_.hints
        hints = written[: support.tier]
        if support.tier and not hints:
            raise EnvironmentFault(f"{task.environment} gives no hint for this task")
        if support.plan:
            if not help_.solution:
                raise EnvironmentFault(f"{task.environment} has no scripted solution of this task to make a plan from")
            return EpisodeSupport(support.label, plan_of(help_.solution), support.recorded)
        if support.taken:
            return EpisodeSupport(support.label, turns=support.taken[:-1], start=support.taken[-1])
        if support.opening or support.without_tools:
            label, start = support.label if support.opening else "", tuple(self.renderer.encode(support.opening))
            return EpisodeSupport(label, start=start, without_tools=support.without_tools)
        if support.turns_left:
            first = help_.solution[: -support.turns_left]
            given = tuple(tuple(self._ids(text)) for text in first)
            return EpisodeSupport(support.label if given else "", turns=given)
        turns, start = self._played(help_.solution, support.share) if support.played else ((), ())
        in_words = support.share and not support.played
        beginning = [BEGINNING, first_share(help_.solution, support.share)] if in_words else []
        hint = "\n".join(part for part in (support.text, *hints, *beginning) if part)
        return EpisodeSupport(support.label, hint, support.recorded, turns, start)

    def _played(self, solution: tuple[str, ...], share: float) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """Whole turns of the first ``share`` of the solution's ids, and the ids of the turn in which it ends. At least the last
        id of the solution is left to the policy."""
        written = [self._ids(text) for text in solution]
        left = min(int(share * sum(map(len, written))), sum(map(len, written)) - 1)
        turns: list[tuple[int, ...]] = []
        for ids in written:
            if left < len(ids):
                return tuple(turns), tuple(ids[: max(0, left)])
            turns.append(tuple(ids))
            left -= len(ids)
        return tuple(turns), ()

    def _ids(self, text: str) -> list[int]:
        """The ids of a turn as the policy would have sampled them."""
        return self.renderer.encode_turn(self.renderer.turn_text(text, self.tools))

    async def task_help(self, task: Task) -> TaskHelp:
        if task.key not in self.offered:
            remember(self.offered, task.key, await self._look(task), CACHED)
        return self.offered[task.key]

    async def _written_hints(self, help_: TaskHelp) -> tuple[str, ...]:
        """The helper's hints. They are not kept here: of the policy they are those of its present weights."""
        assert self.helper is not None
        question = hint_question(help_.first, help_.solution, WRITTEN_HINTS)
        read = partial(read_hints, count=WRITTEN_HINTS)
        answer = await self.helper.ask(question, read, REFLECTION_TOKENS)
        if answer.failure:
            self.helper.count("failed")
            raise EnvironmentFault(answer.failure)
        return read(answer.text)

    async def _look(self, task: Task) -> TaskHelp:
        """Hints and the scripted solution of a task, from an environment of its own."""
        environment = self.make(task)
        inline = bool(getattr(type(environment), "inline", False))

        def call(function: Callable[..., Any], *args: Any) -> Awaitable[Any]:
            return call_environment(function, *args, seconds=self.limits.environment_seconds, inline=inline)

        first = read_messages(await call(environment.reset, task.seed), "reset")
        tiers = getattr(environment, "hints", None)
        texts = await call(tiers) if callable(tiers) else None
        if texts is None:  # also where it plays in another process and has no tiers there
            texts = [await call(environment.hint)] * hasattr(environment, "hint")
        hints = tuple(text for text in map(read_hint, texts) if text)
        written, solution = getattr(environment, "solution", None), self.solutions.get(prompt_text(first), ())
        if not solution and callable(written):
            solution = tuple(await call(written) or ())
        try:
            return TaskHelp(hints, solution or tuple(await self._solve(environment, call, task)), tuple(first))
        finally:
            if hasattr(environment, "close"):
                await call(environment.close)

    async def _solve(self, environment: Any, call: Callable[..., Awaitable[Any]], task: Task) -> list[str]:
        """The texts of the scripted solution; none where the environment has no solver or it does not finish."""
        texts = list[str]()
        for _ in range(self.limits.turns):
            try:
                act = scripted_policy("oracle", environment, task.seed)
                action = await next_action(act)
            except (NotImplementedError, SettingError):  # there is none, or it does not know how to go on
                return []
            texts.append(action.text)
            step = read_step(await call(environment.step, action))
            if step.terminated:
                return texts
            if step.truncated:
                break
        return []


def prompt_text(messages: Sequence[Message]) -> str:
    """What an episode or a dialogue begins with, by which a solution finds its task."""
    return "\n".join(str(message["content"]).strip() for message in messages)


def plan_of(turns: Sequence[str]) -> str:
    """A plan in words from the turns of a trace: ``plan: north 2 times, then take``. Equal turns in a row are counted, and a tool
    call is its name with the values of its arguments."""
    spoken = (" ".join(_CALL.sub(lambda call: _spoken(call[1]), turn).split()) for turn in turns)
    steps = [(text, len(list(same))) for text, same in groupby(spoken)]
    return f"{PLAN} " + ", then ".join(text if n == 1 else f"{text} {n} times" for text, n in steps)


def _spoken(call: str) -> str:
    """A tool call as words; as it is where it is no JSON."""
    try:
        read = json.loads(call)
        return " ".join([str(read["name"]), *map(str, read["arguments"].values())])
    except (ValueError, KeyError, TypeError, AttributeError):
        return call


def first_share(solution: Sequence[str], share: float) -> str:
    """The first ``share`` of a solution's characters."""
    text = "\n".join(solution)
    return text[: int(share * len(text))]
