"""Who plays an episode: this process, or one of several that do nothing else (``--env-processes``).

An interpreter needs a quarter of a millisecond for a turn, and more where a tool starts a process: with hundreds of episodes a
GPU waits for it. Other processes play whole episodes: environment, tools, rendering, parsing, records. The sessions stay here.
What crosses is, for each turn, the ids that are new to the dialogue, and the tokens sampled behind them; then the trajectory. All
that is to be said to one process at a moment is one message.

Random numbers belong to sessions and tasks, so who plays an episode changes nothing in it. A process that dies costs its episodes
nothing: another one plays them again from the start, with the tokens sampled so far, and must ask for the same ids. An episode
during whose own work processes die goes on alone, and fails when that process dies, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import pickle
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields, replace
from functools import partial
from operator import attrgetter
from typing import Any

from turnwise.config.named_object import GIVEN_OBJECT
from turnwise.config.settings import Settings
from turnwise.core import records
from turnwise.core.protocols import Session
from turnwise.core.records import Completion, Sampling, Task, Trajectory, Turn
from turnwise.environments.calls import INTERRUPT_EVERY, INTERRUPTS, with_timeout
from turnwise.environments.isolated import READY, EnvironmentProcess, HostLost, ProcessPool, moved, serve_episodes
from turnwise.errors import EnvironmentFault, HostFault, ServerFault, SettingError, host_fault
from turnwise.rollout.episode import Episode, UnforkedSession
from turnwise.rollout.helper import Helper
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.strategies import EpisodeRunner
from turnwise.rollout.support import Support, SupportResolver
from turnwise.rollout.typed_output import run_grammar
from turnwise.training.agents import agent_play
from turnwise.training.plan import EnvSpec, file_stamp, has_gpu, read_solutions
from turnwise.workers.process import WorkerLost

MOST_PROCESSES = 32  # by default, however many cores there are: one interpreter must answer all of them
# options of an episode that mean the same in another process; the others share objects with whoever gave them
CROSSING = frozenset({"support", "with_hint", "max_turns", "max_tokens", "wording"})
SETUP, PLAY, SAMPLED, RAISED, CANCEL = range(5)  # what is said to a process that plays ...
GENERATE, PLAYED, FAULT = range(3)  # ... and what it answers
NO_LIMIT = 1 << 30
GATHER_SECONDS = (
    0.001  # an answer waits for others of its process: a message costs the run's process more than what it says
)


def make_renderer(settings: Settings, tokenizer: Any) -> Renderer:
    """The renderer of a run: its tokenizer with the settings for its chat template."""
    return Renderer(tokenizer, settings.template_options, settings.tool_syntax, settings.describe_tools)


def row_sampling(env_spec: EnvSpec, sampling: Sampling, task: Task) -> Sampling:
    """How a task is sampled: what its row says that an answer must match comes before what the run says."""
    columns = env_spec.columns(task)
    if not any(columns.get(name) for name in ("response_format", "regex")):
        return sampling
    return replace(sampling, grammar=run_grammar(columns.get("response_format"), columns.get("regex")))


def make_play(
    env_spec: EnvSpec, renderer: Renderer, sampling: Sampling, record_masked: bool = False, seats: Any = None,
    helper: Helper | None = None,
) -> EpisodeRunner:  # fmt: skip
    """A ``EpisodeRunner``: one episode of one task with one session. ``record_masked`` also records each prompt with its latest
    observation masked. ``seats`` says who plays those that are not the policy's; ``helper`` writes hints."""
    limits, s = env_spec.limits, env_spec.settings
    if env_spec.agent is not None:
        return agent_play(
            env_spec.try_make,
            env_spec.agent,
            renderer,
            partial(row_sampling, env_spec, sampling),
            limits,
            env_spec.columns,
            env_spec.paid_from,
        )
    solutions = read_solutions(s.solutions, file_stamp(s.solutions)) if s.solutions else {}
    resolver = SupportResolver(env_spec.make, renderer, limits, env_spec.tools, solutions, helper)

    async def play(key: str, task: Task, session: Session, temperature_scale: float = 1.0, **more: Any) -> Trajectory:
        if helper is not None:
            session.unpark()  # batches must not depend on how long an answer takes
            if more.pop("with_hint", False):
                more["support"] = Support(tier=1, recorded=False)
        if more.get("support") is not None:
            try:
                more["support"] = await resolver.resolve(more["support"], task)
            except Exception as fault:  # raised by the environment
                session.close()
                if isinstance(fault, ServerFault):
                    raise  # the helper is gone, and the run stops
                return Trajectory(key, task, ()).failed(f"no help for this task: {fault}", bool(host_fault(fault)))
        env = env_spec.try_make(task)
        if seats is not None:
            more["others"] = seats(key, task, env, session)
        of_row = row_sampling(env_spec, sampling, task)
        return await Episode(
            key, task, env, session, renderer, of_row, limits, temperature_scale, record_masked, **more
        ).run()

    count = process_count(s)
    if count < 2 or seats is not None:
        return play
    return DistributedPlay(play, s, renderer.tokenizer, sampling, record_masked, count)


