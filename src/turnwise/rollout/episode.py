"""One agent, one environment, one trajectory: the turn loop.

Whatever an environment does (raises, hangs, returns nonsense) ends as a record on its trajectory. Which engine answers,
and what the trajectory is used for, is not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from turnwise.data import Message, Sampling, Status, Stop, Task, Trajectory, Turn
from turnwise.errors import EnvironmentFault, RenderError
from turnwise.ports import Action, Session, Step
from turnwise.rollout.render import Dialogue, Renderer


@dataclass(frozen=True)
class Limits:
    """Where an episode is cut."""

    turns: int = 8
    context: int = 512  # ids the model can read
    environment_seconds: float = 30.0  # for one call into the environment


async def guarded(function: Callable[..., Any], *args: Any, seconds: float, inline: bool) -> Any:
    """Call into an environment. A plain function that may block runs in a daemon thread and is given up at the limit."""
    if inspect.iscoroutinefunction(function):
        try:
            return await asyncio.wait_for(function(*args), seconds)
        except TimeoutError:
            raise EnvironmentFault(f"no answer within {seconds:g} s") from None
    if inline:
        return function(*args)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, fault: BaseException | None) -> None:
        if not done.done():
            done.set_exception(fault) if fault else done.set_result(value)

    def work() -> None:
        try:
            value, fault = function(*args), None
        except BaseException as caught:  # a future cannot carry StopIteration, and SystemExit would end the whole run
            plain = isinstance(caught, Exception) and not isinstance(caught, StopIteration)
            value, fault = None, caught if plain else RuntimeError(repr(caught))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, fault)

    threading.Thread(target=work, daemon=True).start()
    try:
        return await asyncio.wait_for(done, seconds)
    except TimeoutError:
        raise EnvironmentFault(f"no answer within {seconds:g} s") from None


def checked_messages(value: Any, what: str) -> list[Message]:
    good = isinstance(value, Sequence) and not isinstance(value, str)
    if not good or not all(isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m for m in value):
        raise EnvironmentFault(f"{what} returned {value!r:.120}; expected a list of messages with role and content")
    return list(value)


def checked_step(value: Any) -> Step:
    if isinstance(value, tuple) and len(value) == 5:  # (messages, reward, terminated, truncated, info), as in Gymnasium
        value = Step(*value)
    if not isinstance(value, Step):
        raise EnvironmentFault(
            f"step returned {value!r:.120}; expected a Step or (messages, reward, terminated, truncated, info)"
        )
    if not finite(value.reward):
        raise EnvironmentFault(f"step returned the reward {value.reward!r}; expected a finite number")
    if not isinstance(value.info, Mapping):
        raise EnvironmentFault(f"step returned the info {value.info!r:.120}; expected a dict")
    named = value.info.get("rewards", {})
    counts = [value.info.get(name, 0) for name in ("tool_calls", "tool_errors")]
    if not isinstance(named, Mapping) or not all(map(finite, [*named.values(), *counts])):
        raise EnvironmentFault(
            f"step returned the info {dict(value.info)!r:.120}; rewards and tool counts must be numbers"
        )
    checked_messages(value.messages, "step")
    return value


def finite(value: Any) -> bool:
    """A number, NumPy's included; not a bool, NaN or infinity."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


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
    ):
        self.key, self.task, self.environment, self.session = key, task, environment, session
        self.renderer, self.sampling, self.limits = renderer, sampling, limits
        self.inline = bool(getattr(type(environment), "inline", False))
        self.turns: list[Turn] = []
        self.rewards: dict[str, float] = {}
        self.success: bool | None = None
        self.dialogue: Dialogue | None = None
        self.answer: tuple[int, ...] = ()

    async def run(self) -> Trajectory:
        status, reason = Status.FAILED, "cancelled"
        try:
            status, reason = await self._play()
        except (EnvironmentFault, RenderError) as fault:
            reason = str(fault)
        except Exception as fault:  # the environment's own
            reason = f"{type(fault).__name__}: {fault}"
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
            answer=self.answer,
            messages=tuple(self.dialogue.messages) if self.dialogue else (),
        )

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        seconds = self.limits.environment_seconds
        value = await guarded(function, *args, seconds=seconds, inline=self.inline)
        if not inspect.isawaitable(value):
            return value
        try:
            return await asyncio.wait_for(value, seconds)
        except TimeoutError:
            raise EnvironmentFault(f"no answer within {seconds:g} s") from None

    async def _play(self) -> tuple[Status, str]:
        first = checked_messages(await self._call(self.environment.reset, self.task.seed), "reset")
        self.dialogue = self.renderer.open(first, tuple(getattr(self.environment, "tools", ())))
        self.answer = await self._gold()
        for _ in range(self.limits.turns):
            room = self.limits.context - len(self.dialogue.ids)
            if room < 1:
                return Status.TRUNCATED, "context window"
            step = await self._turn(self.dialogue)
            if step.terminated:
                return Status.FINISHED, ""
            if step.truncated:
                return Status.TRUNCATED, "environment"
        return Status.TRUNCATED, "turn limit"

    async def _gold(self) -> tuple[int, ...]:
        """The gold answer's ids, where the environment tells it."""
        if not hasattr(self.environment, "answer"):
            return ()
        text = await self._call(self.environment.answer)
        if text is None:
            return ()
        if not isinstance(text, str):
            raise EnvironmentFault(f"answer returned {text!r:.120}; expected a string, or None where there is none")
        return tuple(self.renderer.encode(text))

    async def _turn(self, dialogue: Dialogue) -> Step:
        state = self.environment.state_key() if hasattr(self.environment, "state_key") else None
        context, restart = tuple(dialogue.fresh), dialogue.restarted
        completion = await self.session.generate(dialogue.ids, self.sampling)
        if completion.stop == Stop.CANCELLED:
            raise EnvironmentFault("cancelled")
        action: Action = self.renderer.hear(dialogue, completion.tokens)
        began = time.perf_counter()
        try:
            step = checked_step(await self._call(self.environment.step, action))
        except BaseException:
            step = Step()
            raise
        finally:
            self.turns.append(
                Turn(
                    context=context,
                    tokens=tuple(completion.tokens),
                    logp=tuple(completion.logp),
                    mass=() if not any(completion.mass) else tuple(completion.mass),
                    version=tuple(completion.version),
                    reward=float(step.reward),
                    state=state,
                    restart=restart,
                    stop=completion.stop,
                    temperature=self.sampling.temperature or 1.0,
                    tool_calls=int(step.info.get("tool_calls", 0)),
                    tool_errors=int(step.info.get("tool_errors", 0)),
                    seconds_generating=completion.seconds,
                    seconds_acting=time.perf_counter() - began,
                )
            )
        self._note(step)
        if not (step.terminated or step.truncated):
            self.renderer.tell(dialogue, step.messages)
        else:
            dialogue.messages += step.messages
        return step

    def _note(self, step: Step) -> None:
        if "success" in step.info:
            self.success = bool(step.info["success"])
        for name, value in dict(step.info.get("rewards", {})).items():
            self.rewards[name] = self.rewards.get(name, 0.0) + float(value)

    async def _close(self) -> None:
        close = getattr(self.environment, "close", None)
        if close is not None:
            with contextlib.suppress(Exception):  # a close that fails or hangs must not cost the episode
                await self._call(close)
