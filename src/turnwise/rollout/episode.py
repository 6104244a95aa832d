"""One agent, one environment, one trajectory: the turn loop.

Any misbehaviour of an environment (it raises, hangs, returns invalid values) ends as a record on its trajectory. Does not know
which engine generates, nor what the trajectory is used for.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from turnwise.core.protocols import Action, Session, Step
from turnwise.core.records import (
    Completion,
    Facts,
    Fork,
    Limit,
    Message,
    Sampling,
    Status,
    Stop,
    Task,
    Trajectory,
    Turn,
)
from turnwise.environments.calls import call_environment
from turnwise.environments.contract import (
    comparable,
    observed_state,
    read_answer,
    read_facts,
    read_hint,
    read_messages,
    read_state_key,
    read_step,
)
from turnwise.errors import ContextOverflow, EnvironmentFault, TurnwiseError, host_fault
from turnwise.rollout.renderer import Dialogue, Renderer

if TYPE_CHECKING:
    from turnwise.rollout.chat_session import ChatSession  # plays the same loop without ids


@dataclass(frozen=True)
class ForkPoint:
    """The state of trajectory ``key`` at its turn ``turn``, after ``token`` sampled tokens of that turn: enough to continue from
    there in another way. ``snapshot`` None: the environment has none; ``actions`` are played again, and ``replies`` compared."""

    key: str
    turn: int
    snapshot: Any
    dialogue: Dialogue  # just before the turn
    rewards: dict[str, float]
    taken: int = 0  # turns since the start of the episode, those of its ancestors included
    start: tuple[int, ...] = ()  # ids of the turn so far, sampled by the trajectory or its ancestors
    token: int = 0  # how many of them the trajectory itself sampled
    added: tuple[int, ...] = ()  # ids that the continuation begins with, recorded as its context
    actions: tuple[Action, ...] = ()  # since the start of the episode
    replies: tuple[str, ...] = ()  # to reset and to each of them, as ``comparable`` writes them
    observation: str = ""  # the latest
    remaining: float | None = None  # turns that the scripted solution needs from here, where the environment knows it


def inside_turn(point: ForkPoint, tokens: Sequence[int], count: int) -> ForkPoint:
    """The fork point after the first ``count`` of the ``tokens`` that the trajectory sampled in this turn."""
    assert point.token == 0, "count from the start of the turn"
    return replace(point, start=(*point.start, *tokens[:count]), token=count)


@dataclass(frozen=True)
class EpisodeSupport:
    """Help for one episode. ``hint`` is appended to the first message; with ``recorded`` the record contains it, otherwise only
    the log-probabilities depend on it. ``turns`` are played before the policy's first turn, ``start`` begins that turn: ids that
    the policy did not sample, recorded as context. ``label`` is recorded as guidance."""

    label: str
    hint: str = ""
    recorded: bool = True
    turns: tuple[tuple[int, ...], ...] = ()
    start: tuple[int, ...] = ()
    without_tools: tuple[str, ...] = ()  # an episode whose first turn begins so cannot call tools


@dataclass(frozen=True)
class OtherSeats:
    """Who plays with the policy: its place is ``seat``, all others are answered by ``session``, whose tokens are context.
    ``facts`` are recorded on the trajectory."""

    seat: str
    session: Session
    facts: Facts = field(default_factory=dict)


def with_reminder(messages: Sequence[Message], taken: int, limits: Sequence[int]) -> list[Message]:
    """The messages with how many turns are used and left at the end of the last one. ``limits`` ascend: one that is reached is
    extended to the next."""
    limit = next((n for n in limits if taken < n), limits[-1])
    extended = "the limit was extended; " if taken in limits[:-1] else ""
    words = f"[{extended}turns used: {taken}, left: {limit - taken}]"
    if not messages or not isinstance(messages[-1].get("content"), str):
        return [*messages, {"role": "user", "content": words}]
    return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n{words}"}]


def with_hint_text(messages: list[Message], hint: str) -> list[Message]:
    """The messages with ``hint`` at the end of the first one, which always stays visible."""
    if not hint or not messages:
        return messages
    return [{**messages[0], "content": f"{messages[0]['content']}\n{hint}"}, *messages[1:]]


AGENT_CALLS = 128
WINDOW_END = "the tokens of this window are sampled"


@dataclass(frozen=True)
class EpisodeLimits:
    """Where an episode is truncated."""

    turns: int = 8  # that act in the environment
    context: int = 512  # ids the model can read
    environment_seconds: float = 30.0  # per call into the environment
    history: int = 0  # how many of the latest observations are visible; 0: all
    # the budget of an agent, which owns its length: a bound for one that never ends
    calls: int = AGENT_CALLS
    tokens: int = 0  # sampled in all its calls; 0: as many as they take
    seconds: float = math.inf  # of its own work, not of the time that an episode waits for it


def sampled_turn(completion: Completion, **more: Any) -> Turn:
    """What a generator sampled, as a turn. ``mass`` and ``kept`` stay empty where no filter was active."""
    return Turn(
        tokens=tuple(completion.tokens),
        logp=tuple(completion.logp),
        mass=tuple(completion.mass) if any(completion.mass) else (),
        kept=tuple(completion.kept) if any(completion.kept) else (),
        grammar=completion.grammar,
        begun=completion.begun,
        version=tuple(completion.version),
        stop=completion.stop,
        seconds_generating=completion.seconds,
        **more,
    )


def fault_words(fault: Exception) -> str:
    """Why an episode failed: of the machine's faults, what to do; of ours, their words; of any other, its type too."""
    return host_fault(fault) or (str(fault) if isinstance(fault, TurnwiseError) else f"{type(fault).__name__}: {fault}")