def process_count(settings: Settings) -> int:
    """How many processes play the episodes of a run; 1: its own."""
    s = settings
    given = s.env.startswith(GIVEN_OBJECT)
    if s.env_processes > 1 and given:
        raise SettingError(
            f"env_processes: another process cannot import {s.env}; give a class by its name, module:Class, or write 1"
        )
    if s.env_processes or given or s.cluster.environments or s.device.startswith("cpu") or not has_gpu():
        return s.env_processes or 1
    return min(
        MOST_PROCESSES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )


# ------------------------------------------------------------- where the sessions are


class DistributedPlay:
    """``here``, in one of ``count`` processes. Episodes with options that cannot cross are played here."""

    def __init__(
        self,
        here: EpisodeRunner,
        settings: Settings,
        tokenizer: Any,
        sampling: Sampling,
        record_masked: bool,
        count: int,
    ) -> None:
        self.here, self.settings, self.count = here, settings, count
        self.crossing = CROSSING - ({"support", "with_hint"} if settings.helper else set())  # a helper answers here
        there = replace(settings, env_processes=1)
        self._number = next(_numbers)
        self._setup = pickle.dumps((SETUP, self._number, (os.getcwd(), there, tokenizer, sampling, record_masked)))
        # a call that holds the interpreter of its process is interrupted there, where it can be
        self._silence = settings.env_seconds + 2 * INTERRUPTS * INTERRUPT_EVERY

    async def __call__(
        self, key: str, task: Task, session: Session, temperature_scale: float = 1.0, **more: Any
    ) -> Trajectory:
        if not more.keys() <= self.crossing:
            return await self.here(key, task, session, temperature_scale, **more)
        turns = list[tuple[list[int], Completion]]()  # what was sampled so far, and behind which ids
        suspect, reasons = False, list[str]()
        try:
            while True:
                process = await PROCESSES.place(self.settings.env, suspect, self.count)
                try:
                    async with _watched(process, self._silence):
                        return await self._play_in(process, session, turns, (key, task, temperature_scale, more))
                except HostLost as lost:
                    suspect = suspect or lost.suspect
                    reasons.append(str(lost))
                    if len(reasons) > PROCESSES.moves:
                        kind = HostFault if lost.by_host else EnvironmentFault
                        raise kind(f"{lost}; it was tried {len(reasons)} times") from None
                    moved.append(str(lost))
                finally:
                    PROCESSES.leave(process)
        except (EnvironmentFault, HostFault) as fault:
            return Trajectory(key, task, ()).failed(str(fault), bool(host_fault(fault)))
        finally:
            session.close()

    async def _play_in(
        self, process: EnvironmentProcess, session: Session, turns: list[tuple[list[int], Completion]], given: Any
    ) -> Trajectory:
        episode, ids, sampling, earlier = next(_numbers), list[int](), Sampling(), iter(tuple(turns))
        if self._number not in process.prepared:
            process.prepared.add(self._number)
            process.ask(self._setup)  # not ``exchange``: other episodes need it, whatever becomes of this one
        message: tuple[Any, ...] = (PLAY, episode, (self._number, *given))
        try:
            while True:
                kind, *event = _read(await process.deliver(pickle.dumps(message), "an episode"))
                if kind == PLAYED:
                    turns_played, *rest = event
                    return Trajectory(given[0], given[1], tuple(Turn(*values) for values in turns_played), *rest)
                if kind == FAULT:
                    words, host = event
                    raise HostFault(host) if host else EnvironmentFault(words)
                same, tail, changed = event
                ids, sampling = [*ids[:same], *tail], changed or sampling
                before, completion = next(earlier, (ids, None))
                if before != ids:
                    raise EnvironmentFault(
                        "its process died, and the environment is not deterministic: "
                        "it replied otherwise when the episode was repeated"
                    )
                if completion is None:
                    try:
                        completion = await session.generate(ids, sampling)
                    except Exception as fault:  # the episode says what it means
                        message = (RAISED, episode, fault)
                        continue
                    turns.append((ids, completion))
                ids = [*ids, *completion.tokens]
                message = (SAMPLED, episode, COMPLETION(completion))
        except BaseException:
            process.ask(pickle.dumps((CANCEL, episode, None)))  # nobody waits for the episode any longer
            raise


# records cross as their fields: pickle takes several times as long for a frozen dataclass with slots
COMPLETION, TURN, TRAJECTORY = (
    attrgetter(*[field.name for field in fields(record)[begin:]])
    for record, begin in ((Completion, 0), (Turn, 0), (Trajectory, 3))  # without id, task and turns
)
_numbers = itertools.count()


