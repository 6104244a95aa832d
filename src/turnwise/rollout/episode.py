"""One agent, one environment, one trajectory: the turn loop.

Whatever an environment does (raises, hangs, returns nonsense) ends as a record on its trajectory. Which engine answers,
and what the trajectory is used for, is not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from turnwise.core.protocols import Action, Session, Step
from turnwise.core.records import Fork, Message, Sampling, Status, Stop, Task, Trajectory, Turn
from turnwise.environments.contract import read_answer, read_facts, read_hint, read_messages, read_state_key, read_step
from turnwise.errors import EnvironmentFault, RenderError
from turnwise.rollout.env_calls import lend
from turnwise.rollout.renderer import Dialogue, Renderer


@dataclass(frozen=True)
class Limits:
    """Where an episode is cut."""

    turns: int = 8
    context: int = 512  # ids the model can read
    environment_seconds: float = 30.0  # for one call into the environment
    history: int = 0  # how many of the latest observations are read; 0: all


@dataclass(frozen=True)
class Moment:
    """An episode just before a turn: enough to go on from there in another way. Belongs to trajectory ``key``."""

    key: str
    turn: int
    snapshot: Any
    dialogue: Dialogue
    rewards: dict[str, float]


async def guarded(function: Callable[..., Any], *args: Any, seconds: float, inline: bool) -> Any:
    """Call into an environment. A plain function that may block runs in a daemon thread and is given up at the limit."""
    if inline:  # of a coroutine function this is the coroutine
        try:
            return function(*args)
        except UNFIT as fault:
            raise RuntimeError(repr(fault)) from None
    if inspect.iscoroutinefunction(function):
        return await within(function(*args), seconds)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, fault: BaseException | None) -> None:
        if not done.done():
            done.set_exception(fault) if fault else done.set_result(value)

    def work() -> None:
        try:
            with tame():
                value, fault = function(*args), None
        except BaseException as caught:
            value, fault = None, caught if isinstance(caught, Exception) else RuntimeError(repr(caught))
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, fault)

    lend(work)
    return await within(done, seconds)


async def within(awaitable: Awaitable[Any], seconds: float) -> Any:
    """What it answers in time."""

    async def wait() -> Any:
        with tame():
            return await awaitable

    try:
        return await asyncio.wait_for(wait(), seconds)
    except TimeoutError:
        raise EnvironmentFault(f"no answer within {seconds:g} s") from None


UNFIT = (StopIteration, SystemExit)
"""A future cannot carry the one, and the other would end the whole run: both become an ordinary error."""


@contextlib.contextmanager
def tame() -> Iterator[None]:
    try:
        yield
    except UNFIT as fault:
        raise RuntimeError(repr(fault)) from None  # with a StopIteration as cause, contextlib would hand that back


class Unopened:
    """Stands for an environment whose constructor raised: the episode fails, its siblings and the run go on."""

    def __init__(self, fault: BaseException) -> None:
        self.fault = fault

    def reset(self, seed: int) -> None:
        raise self.fault


class Episode:
    """Plays one trajectory; ``run`` never raises for what the environment does."""

    def __init__(
        self,
        key: str,
        task: Task,
        environment: Any,
        session: Session,
        renderer: Renderer,
        sampling: Sampling,
        limits: Limits,
        heat: float = 1.0,
        blind: bool = False,
        begin: Moment | None = None,
        moments: list[Moment] | None = None,
        hinted: bool = False,
    ):
        """``blind``: record each context a second time, with the environment's words masked. ``begin``: fork from there.
        ``moments``: where this episode's own are put. ``hinted``: sampled with the environment's hint in sight, recorded as if
        there were none; only the log-probabilities know of it."""
        self.begin, self.moments, self.hinted, self.hint = begin, moments, hinted, ""
        self.key, self.task, self.environment, self.session = key, task, environment, session
        self.renderer, self.limits, self.blind = renderer, limits, blind
        self.policy_temperature = sampling.temperature or 1.0  # of the policy that learns, whatever this is sampled at
        self.heat = heat
        self.sampling = sampling if heat == 1 else replace(sampling, temperature=sampling.temperature * heat)
        self.inline = bool(getattr(type(environment), "inline", False))
        self.turns: list[Turn] = []
        self.rewards: dict[str, float] = {}
        self.success: bool | None = None
        self.dialogue: Dialogue | None = None
        self.aside: Dialogue | None = None  # the same with the hint, where there is one
        self.answer: tuple[int, ...] = ()
        self.end: str | None = None

    async def run(self) -> Trajectory:
        status, reason = Status.FAILED, "cancelled"
        try:
            status, reason = await self._play()
            self.end = await self._state()
        except (EnvironmentFault, RenderError) as fault:
            status, reason = Status.FAILED, str(fault)
        except Exception as fault:  # the environment's own
            status, reason = Status.FAILED, f"{type(fault).__name__}: {fault}"
        finally:
            self.session.close()
            await self._close()
        return Trajectory(
            id=self.key,
            task=self.task,
            turns=tuple(self.turns),
            rewards=self.rewards,
            status=status,
            reason=reason,
            success=self.success,
            end=self.end,
            answer=self.answer,
            fork=Fork(self.begin.key, self.begin.turn) if self.begin else None,
            guidance=", ".join(self._guidance()),
            messages=tuple(self.dialogue.messages) if self.dialogue else (),
        )

    def _guidance(self) -> Iterator[str]:
        if self.heat != 1:
            yield f"heat {self.heat:g}"
        if self.hint:
            yield f"hint: {self.hint}"

    async def _call(self, function: Callable[..., Any], *args: Any, inline: bool = False) -> Any:
        seconds = self.limits.environment_seconds
        value = await guarded(function, *args, seconds=seconds, inline=inline or self.inline)
        return await within(value, seconds) if inspect.isawaitable(value) else value

    async def _play(self) -> tuple[Status, str]:
        first = read_messages(await self._call(self.environment.reset, self.task.seed), "reset")
        tools = tuple(getattr(self.environment, "tools", ()))
        if self.begin is None:
            self.dialogue = self.renderer.open(first, tools, self.limits.history)
        else:  # the prefix, with the context of this very turn, belongs to the trajectory it forks from
            await self._call(self.environment.restore, self.begin.snapshot)
            self.dialogue = replace(copy.deepcopy(self.begin.dialogue), fresh=[], blind=[], restarted=False)
            self.rewards = dict(self.begin.rewards)
        self.answer = await self._gold()
        if self.hinted:
            await self._whisper(first, tools)
        for _ in range(self.limits.turns - (self.begin.turn if self.begin else 0)):
            room = self.limits.context - len((self.aside or self.dialogue).ids)
            if room < 1:
                return Status.TRUNCATED, "context window"
            step = await self._turn(self.dialogue)
            if step.terminated:
                return Status.FINISHED, ""
            if step.truncated:
                return Status.TRUNCATED, "environment"
        return Status.TRUNCATED, "turn limit"

    async def _whisper(self, first: list[Message], tools: tuple[Any, ...]) -> None:
        """Open the dialogue that is sampled from: the hint stands at the end of the first message, which is never left out."""
        ask = getattr(self.environment, "hint", None)
        self.hint = (read_hint(await self._call(ask)) if callable(ask) else None) or ""
        if self.hint and first:
            told = {**first[0], "content": f"{first[0]['content']}\n{self.hint}"}
            self.aside = self.renderer.open([told, *first[1:]], tools, self.limits.history)

    async def _gold(self) -> tuple[int, ...]:
        """The gold answer's ids, where the environment tells it."""
        if not hasattr(self.environment, "answer"):
            return ()
        text = read_answer(await self._call(self.environment.answer))
        return () if text is None else tuple(self.renderer.encode(text))

    async def _turn(self, dialogue: Dialogue) -> Step:
        if self.moments is not None:
            held = copy.deepcopy(await self._call(self.environment.snapshot, inline=True))
            turn = len(self.turns) + (self.begin.turn if self.begin else 0)
            self.moments.append(Moment(self.key, turn, held, copy.deepcopy(dialogue), dict(self.rewards)))
        state, agent = await self._state(), str(getattr(self.environment, "agent", "agent"))
        context, masked, restart = tuple(dialogue.fresh), tuple(dialogue.blind), dialogue.restarted
        completion = await self.session.generate((self.aside or dialogue).ids, self.sampling)
        if completion.stop == Stop.CANCELLED:
            raise EnvironmentFault("cancelled")
        action: Action = self.renderer.hear(dialogue, completion.tokens)
        if self.aside is not None:
            self.renderer.hear(self.aside, completion.tokens)
        began = time.perf_counter()
        try:
            step = read_step(await self._call(self.environment.step, action))
        except BaseException:
            step = Step()
            raise
        finally:
            self.turns.append(
                Turn(
                    context=context,
                    blind=masked,
                    tokens=tuple(completion.tokens),
                    logp=tuple(completion.logp),
                    mass=() if not any(completion.mass) else tuple(completion.mass),
                    version=tuple(completion.version),
                    reward=float(step.reward),
                    agent=agent,
                    state=state,
                    restart=restart,
                    stop=completion.stop,
                    temperature=self.policy_temperature,
                    tool_calls=int(step.info.get("tool_calls", 0)),
                    tool_errors=int(step.info.get("tool_errors", 0)),
                    facts=read_facts(step.info),
                    seconds_generating=completion.seconds,
                    seconds_acting=time.perf_counter() - began,
                )
            )
        self._note(step)
        if not (step.terminated or step.truncated):
            self.renderer.tell(dialogue, step.messages, self.blind)
            if self.aside is not None:
                self.renderer.tell(self.aside, step.messages)
        else:
            dialogue.messages += step.messages
        return step

    async def _state(self) -> str | None:
        """The key of the state it is in. One that has none at first has none: it is not asked again."""
        key = getattr(self.environment, "state_key", None)
        if not callable(key) or (self.turns and self.turns[-1].state is None):
            return None
        return read_state_key(await self._call(key))

    def _note(self, step: Step) -> None:
        if "success" in step.info:
            self.success = bool(step.info["success"])
        for name, value in dict(step.info.get("rewards", {})).items():
            self.rewards[name] = self.rewards.get(name, 0.0) + float(value)
        for agent, value in dict(step.info.get("paid", {})).items():
            self._pay(agent, float(value))

    def _pay(self, agent: str, reward: float) -> None:
        """What another agent earns by this step, on its latest turn; one that has not acted yet has earned nothing."""
        for place in reversed(range(len(self.turns))):
            if self.turns[place].agent == agent:
                self.turns[place] = replace(self.turns[place], reward=self.turns[place].reward + reward)
                return

    async def _close(self) -> None:
        close = getattr(self.environment, "close", None)
        if close is not None:
            with contextlib.suppress(Exception):  # a close that fails or hangs must not cost the episode
                await self._call(close)