class UnforkedSession:
    """What sessions without a generator share: nothing to park, cancel or close, and no state to fork."""

    def fork(self, seed: int) -> Session:
        raise NotImplementedError(f"a {type(self).__name__} cannot be forked")

    def park(self) -> None:
        pass

    cancel = close = unpark = park


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
        renderer: Renderer | ChatSession,
        sampling: Sampling,
        limits: EpisodeLimits,
        temperature_scale: float = 1.0,
        record_masked: bool = False,
        fork_from: ForkPoint | None = None,
        fork_points: list[ForkPoint] | None = None,
        with_hint: bool = False,
        support: EpisodeSupport | None = None,
        max_turns: int | Sequence[int] = 0,
        max_tokens: int = 0,
        wording: int = 0,
        entropies: list[Sequence[float]] | None = None,
        others: OtherSeats | None = None,
    ):
        """``record_masked``: also record each context with the environment's observations masked. ``fork_from``: start there.
        ``fork_points``: a list to which the episode appends its own. ``with_hint``: sample with the environment's hint in the
        prompt, and record the trajectory without it; only the log-probabilities depend on the hint. ``support``: other help.
        ``max_turns``: fewer turns than the environment allows; several are limits that are extended in this order, and the policy
        is told after each turn how many are left. ``max_tokens``: the episode ends after so many sampled tokens, inside a turn if
        need be, of which the environment then hears nothing. ``wording``: which wording of the task to show. ``entropies``: a
        list that receives those of each turn's tokens, empty where the generator does not report them. ``others``: who plays the
        seats that are not the policy's."""
        self.others, self.carried_restart, self.no_tools = others, False, False
        self.support, self.wording, self.carried, self.entropies = support, wording, list[int](), entropies
        self.window = max_tokens or sys.maxsize  # tokens that it may still sample
        # what was done in the environment and what it said; ``names_states``: whether it has keys of its own
        self.actions, self.replies, self.observation, self.names_states = list[Action](), list[str](), "", True
        stages = [min(limits.turns, n) for n in ([max_turns] if isinstance(max_turns, int) else max_turns) if n]
        limits = replace(limits, turns=stages[-1]) if stages else limits
        self.told_limits = () if isinstance(max_turns, int) else sorted({*stages})
        self.fork_from, self.fork_points, self.with_hint, self.hint = fork_from, fork_points, with_hint, ""
        self.key, self.task, self.environment, self.session = key, task, environment, session
        self.renderer, self.limits, self.record_masked = renderer, limits, record_masked
        self.policy_temperature = (
            sampling.temperature or 1.0
        )  # of the policy that is trained, without temperature_scale
        self.temperature_scale = temperature_scale
        scaled = sampling.temperature * temperature_scale
        self.sampling = sampling if temperature_scale == 1 else replace(sampling, temperature=scaled)
        self.sampling = self.sampling if entropies is None else replace(self.sampling, entropy=True)
        self.inline = bool(getattr(type(environment), "inline", False))
        self.turns: list[Turn] = []
        self.rewards: dict[str, float] = {}
        self.success: bool | None = None
        self.dialogue: Dialogue | None = None
        self.hinted_dialogue: Dialogue | None = None  # the same dialogue with the hint; sampled from if there is one
        self.answer: tuple[int, ...] = ()
        self.end: str | None = None
        self.limit: Limit | None = None
        self.lost = False

    async def run(self) -> Trajectory:
        status, reason = Status.FAILED, "cancelled"
        try:
            status, reason = await self._play()
            self.end = await self._state()
        except ContextOverflow as overflow:
            status, reason = Status.TRUNCATED, str(overflow)
            self.limit = Limit.CONTEXT if self.window > 0 else Limit.TOKENS
        except Exception as fault:  # raised by the environment, the generator or the machine
            status, reason = Status.FAILED, fault_words(fault)
            self.lost = bool(host_fault(fault))
        finally:
            self.session.close()
            if self.others is not None:
                self.others.session.close()
            close = getattr(self.environment, "close", None)
            if close is not None:
                with contextlib.suppress(Exception):  # a close that fails or hangs must not fail the episode
                    await self._call(close)
        guidance = [f"temperature_scale {self.temperature_scale:g}"] * (self.temperature_scale != 1)
        guidance += [f"hint: {self.hint}"] * bool(self.hint)
        guidance += [self.support.label] if self.support is not None and self.support.label else []
        success = self.success
        if self.others is not None and success is not None:
            # the environment's verdict is on the game: with other players the policy's own seat must have come out ahead
            success = sum(turn.reward for turn in self.turns) > 0
        return Trajectory(
            id=self.key,
            task=self.task,
            turns=tuple(self.turns),
            rewards=self.rewards,
            status=status,
            reason=reason,
            success=success,
            facts=self.others.facts if self.others is not None else {},
            end=self.end,
            answer=self.answer,
            fork=Fork(self.fork_from.key, self.fork_from.turn, self.fork_from.token) if self.fork_from else None,
            guidance=", ".join(guidance),
            messages=tuple(self.dialogue.messages) if self.dialogue else (),
            limit=self.limit,
            lost=self.lost,
        )

    async def _call(self, function: Callable[..., Any], *args: Any, inline: bool = False) -> Any:
        seconds = self.limits.environment_seconds
        return await call_environment(function, *args, seconds=seconds, inline=inline or self.inline)

    async def _play(self) -> tuple[Status, str]:
        if self.wording:
            self.environment.wording = self.wording
        first = read_messages(await self._call(self.environment.reset, self.task.seed), "reset")
        tools, support = tuple(getattr(self.environment, "tools", ())), self.support
        self._hear(first)
        if self.fork_from is None:
            first = with_reminder(first, self._taken_before(), self.told_limits) if self.told_limits else first
            recorded = support.hint if support is not None and support.recorded else ""
            self.dialogue = self.renderer.open(with_hint_text(first, recorded), tools, self.limits.history)
            given = support.turns if support is not None else ()
            for tokens in given:  # they become context of the policy's first turn
                step = await self._play_as_context(self.dialogue, tokens)
                if step.terminated or step.truncated:
                    raise EnvironmentFault("the given turns end the episode, so nothing is left to sample; give fewer")
                self.renderer.append_observation(self.dialogue, step.messages, self.record_masked, step.context)
        else:  # the prefix, including the context of this turn, belongs to the parent trajectory
            if self.fork_from.snapshot is not None:
                await self._call(self.environment.restore, self.fork_from.snapshot)
            else:
                await self._replay(self.fork_from, first)
            self.actions, self.replies = list(self.fork_from.actions), list(self.fork_from.replies)
            self.observation = self.fork_from.observation
            prefix = copy.deepcopy(self.fork_from.dialogue)
            self.dialogue = replace(prefix, new_ids=[], masked_ids=[], restarted=False)
            self.rewards = dict(self.fork_from.rewards)
        if hasattr(self.environment, "answer"):
            answer = read_answer(await self._call(self.environment.answer))
            self.answer = () if answer is None else tuple(self.renderer.encode(answer))
        if self.with_hint or (support is not None and support.hint and not support.recorded):
            await self._open_hinted(first if self.fork_from is None else self.dialogue.messages, tools)
        for _ in range(self.limits.turns - self._taken_before()):
            room = self.limits.context - len((self.hinted_dialogue or self.dialogue).ids) - len(self._start())
            if room < 1:
                self.limit = Limit.CONTEXT
                return Status.TRUNCATED, f"context window of {self.limits.context} tokens (--context)"
            if self.window < 1:
                raise ContextOverflow(WINDOW_END)
            seat = str(getattr(self.environment, "agent", "agent"))
            others_move = self.others is not None and seat != self.others.seat
            step = await (self._other_turn if others_move else self._turn)(self.dialogue)
            if step.terminated:
                return Status.FINISHED, ""
            if step.truncated:
                self.limit = Limit.ENVIRONMENT
                return Status.TRUNCATED, "environment"
        self.limit = Limit.TURNS
        return Status.TRUNCATED, "turn limit"

    async def _step(self, action: Action) -> Step:
        """One step in the environment, which is remembered."""
        self.actions.append(action)
        step = read_step(await self._call(self.environment.step, action))
        self._hear([*(step.context or ()), *step.messages], step)
        return step

    def _hear(self, messages: Sequence[Message], step: Step | None = None) -> None:
        self.observation = observed_state(messages)
        if self.fork_points is not None:  # others may fork from here
            self.replies.append(comparable(messages, step))

    async def _replay(self, point: ForkPoint, first: Sequence[Message]) -> None:
        """Bring the environment to a fork point by the actions that led to it. It must reply as it did."""
        replies = [comparable(first)]
        for action in point.actions:
            if replies[-1] != point.replies[len(replies) - 1]:
                break
            step = read_step(await self._call(self.environment.step, action))
            replies.append(comparable([*(step.context or ()), *step.messages], step))
        if tuple(replies) != point.replies:
            what = f"action {len(replies) - 1}" if replies[1:] else "reset"
            raise EnvironmentFault(
                f"{what} was answered otherwise when it was played again: the environment is not deterministic, so its episodes "
                "cannot be forked; give it snapshot() and restore(), or take another strategy"
            )

    async def _open_hinted(self, first: list[Message], tools: tuple[Any, ...]) -> None:
        """Open the dialogue that is sampled from: the hint is appended to the first message, which always stays visible."""
        hint = getattr(self.environment, "hint", None)
        if self.support is not None:
            self.hint = self.support.hint
        else:
            self.hint = (read_hint(await self._call(hint)) if callable(hint) else None) or ""
        if self.hint and first:
            self.hinted_dialogue = self.renderer.open(with_hint_text(first, self.hint), tools, self.limits.history)

    async def _fork_point(self, dialogue: Dialogue) -> ForkPoint:
        """The present state."""
        take = getattr(self.environment, "snapshot", None)
        snapshot = copy.deepcopy(await self._call(take, inline=True)) if callable(take) else None
        ask = getattr(self.environment, "turns_to_solve", None)
        remaining = await self._call(ask) if callable(ask) else None
        taken, rewards = len(self.turns) + self._taken_before(), dict(self.rewards)
        state = (snapshot, copy.deepcopy(dialogue), rewards, taken, self._start(), 0, ())
        said = (tuple(self.actions), tuple(self.replies), self.observation)
        return ForkPoint(self.key, len(self.turns), *state, *said, remaining)

    def _taken_before(self) -> int:
        """Turns of this episode that the policy does not take here: its ancestors' and given ones."""
        given = len(self.support.turns) if self.support is not None else 0
        return given + (self.fork_from.taken if self.fork_from else 0)

    async def _play_as_context(self, dialogue: Dialogue, tokens: Sequence[int]) -> Step:
        """Apply a turn that the policy did not take. Its ids are context of the policy's next turn."""
        if dialogue.restarted:
            self.carried, self.carried_restart = [], True
        self.carried = [*self.carried, *dialogue.new_ids, *tokens]
        return await self._step(self.renderer.append_sampled(dialogue, tokens))

    async def _other_turn(self, dialogue: Dialogue) -> Step:
        """A turn of another player. What it earns is not the policy's; what it pays the policy's seat is."""
        assert self.others is not None
        completion = await self.others.session.generate(dialogue.ids, self.sampling)
        if completion.stop == Stop.CANCELLED:
            raise EnvironmentFault("cancelled")
        step = await self._play_as_context(dialogue, completion.tokens)
        self._record_info(step)
        if not (step.terminated or step.truncated):
            self.renderer.append_observation(dialogue, step.messages, self.record_masked, step.context)
        else:
            dialogue.messages += step.messages
        return step

    def _start(self) -> tuple[int, ...]:
        """Ids that begin the first turn and were not sampled in it."""
        if self.turns:
            return ()
        if self.fork_from is not None:
            return (*self.fork_from.start, *self.fork_from.added)
        return self.support.start if self.support is not None else ()

    def _context(self, dialogue: Dialogue) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Context of this turn, and the same with masked observations. A fork reads its parent's ids as context anyway."""
        shared = len(self.fork_from.start) if self.fork_from is not None and not self.turns else 0
        before = [] if dialogue.restarted else self.carried
        context = (*before, *dialogue.new_ids, *self._start()[shared:])
        masked = (*before, *dialogue.masked_ids, *self._start()[shared:]) if dialogue.masked_ids else ()
        return context, masked

    async def _turn(self, dialogue: Dialogue) -> Step:
        if self.fork_points is not None:
            self.fork_points.append(await self._fork_point(dialogue))
        state, agent = await self._state(), str(getattr(self.environment, "agent", "agent"))
        (context, masked), start = self._context(dialogue), self._start()
        restart = dialogue.restarted or (self.carried_restart and bool(self.turns))
        self.carried, self.carried_restart = [], False
        sampling = self.sampling
        if start:  # the limit holds for the whole turn
            sampling = replace(sampling, max_tokens=max(1, sampling.max_tokens - len(start)), begun=len(start))
        ids, limit = [*(self.hinted_dialogue or dialogue).ids, *start], min(sampling.max_tokens, self.window)
        completion = await self.session.generate(ids, replace(sampling, max_tokens=limit))
        if completion.stop == Stop.CANCELLED:
            raise EnvironmentFault("cancelled")
        self.window -= len(completion.tokens)
        if self.window < 1 and completion.stop == Stop.LENGTH and len(completion.tokens) < sampling.max_tokens:
            completion = replace(completion, stop=Stop.WINDOW)
        action: Action = self.renderer.append_sampled(dialogue, [*start, *completion.tokens])
        if not self.turns and self.support is not None and self.support.without_tools:
            self.no_tools = action.text.lstrip().startswith(tuple(text.strip() for text in self.support.without_tools))
        action = replace(action, calls=(), faults=(), unread=()) if self.no_tools else action
        if self.hinted_dialogue is not None:
            self.renderer.append_sampled(self.hinted_dialogue, [*start, *completion.tokens])
        if self.entropies is not None:
            self.entropies.append(tuple(completion.entropy))
        began = time.perf_counter()
        try:
            if completion.stop == Stop.WINDOW:  # the environment hears of a turn when it is whole
                raise ContextOverflow(WINDOW_END)
            step = await self._step(action)
        except BaseException:
            step = Step()
            raise
        finally:
            self.turns.append(
                sampled_turn(
                    completion,
                    context=context,
                    masked_context=masked,
                    routes=self._routes(completion, context),
                    reward=float(step.reward),
                    agent=agent,
                    state=state,
                    restart=restart,
                    temperature=self.policy_temperature,
                    tool_calls=int(step.info.get("tool_calls", 0)),
                    tool_errors=int(step.info.get("tool_errors", 0)),
                    facts={**read_facts(step.info), **action.facts},
                    seconds_acting=time.perf_counter() - began,
                )
            )
        self._record_info(step)
        if self.told_limits and not (step.terminated or step.truncated):
            taken = len(self.turns) + self._taken_before()
            step = replace(step, messages=with_reminder(step.messages, taken, self.told_limits))
        if not (step.terminated or step.truncated):
            self.renderer.append_observation(dialogue, step.messages, self.record_masked, step.context)
            if self.hinted_dialogue is not None:
                self.renderer.append_observation(self.hinted_dialogue, step.messages, context=step.context)
        else:
            dialogue.messages += step.messages
        return step

    def _routes(self, completion: Completion, context: Sequence[int]) -> tuple[bytes, ...]:
        """The routes of this turn's positions; a fork's first turn holds those of its prefix, too. With a hint in its prompt the
        policy read other ids than the learner will."""
        if self.hinted_dialogue is not None:
            return ()
        if self.fork_from is not None and not self.turns:
            return tuple(completion.routes)
        return tuple(completion.routes[-(len(context) + len(completion.tokens)) :])

    async def _state(self) -> str | None:
        """The key of the current state; its observation where the environment names none. One that does not name the first
        state is not asked again."""
        key = getattr(self.environment, "state_key", None)
        named = read_state_key(await self._call(key)) if self.names_states and callable(key) else None
        self.names_states = named is not None
        return self.observation if named is None else named

    def _record_info(self, step: Step) -> None:
        if "success" in step.info:
            self.success = bool(step.info["success"])
        for name, value in dict(step.info.get("rewards", {})).items():
            self.rewards[name] = self.rewards.get(name, 0.0) + float(value)
        for agent, value in dict(step.info.get("paid", {})).items():
            # what another agent earns by this step goes to its latest turn; one that has not acted yet earns nothing
            latest = max((n for n, turn in enumerate(self.turns) if turn.agent == agent), default=None)
            if latest is not None:
                turn = self.turns[latest]
                self.turns[latest] = replace(turn, reward=turn.reward + float(value))
