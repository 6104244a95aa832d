"""One agent, one environment, one trajectory: the turn loop.

Any misbehaviour of an environment (it raises, hangs, returns invalid values) ends as a record on its trajectory. Does not know
which engine generates, nor what the trajectory is used for.
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
from turnwise.rollout.env_calls import run_in_thread
from turnwise.rollout.renderer import Dialogue, Renderer


@dataclass(frozen=True)
class EpisodeLimits:
    """Where an episode is truncated."""

    turns: int = 8
    context: int = 512  # ids the model can read
    environment_seconds: float = 30.0  # per call into the environment
    history: int = 0  # how many of the latest observations are visible; 0: all


@dataclass(frozen=True)
class ForkPoint:
    """The state of trajectory ``key`` just before a turn: enough to continue from there in another way."""

    key: str
    turn: int
    snapshot: Any
    dialogue: Dialogue
    rewards: dict[str, float]


async def call_environment(function: Callable[..., Any], *args: Any, seconds: float, inline: bool) -> Any:
    """Call into an environment. A plain function that may block runs in a daemon thread and is abandoned at the time limit."""
    if inline:  # for a coroutine function this returns the coroutine
        try:
            return function(*args)
        except UNSAFE_EXCEPTIONS as fault:
            raise RuntimeError(repr(fault)) from None
    if inspect.iscoroutinefunction(function):
        return await with_timeout(function(*args), seconds)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def resolve(value: Any, fault: BaseException | None) -> None:
        if not done.done():
            done.set_exception(fault) if fault else done.set_result(value)

    def work() -> None:
        try:
            with _as_runtime_errors():
                value, fault = function(*args), None
        except BaseException as caught:
            value, fault = None, caught if isinstance(caught, Exception) else RuntimeError(repr(caught))
        with contextlib.suppress(RuntimeError):  # the loop was closed: nothing awaits the result
            loop.call_soon_threadsafe(resolve, value, fault)

    run_in_thread(work)
    return await with_timeout(done, seconds)


async def with_timeout(awaitable: Awaitable[Any], seconds: float) -> Any:
    """The result of ``awaitable``; an ``EnvironmentFault`` if it takes longer than ``seconds``."""

    async def wait() -> Any:
        with _as_runtime_errors():
            return await awaitable

    try:
        return await asyncio.wait_for(wait(), seconds)
    except TimeoutError:
        raise EnvironmentFault(f"no answer within {seconds:g} s") from None


UNSAFE_EXCEPTIONS = (StopIteration, SystemExit)
"""A future cannot hold a ``StopIteration``, and a ``SystemExit`` would end the run: both are raised as ``RuntimeError``."""


@contextlib.contextmanager
def _as_runtime_errors() -> Iterator[None]:
    try:
        yield
    except UNSAFE_EXCEPTIONS as fault:
        raise RuntimeError(repr(fault)) from None  # with a StopIteration as cause, contextlib would re-raise that


class FailedEnvironment:
    """Stands for an environment whose constructor raised: its episode fails, the rest of the group and the run continue."""

    def __init__(self, fault: BaseException) -> None:
        self.fault = fault

    def reset(self, seed: int) -> None:
        raise self.fault


class Episode:
    """Plays one trajectory. ``run`` never raises for an error of the environment."""

    def __init__(
        self,
        key: str,
        task: Task,
        environment: Any,
        session: Session,
        renderer: Renderer,
        sampling: Sampling,
        limits: EpisodeLimits,
        temperature_scale: float = 1.0,
        record_masked: bool = False,
        fork_from: ForkPoint | None = None,
        fork_points: list[ForkPoint] | None = None,
        with_hint: bool = False,
    ):
        """``record_masked``: also record each context with the environment's observations masked. ``fork_from``: start there.
        ``fork_points``: a list to which the episode appends its own. ``with_hint``: sample with the environment's hint in the
        prompt, and record the trajectory without it; only the log-probabilities depend on the hint."""
        self.fork_from, self.fork_points, self.with_hint, self.hint = fork_from, fork_points, with_hint, ""
        self.key, self.task, self.environment, self.session = key, task, environment, session
        self.renderer, self.limits, self.record_masked = renderer, limits, record_masked
        self.policy_temperature = (
            sampling.temperature or 1.0
        )  # of the policy that is trained, without temperature_scale
        self.temperature_scale = temperature_scale
        scaled = sampling.temperature * temperature_scale
        self.sampling = sampling if temperature_scale == 1 else replace(sampling, temperature=scaled)
        self.inline = bool(getattr(type(environment), "inline", False))
        self.turns: list[Turn] = []
        self.rewards: dict[str, float] = {}
        self.success: bool | None = None
        self.dialogue: Dialogue | None = None
        self.hinted_dialogue: Dialogue | None = None  # the same dialogue with the hint; sampled from if there is one
        self.answer: tuple[int, ...] = ()
        self.end: str | None = None

    async def run(self) -> Trajectory:
        status, reason = Status.FAILED, "cancelled"
        try:
            status, reason = await self._play()
            self.end = await self._state()
        except (EnvironmentFault, RenderError) as fault:
            status, reason = Status.FAILED, str(fault)
        except Exception as fault:  # raised by the environment
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
            fork=Fork(self.fork_from.key, self.fork_from.turn) if self.fork_from else None,
            guidance=", ".join(self._guidance()),
            messages=tuple(self.dialogue.messages) if self.dialogue else (),
        )

    def _guidance(self) -> Iterator[str]:
        if self.temperature_scale != 1:
            yield f"temperature_scale {self.temperature_scale:g}"
        if self.hint:
            yield f"hint: {self.hint}"

    async def _call(self, function: Callable[..., Any], *args: Any, inline: bool = False) -> Any:
        seconds = self.limits.environment_seconds
        value = await call_environment(function, *args, seconds=seconds, inline=inline or self.inline)
        return await with_timeout(value, seconds) if inspect.isawaitable(value) else value

    async def _play(self) -> tuple[Status, str]:
        first = read_messages(await self._call(self.environment.reset, self.task.seed), "reset")
        tools = tuple(getattr(self.environment, "tools", ()))
        if self.fork_from is None:
            self.dialogue = self.renderer.open(first, tools, self.limits.history)
        else:  # the prefix, including the context of this turn, belongs to the parent trajectory
            await self._call(self.environment.restore, self.fork_from.snapshot)
            prefix = copy.deepcopy(self.fork_from.dialogue)
            self.dialogue = replace(prefix, new_ids=[], masked_ids=[], restarted=False)
            self.rewards = dict(self.fork_from.rewards)
        self.answer = await self._reference_answer()
        if self.with_hint:
            await self._open_hinted(first, tools)
        for _ in range(self.limits.turns - (self.fork_from.turn if self.fork_from else 0)):
            room = self.limits.context - len((self.hinted_dialogue or self.dialogue).ids)
            if room < 1:
                return Status.TRUNCATED, "context window"
            step = await self._turn(self.dialogue)
            if step.terminated:
                return Status.FINISHED, ""
            if step.truncated:
                return Status.TRUNCATED, "environment"
        return Status.TRUNCATED, "turn limit"

    async def _open_hinted(self, first: list[Message], tools: tuple[Any, ...]) -> None:
        """Open the dialogue that is sampled from: the hint is appended to the first message, which always stays visible."""
        hint = getattr(self.environment, "hint", None)
        self.hint = (read_hint(await self._call(hint)) if callable(hint) else None) or ""
        if self.hint and first:
            hinted = {**first[0], "content": f"{first[0]['content']}\n{self.hint}"}
            self.hinted_dialogue = self.renderer.open([hinted, *first[1:]], tools, self.limits.history)

    async def _reference_answer(self) -> tuple[int, ...]:
        """The ids of the reference answer, if the environment has one."""
        if not hasattr(self.environment, "answer"):
            return ()
        text = read_answer(await self._call(self.environment.answer))
        return () if text is None else tuple(self.renderer.encode(text))

    async def _turn(self, dialogue: Dialogue) -> Step:
        if self.fork_points is not None:
            snapshot = copy.deepcopy(await self._call(self.environment.snapshot, inline=True))
            turn = len(self.turns) + (self.fork_from.turn if self.fork_from else 0)
            self.fork_points.append(ForkPoint(self.key, turn, snapshot, copy.deepcopy(dialogue), dict(self.rewards)))
        state, agent = await self._state(), str(getattr(self.environment, "agent", "agent"))
        context, masked, restart = tuple(dialogue.new_ids), tuple(dialogue.masked_ids), dialogue.restarted
        completion = await self.session.generate((self.hinted_dialogue or dialogue).ids, self.sampling)
        if completion.stop == Stop.CANCELLED:
            raise EnvironmentFault("cancelled")
        action: Action = self.renderer.append_sampled(dialogue, completion.tokens)
        if self.hinted_dialogue is not None:
            self.renderer.append_sampled(self.hinted_dialogue, completion.tokens)
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
                    masked_context=masked,
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
        self._record_info(step)
        if not (step.terminated or step.truncated):
            self.renderer.append_observation(dialogue, step.messages, self.record_masked)
            if self.hinted_dialogue is not None:
                self.renderer.append_observation(self.hinted_dialogue, step.messages)
        else:
            dialogue.messages += step.messages
        return step

    async def _state(self) -> str | None:
        """The key of the current state. If the first state has none, the environment is not asked again."""
        key = getattr(self.environment, "state_key", None)
        if not callable(key) or (self.turns and self.turns[-1].state is None):
            return None
        return read_state_key(await self._call(key))

    def _record_info(self, step: Step) -> None:
        if "success" in step.info:
            self.success = bool(step.info["success"])
        for name, value in dict(step.info.get("rewards", {})).items():
            self.rewards[name] = self.rewards.get(name, 0.0) + float(value)
        for agent, value in dict(step.info.get("paid", {})).items():
            self._add_reward(agent, float(value))

    def _add_reward(self, agent: str, reward: float) -> None:
        """Add what another agent earns by this step to its latest turn; an agent that has not acted yet earns nothing."""
        for index in reversed(range(len(self.turns))):
            if self.turns[index].agent == agent:
                self.turns[index] = replace(self.turns[index], reward=self.turns[index].reward + reward)
                return

    async def _close(self) -> None:
        close = getattr(self.environment, "close", None)
        if close is not None:
            with contextlib.suppress(Exception):  # a close that fails or hangs must not fail the episode
                await self._call(close)