class _Records(pickle.Unpickler):
    """Reads what a process answers: records and plain values, nothing that could run code here."""

    def find_class(self, module: str, name: str) -> Any:
        if module == records.__name__ and name in RECORDS:
            return getattr(records, name)
        raise EnvironmentFault(
            f"a {module}.{name} is among what the environment returned; write texts, numbers, lists and dicts in its "
            "messages and facts"
        )


RECORDS = ("Fork", "Sampling", "Status", "Limit", "Origin", "Stop")


def _read(answer: bytes) -> Any:
    return _Records(io.BytesIO(answer)).load()


@contextlib.asynccontextmanager
async def _watched(process: EnvironmentProcess, seconds: float) -> AsyncIterator[None]:
    """Inside, the process is killed when its interpreter answers nobody for so long: code that never lets Python run would
    hold up all its episodes."""
    watch = process.watch
    if watch is None or watch.done() or watch.get_loop() is not asyncio.get_running_loop():
        process.watch = asyncio.get_running_loop().create_task(_watch(process, seconds))
    process.watched += 1
    try:
        yield
    finally:
        process.watched -= 1
        if not process.watched and process.watch is not None:
            process.watch.cancel()
            process.watch = None


async def _watch(process: EnvironmentProcess, seconds: float) -> None:
    with contextlib.suppress(WorkerLost):
        while True:
            await asyncio.sleep(seconds)
            try:
                await with_timeout(process.exchange(READY), seconds)
            except EnvironmentFault:
                process.kill(f"was killed, because it gave no sign of life for {seconds:g} s", blame=True)


# ------------------------------------------------------------ where the episodes are


class RelayedSession(UnforkedSession):
    """The session of an episode whose generator is in another process: what it asks for is the answer of this process."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.completion: asyncio.Future[Completion] = self.answer.get_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self._ids, self._sampling = list[int](), Sampling()  # as the other process knows them

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        ids, same = list(ids), len(self._ids)
        same = same if ids[:same] == self._ids else 0
        self.completion = self.answer.get_loop().create_future()
        self.answer_with(GENERATE, same, ids[same:], None if sampling == self._sampling else sampling)
        completion = await self.completion
        self._ids, self._sampling = [*ids, *completion.tokens], sampling
        return completion

    def answer_with(self, *event: Any) -> None:
        if not self.answer.done():  # otherwise the other process has given the episode up
            self.answer.set_result(event)


class PlayingProcess:
    """The episodes of this process."""

    def __init__(self) -> None:
        self.plays: dict[int, EpisodeRunner] = {}
        self.faults: dict[int, str] = {}  # why there is no such play
        self.sessions: dict[int, RelayedSession] = {}

    async def respond(self, payload: bytes) -> bytes:
        kind, number, content = pickle.loads(payload)
        if kind == SETUP:
            self._prepare(number, *content)
            return b""
        session = self.sessions.get(number)
        if kind == CANCEL:
            if session is not None and session.task is not None:
                session.task.cancel()
            return b""
        if kind == PLAY:
            session = self.sessions[number] = RelayedSession()
            session.task = asyncio.get_running_loop().create_task(self._play(number, session, *content))
        assert session is not None, "its episode was cancelled, and nobody waits for this answer"
        if kind != PLAY:
            session.answer = asyncio.get_running_loop().create_future()
            if kind == RAISED:
                session.completion.set_exception(content)
            else:
                session.completion.set_result(Completion(*content))
        return pickle.dumps(await session.answer)

    def _prepare(
        self, number: int, folder: str, settings: Settings, tokenizer: Any, sampling: Sampling, masked: bool
    ) -> None:
        try:
            os.chdir(folder)  # paths among the settings are relative to it; this process may be older than the run
            env_spec = EnvSpec.from_settings(settings)
            self.plays[number] = make_play(env_spec, make_renderer(settings, tokenizer), sampling, masked)
        except Exception as fault:  # told to the episodes
            self.faults[number] = f"{type(fault).__name__}: {fault}"

    async def _play(self, episode: int, session: RelayedSession, number: int, *given: Any) -> None:
        try:
            if number in self.faults:
                raise EnvironmentFault(f"its process could not prepare the episode: {self.faults[number]}")
            key, task, scale, more = given
            played = await self.plays[number](key, task, session, scale, **more)
            session.answer_with(PLAYED, [TURN(turn) for turn in played.turns], *TRAJECTORY(played))
        except Exception as fault:
            words = f"{type(fault).__name__}: {fault}".removeprefix("EnvironmentFault: ")
            session.answer_with(FAULT, words, host_fault(fault))
        finally:
            del self.sessions[episode]


def main(descriptor: int, name: str) -> None:
    serve_episodes(descriptor, name, PlayingProcess().respond, GATHER_SECONDS)


PROCESSES = ProcessPool(partial(EnvironmentProcess, module=__name__), NO_LIMIT)  # those that play whole episodes
