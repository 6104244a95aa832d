"""The watch over a run: a thread that writes once a second to ``status.json`` what every component does, and where nothing moves
for ``STALL_SECONDS`` names the culprit in the log.

It only reads counters that the components keep anyway, so a watched run and an unwatched one are the same, bit for bit. A fault
of the watch is told and ends the watch, never the run. Four parts: what the components report (``RunParts``), one look at all of
them (``RunMoment``), words for who waits for whom and who is stuck, and the thread (``RunWatch``). Knows how no component works;
one that does not exist yet, or that another engine lacks, reports nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from turnwise.core.protocols import Listener
from turnwise.environments.calls import WATCHDOG, WatchedCall, describe_line, line_awaited, line_of
from turnwise.environments.isolated import moved
from turnwise.observe.numbers import format_duration
from turnwise.observe.profile import patched_attribute, wrapped_call
from turnwise.observe.trackers import MESSAGES, read_rows
from turnwise.store.lock import lock_holder
from turnwise.store.rundir import RunDir
from turnwise.training.interrupt import RunStopped


def silent(event: str, facts: Mapping[str, Any]) -> None:
    """A listener that shows nothing."""


@dataclass
class RunEvents:
    """Sends events to ``listen`` and measures stages. A stage inside another counts for itself alone: ``seconds`` add up."""

    listen: Listener = silent
    seconds: dict[str, float] = field(default_factory=dict)
    watch: RunWatch | None = None
    _inside: float = 0.0  # seconds of the stages that have ended inside the present one

    @contextlib.contextmanager
    def stage(self, name: str, total: int = 0, of: str = "steps") -> Iterator[None]:
        self.listen("stage", {"name": name, "total": total, "of": of})
        began, inside, self._inside = time.perf_counter(), self._inside, 0.0
        try:
            yield
        finally:
            whole = time.perf_counter() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + whole - self._inside
            self._inside = inside + whole

    @contextlib.contextmanager
    def loop_stage(self, loop: Any) -> Iterator[None]:
        """The stage of the training loop, whose parts are watched."""
        watching = self.watch.over(loop) if self.watch is not None else contextlib.nullcontext()
        with self.stage("learn", loop.steps), watching:
            yield

    def uses(self, **parts: Any) -> None:
        """Make parts of the run known to the watch."""
        if self.watch is not None:
            for name, part in parts.items():
                setattr(self.watch.parts, name, part)

    def step(self, name: str, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        self.listen("step", {"stage": name, "step": step, "total": total, **metrics})

    def message(self, text: str, level: str = "info", **facts: Any) -> None:
        self.listen("message", {"level": level, "text": text, **facts})


STALL_SECONDS = 30.0  # without any progress, before the culprit is named; named again after twice that, four times ...
PERIOD = 1.0  # seconds between two looks
WINDOW = 60.0  # seconds over which throughput is measured
FROZEN_SECONDS = 5.0  # a look that comes so late was kept waiting itself
BUSY = 0.3  # share of a processor from which on a process computes and does not merely wait
AGENT_LIMIT = 1e6  # seconds: a call without a limit of its own is an agent's whole episode
REWARDS = f"{Path(__file__).parent.parent / 'rewards'}"
LEARNING, RECORDING = ("update", "measure"), ("seal", "flush")
PHASES = {"demonstrations": "cold start", "learn": "rollout"}  # by stage, while no call of the loop says more
AFTER = {"evaluate after": "results"}  # what follows a stage that has ended; after any other: the engines are built


# ----------------------------------------------------------------- calls of the loop


@dataclass(frozen=True, slots=True)
class RunningCall:
    """A call that has not ended."""

    name: str
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


@dataclass
class Activity:
    """Calls in progress, and how many have ended. ``with activity.attached(learner, "update", "update"): ...`` counts and times
    calls of ``learner.update``. Written by the threads of the run, read by the watch: every change is one operation on a dict, so
    nobody waits for a lock."""

    running: dict[int, RunningCall] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)  # seconds, by name
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def oldest(self, *names: str) -> RunningCall | None:
        """Of the calls with one of these names, the one that has run longest."""
        calls = [call for call in tuple(self.running.values()) if call.name in names]
        return min(calls, key=lambda call: call.began, default=None)

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        number, call = next(self._numbers), RunningCall(name)
        self.running[number] = call
        try:
            yield
        finally:
            self.running.pop(number, None)
            self.longest[name] = max(self.longest.get(name, 0.0), call.seconds)
            self.ended[name] += 1

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function or coroutine function, listed while it runs."""
        return wrapped_call(function, lambda: self.call(name))

    @contextlib.contextmanager
    def attached(self, owner: Any, method: str, name: str) -> Iterator[None]:
        """List the calls of one method of an object. Another engine may lack the method: nothing happens then."""
        function = getattr(owner, method, None)
        if not callable(function) or not hasattr(owner, "__dict__"):
            yield
            return
        with patched_attribute(owner, method, self.wrap(name, function)):
            yield


# -------------------------------------------------------------- what components report


@dataclass(frozen=True)
class OutsideCalls:
    """Calls into code of the user: environments, reward functions or agents."""

    count: int = 0
    name: str = ""  # of the one that has run longest
    seconds: float = 0.0
    line: str = ""  # where it is


@dataclass(frozen=True)
class GeneratorFacts:
    running: int = 0  # requests in the batch
    waiting: int = 0
    dialogues: int = 0  # open
    silent: int = 0  # open dialogues that have no request: their environment or agent is to act
    opened: int = 0  # dialogues so far
    tokens: int = 0
    progress: tuple[float, ...] = ()
    version: int = 0
    oldest_token: int | None = None  # version of the oldest sampled token of a request in flight


@dataclass(frozen=True)
class ServerFacts:
    url: str
    dialogues: int
    owed: int  # replies it has not sent
    answered: int
    version: int
    lost: str
    paused: bool = False  # not by this run


@dataclass(frozen=True)
class RankFacts:
    rank: int
    process: int
    state: str  # running, sleeping, stopped, ended; empty where the system does not tell
    cpu_seconds: float
    machine: str = ""  # where it is not this one: then nothing is known of its processor

    def __str__(self) -> str:
        return f"process {self.process}" + (f" on {self.machine}" if self.machine else "")


@dataclass(frozen=True)
class GroupFacts:
    running: int = 0
    ready: int = 0
    training: int = 0
    dropped: int = 0
    oldest: int | None = None  # version at which the oldest of them was issued


@dataclass
class RunParts:
    """The parts of a run as they come into being, and what they are doing."""

    activity: Activity = field(default_factory=Activity)
    generator: Any = None
    learner: Any = None
    collector: Any = None
    ledger: Any = None

    def generator_facts(self) -> GeneratorFacts | None:
        if self.generator is None:
            return None
        stats = self.generator.stats()
        parts = list(_engines(self.generator))
        engines = [engine for engine in parts if hasattr(engine, "sessions")]
        sessions = [session for engine in engines for session in tuple(engine.sessions.values())]
        requests = [r for session in sessions if (r := session.request) is not None and r.stop is None]
        running = sum(len(engine.scheduler.running) for engine in engines)
        dialogues = len(sessions) if engines else int(stats.get("open", 0))
        owed = sum(server.owed for server in self.servers())
        return GeneratorFacts(
            running=running or owed,
            waiting=max(0, len(requests) - running),
            dialogues=dialogues,
            silent=sum(1 for s in sessions if not (s.pending or s.parked)) if engines else max(0, dialogues - owed),
            opened=sum(int(getattr(engine, "_opened", 0)) for engine in parts),
            tokens=int(stats.get("tokens", 0)),
            progress=tuple(stats.get(name, 0.0) for name in ("tokens", "steps", "prefill_tokens", "publishes")),
            version=self.generator.version,
            oldest_token=min((r.version[0] for r in requests if r.version), default=None),
        )

    def servers(self) -> list[ServerFacts]:
        replicas = [r for engine in _engines(self.generator) for r in getattr(engine, "replicas", ())]
        return [ServerFacts(r.url, r.sessions, r.owed, r.answered, r.version, r.lost, r.paused) for r in replicas]

    def ranks(self) -> list[RankFacts]:
        """The processes of a learner over several ranks, beside this one, which is rank 0."""
        pool = getattr(self.learner, "pool", None)
        return [
            RankFacts(n, number, "ended" if ended else "", 0.0, machine)
            if machine
            else RankFacts(n, number, *process_state(number))
            for n, (number, machine, ended) in enumerate(pool.processes if pool else (), start=1)
        ]

    def groups(self) -> GroupFacts | None:
        c = self.collector
        if c is None:
            return None
        issued = tuple(getattr(c, "issued_in", {}).values())
        dropped = sum(tuple(c.dropped.values()))
        return GroupFacts(len(getattr(c, "running", ())), len(c.ready), c.training, dropped, min(issued, default=None))

    @property
    def ledger_queue(self) -> int:
        return self.ledger.queued if self.ledger is not None else 0


def _engines(generator: Any) -> Iterator[Any]:
    """A generator and those it consists of: the exact one and the one for drafts, the policy's and the opponents'."""
    if generator is None:
        return
    inner = [getattr(generator, name) for name in ("main", "exact", "cheap", "opponents") if hasattr(generator, name)]
    if not inner:
        yield generator
    for part in inner:
        yield from _engines(part)


def outside_calls() -> dict[str, OutsideCalls]:
    """Calls in progress by kind: ``environment``, ``reward``, ``agent``."""
    kinds: dict[str, list[WatchedCall]] = {"environment": [], "reward": [], "agent": []}
    for call in tuple(WATCHDOG.calls.values()):
        if call.name:
            rewarding = call.code is not None and call.code.co_filename.startswith(REWARDS)
            kinds["agent" if call.seconds > AGENT_LIMIT else "reward" if rewarding else "environment"].append(call)
    outside = dict.fromkeys(kinds, OutsideCalls())
    for kind, calls in kinds.items():
        if calls:
            call = min(calls, key=lambda c: c.began)
            seconds = time.monotonic() - call.began
            line = "" if seconds < 1 else line_awaited(call.awaited) if call.awaited is not None else line_of(call)
            outside[kind] = OutsideCalls(len(calls), call.name.split(".")[-1], seconds, line)
    return outside


def main_line() -> str:
    """The line at which the main thread is; empty while its event loop only waits."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is not None and frame.f_code.co_name in ("select", "poll") and "selectors" in frame.f_code.co_filename:
        return ""
    return describe_line(frame)


@dataclass(frozen=True)
class RunMoment:
    """One look at a run."""

    phase: str
    step: int
    env: str
    still: float  # seconds since anything moved
    busy: bool  # the process has computed since then
    line: str = ""  # where the main thread is
    generator: GeneratorFacts | None = None
    groups: GroupFacts | None = None
    calls: Mapping[str, OutsideCalls] = field(default_factory=dict)
    servers: Sequence[ServerFacts] = ()
    ranks: Sequence[RankFacts] = ()
    idle_ranks: frozenset[int] = frozenset()  # those that used no processor while nothing moved
    learning: RunningCall | None = None
    longest_update: float = 0.0
    recording: RunningCall | None = None
    publishing: RunningCall | None = None
    saving: RunningCall | None = None
    queued: int = 0  # writes of the ledger
    recorded: bool = True  # there is a ledger
    since: Mapping[str, float] = field(default_factory=dict)  # seconds since the last progress, by component

    def outside(self, kind: str) -> OutsideCalls:
        return self.calls.get(kind, OutsideCalls())


# --------------------------------------------------------------- who waits for whom


@dataclass(frozen=True)
class ComponentState:
    """What one component does. ``waits_for`` is empty while it works, and where it has nothing to do."""

    name: str
    state: str  # working, waiting, idle, lost
    doing: str
    waits_for: str = ""
    since_progress: float | None = None  # seconds


def component_states(moment: RunMoment) -> list[ComponentState]:
    """Every component of the run, in the order of the data flow."""
    states: list[ComponentState] = []

    def add(name: str, state: str, doing: str, waits_for: str = "", counter: str = "") -> None:
        states.append(ComponentState(name, state, doing, waits_for, moment.since.get(counter or name)))

    g, learning, publishing = moment.generator, moment.learning, moment.publishing
    calls = moment.outside("environment")
    if calls.count:
        add("environments", "working", f"{_count(calls.count, 'episode')}, {_longest(calls)}")
    elif g is not None and g.dialogues:
        add("environments", "waiting", f"{_count(g.dialogues, 'dialogue')} open", "generator")
    elif learning is not None or publishing is not None:
        add("environments", "waiting", "no episode", "learner" if learning is not None else "publication")
    else:
        add("environments", "idle", "no episode")
    for kind, name in (("agent", "agents"), ("reward", "reward functions")):
        if (others := moment.outside(kind)).count:
            add(name, "working", f"{_count(others.count, 'call')}, {_longest(others)}")
    if g is not None:
        requests = f"{g.running} requests running, {g.waiting} waiting, {_count(g.dialogues, 'dialogue')} open"
        silent = _count(g.silent, "dialogue")
        if publishing is not None:
            add("generator", "waiting", f"takes new weights; {requests}", "publication")
        elif g.running:
            add("generator", "working", f"samples: {requests}")
        elif g.silent and calls.count:
            doing = f"{silent} in an environment, {g.waiting} requests waiting"
            add("generator", "waiting", doing, "environments")
        elif g.silent and moment.outside("agent").count:
            add("generator", "waiting", f"{silent} of agents", "agents")
        elif learning is not None:
            add("generator", "waiting", "no request", "learner")
        else:
            add("generator", "idle", requests)
    for server in moment.servers:
        name, replies = f"server {server.url}", _count(server.owed, "reply", "replies")
        doing = f"{_count(server.dialogues, 'dialogue')}, owes {replies}, weights of version {server.version}"
        state = "lost" if server.lost else "working" if server.owed else "idle"
        add(name, state, server.lost or doing, counter=server.url)
    writing = moment.saving or moment.recording
    if learning is not None:
        what = "its update" if learning.name == "update" else "measuring signals"
        add("learner", "working", f"in {what} for {learning.seconds:.0f} s")
    elif publishing is not None or writing is not None:
        call, part = (publishing, "publication") if publishing is not None else (writing, "ledger")
        assert call is not None
        add("learner", "waiting", f"for {call.seconds:.0f} s", part)
    elif moment.phase == "rollout" and moment.groups is not None:
        groups = f"{moment.groups.ready} groups ready, {moment.groups.running} in rollout"
        add("learner", "waiting", groups, "rollouts")
    else:
        add("learner", "working" if moment.phase == "cold start" else "idle", moment.phase)
    for rank in moment.ranks:
        doing = str(rank) if rank.machine else f"{rank}, {rank.cpu_seconds:.0f} s of processor time"
        if rank.state in ("stopped", "ended"):
            add(f"rank {rank.rank}", "lost", f"{rank} is {rank.state}")
        else:
            waits = learning is None
            add(f"rank {rank.rank}", "waiting" if waits else "working", doing, "rank 0" if waits else "")
    if g is not None:
        doing = f"for {publishing.seconds:.0f} s" if publishing is not None else f"version {g.version} is published"
        add("publication", "working" if publishing is not None else "idle", doing)
    if moment.recorded:
        doing = f"{moment.queued} writes queued"
        if moment.saving is not None:
            doing = f"checkpoint for {moment.saving.seconds:.0f} s"
        elif moment.recording is not None:
            doing = f"writes for {moment.recording.seconds:.0f} s; {doing}"
        add("ledger", "working" if writing is not None else "idle", doing)
    return states


def _count(count: int, one: str, many: str = "") -> str:
    return f"1 {one}" if count == 1 else f"{count} {many or f'{one}s'}"


def _longest(calls: OutsideCalls) -> str:
    where = f" (at {calls.line})" if calls.line else ""
    return f"longest in {calls.name}() for {calls.seconds:.0f} s{where}"


# --------------------------------------------------------------------- who is stuck


@dataclass(frozen=True)
class Suspect:
    """A component that has held work for longer than the limit without any progress."""

    component: str
    text: str
    computing: bool = False  # it is slow, but it computes


def suspects(moment: RunMoment, limit: float) -> list[Suspect]:
    """Components that hold work and have not progressed for ``limit`` seconds, the cause before those that wait for it."""
    stuck: list[Suspect] = []
    saving, recording, publishing = moment.saving, moment.recording, moment.publishing
    if saving is not None and saving.seconds >= limit:
        text = f"the checkpoint of step {moment.step} has been written for {saving.seconds:.0f} s"
        stuck.append(Suspect("checkpoint", text, moment.busy))
    elif recording is not None and recording.seconds >= limit:
        text = f"the ledger has been writing for {recording.seconds:.0f} s ({moment.queued} writes queued)"
        stuck.append(Suspect("ledger", text, moment.busy))
    if moment.learning is not None and moment.learning.seconds >= limit:
        stuck.append(_stuck_learner(moment, moment.learning))
    calls, scores = moment.outside("environment"), moment.outside("reward")
    if calls.seconds >= limit:
        stuck.append(_stuck_environment(moment, calls))
    if scores.seconds >= limit:
        stuck.append(Suspect("rewards", f"a reward function, the {_longest(scores)}"))
    for server in moment.servers:
        seconds = moment.since.get(server.url, 0.0)
        if server.owed and not server.lost and seconds >= limit:
            owed = _count(server.owed, "reply", "replies")
            paused = "was paused by somebody else and " if server.paused else ""
            text = f"generator server {server.url} {paused}has not answered for {seconds:.0f} s (it owes {owed})"
            stuck.append(Suspect(server.url, text))
    if publishing is not None and publishing.seconds >= limit:
        text = f"new weights have been published for {publishing.seconds:.0f} s"
        stuck.append(Suspect("publication", text, moment.busy))
    g, seconds = moment.generator, moment.since.get("generator", 0.0)
    if g is not None and g.running and not moment.servers and seconds >= limit and not calls.count:
        text = f"the generator has sampled no token for {seconds:.0f} s, with {g.running} requests in its batch"
        stuck.append(Suspect("generator", f"still sampling: {text}" if moment.busy else text, moment.busy))
    return stuck


def _stuck_environment(moment: RunMoment, calls: OutsideCalls) -> Suspect:
    episodes = _count(calls.count, "episode")
    return Suspect("environments", f"environment {moment.env}, {episodes}, the {_longest(calls)}")


def _stuck_learner(moment: RunMoment, call: RunningCall) -> Suspect:
    what, seconds = "its update" if call.name == "update" else "measuring signals", f"{call.seconds:.0f} s"
    dead = next((rank for rank in moment.ranks if rank.state in ("stopped", "ended")), None)
    if dead is not None:
        rank = f"rank {dead.rank} ({dead}) is {dead.state}"
        return Suspect("learner", f"the learner has been in {what} for {seconds}: {rank}")
    before = f", the longest before took {moment.longest_update:.0f} s" if moment.longest_update else ""
    elsewhere = [rank for rank in moment.ranks if rank.machine]
    if moment.busy or len(moment.idle_ranks) < len(moment.ranks) - len(elsewhere):
        ranks = f" on {len(moment.ranks) + 1} ranks" if moment.ranks else ""
        update = f"{what.removeprefix('its ')} of step {moment.step + 1} has taken {seconds}"
        return Suspect("learner", f"still learning{ranks}: {update}{before}", computing=True)
    idle = ", ".join(str(n) for n in sorted(moment.idle_ranks))
    which = f"; ranks {idle} compute nothing either" if idle else ""
    if elsewhere:
        named = ", ".join(f"{rank.rank} ({rank})" for rank in elsewhere)
        which += f"; look at rank{'s' * (len(elsewhere) > 1)} {named}"
    return Suspect("learner", f"the learner has been in {what} for {seconds} and computes nothing{which}{before}")


def culprit(moment: RunMoment, limit: float) -> Suspect:
    """Why nothing moves."""
    if stuck := suspects(moment, limit):
        return stuck[0]
    g, agents, calls = moment.generator, moment.outside("agent"), moment.outside("environment")
    if agents.count and g is not None and g.silent:
        return Suspect("agents", f"{agents.count} agents neither ask the policy nor end, the {_longest(agents)}")
    if calls.count:
        return _stuck_environment(moment, calls)
    if g is not None and g.silent and not g.running:
        dialogues = _count(g.silent, "dialogue")
        return Suspect("agents", f"{dialogues} open, and the agents that play them neither ask the policy nor end")
    if moment.groups is not None and moment.groups.running and g is not None and not g.dialogues:
        return Suspect("rewards", f"{moment.groups.running} groups wait for their scores (reward functions or judge)")
    at = f"; the main thread is at {moment.line}" if moment.line else "; the main thread only waits"
    return Suspect("run", f"in the phase {moment.phase}{at}", moment.busy)


# ----------------------------------------------------------------------- the thread


@dataclass
class RunWatch:
    """Listens to the events of a run and reads its parts. ``with RunWatch(...).running(): ...``"""

    folder: Path
    events: RunEvents
    env: str
    steps: int = 0
    parts: RunParts = field(default_factory=RunParts)

    def __post_init__(self) -> None:
        self.stage, self.stage_total, self.stage_of, self.step = "prepare", 0, "steps", 0
        self.stage_step, self.learned, self.heard = 0, 0.0, 0
        self.stage_began = self.anything = self.looked = time.monotonic()  # anything: when the last counter changed
        self.started = time.time()
        self.moved: dict[str, tuple[Any, float]] = {}  # component → its counters, and when they last changed
        self.cpu_then, self.rank_cpu_then = time.process_time(), dict[int, float]()
        self.samples: deque[tuple[float, float, float, float]] = deque()  # time, tokens sampled, learned, episodes
        self.told: dict[str, float] = {}  # component → seconds at which it was named
        self.alarm = ""
        self.pending: list[tuple[str, str]] = []  # text and level of what is to be told
        self._stop = threading.Event()

    # ---------------------------------------------------------------- the run's side

    def listening(self, listen: Listener) -> Listener:
        """The same listener; the watch hears what it hears."""

        def heard(event: str, facts: Mapping[str, Any]) -> None:
            if event == "stage":
                self.stage, self.stage_total = str(facts["name"]), int(facts.get("total", 0))
                self.stage_of, self.stage_step = str(facts.get("of", "steps")), 0
                self.stage_began = time.monotonic()
            elif event == "step":
                self.stage_step = int(facts["step"])
                self.learned += float(facts.get("tokens", 0.0) or 0.0)
                if facts.get("stage") == "learn":
                    self.step = self.stage_step
            self.heard += event != "message"
            listen(event, facts)

        return heard

    @contextlib.contextmanager
    def over(self, loop: Any) -> Iterator[None]:
        """List what the loop calls while it runs. The loop does not know."""
        activity, self.step = self.parts.activity, loop.start
        self.parts.collector, self.parts.ledger = loop.collector, loop.ledger
        attached = [
            (loop.collector, "collect_step", "collect"),
            (loop, "save", "save"),
            (loop.generator, "publish", "publish"),
            *((loop.learner, name, name) for name in LEARNING),
            *((loop.ledger, name, name) for name in RECORDING),
            (getattr(loop.learner, "pool", None), "call", "ranks"),
        ]
        evaluations = {step: activity.wrap("evaluate", evaluation) for step, evaluation in loop.after_step.items()}
        with contextlib.ExitStack() as stack:
            for owner, method, name in attached:
                stack.enter_context(activity.attached(owner, method, name))
            stack.enter_context(patched_attribute(loop, "after_step", evaluations))
            yield

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch until the block ends, then write how it ended."""
        with contextlib.suppress(Exception):
            self._write(self._look())
        thread = threading.Thread(target=self._watch, name="turnwise-run-watch", daemon=True)
        thread.start()
        ended = ("finished", "")
        try:
            yield
        except BaseException as fault:
            stopped = isinstance(fault, RunStopped | KeyboardInterrupt)
            ended = ("stopped" if stopped else "failed", str(fault) or type(fault).__name__)
            raise
        finally:
            self._stop.set()
            thread.join(timeout=10.0)
            with contextlib.suppress(Exception):
                self._write(self._look(), *ended)

    # --------------------------------------------------------------- the watch's side

    def _watch(self) -> None:
        try:
            while not self._stop.wait(PERIOD):
                self._after_freeze()
                moment = self._look()
                self._judge(moment)
                self._write(moment)  # before anything is told, because a listener may be stuck, too
                for text, level in self.pending:
                    self.events.message(text, level)
                causes: Counter[str] = Counter()  # why episodes went on in another process since the last look
                while moved:
                    causes[moved.popleft()] += 1
                if causes:
                    count, cause = causes.total(), causes.most_common(1)[0][0]
                    go_on = "1 episode goes on in another process"
                    go_on = go_on if count == 1 else f"{count} episodes go on in other processes"
                    self.events.message(f"{go_on}: {cause}", "warning")
        except Exception as fault:  # a watch that fails must not end a run
            with contextlib.suppress(Exception):
                self.events.message(f"nobody watches this run any longer: {type(fault).__name__}: {fault}", "warning")

    def _after_freeze(self) -> None:
        """Time in which this thread could not run counts for nobody: the process was stopped, or one call let no thread run."""
        now, cpu = time.monotonic(), time.process_time()
        gap = now - self.looked - PERIOD
        self.looked = now
        if gap < FROZEN_SECONDS:
            return
        if gap >= STALL_SECONDS and cpu - self.cpu_then > gap / 2:
            text = (
                f"one call let no other thread of this process run for {gap:.0f} s; it has ended (phase {self.phase})"
            )
            self.events.message(text, "warning")
        self.moved = {name: (value, at + gap) for name, (value, at) in self.moved.items()}
        self.anything += gap

    @property
    def phase(self) -> str:
        calls = (
            (("save",), "checkpoint"), (("publish",), "publication"), (LEARNING, "learning"), (("evaluate",), "evaluation"),
        )  # fmt: skip
        for names, phase in calls:
            if self.parts.activity.oldest(*names) is not None:
                return phase
        if self.stage in self.events.seconds:
            return AFTER.get(self.stage, "prepare")
        return "evaluation" if self.stage.startswith("evaluate") else PHASES.get(self.stage, self.stage)

    def _look(self) -> RunMoment:
        parts, activity, now = self.parts, self.parts.activity, time.monotonic()
        # counters of other threads, read without a lock: a look that mixes two moments is followed by another in a second
        g, groups, servers, ranks = parts.generator_facts(), parts.groups(), parts.servers(), parts.ranks()
        ended, queued = activity.ended, parts.ledger_queue
        cold = self.heard if self.phase == "cold start" else 0
        counters: dict[str, Any] = {
            "run": (self.heard, self.stage),
            "environments": WATCHDOG.ended,
            "learner": (ended["update"], ended["measure"], ended["ranks"], cold),
            "publication": (ended["publish"], g.version if g else 0),
            "ledger": (ended["seal"], ended["flush"], ended["save"], queued),
            "groups": (groups.running, groups.ready, groups.training, groups.dropped) if groups else (),
            "generator": (*g.progress, g.running, g.opened) if g else (),
            **{server.url: (server.answered, server.owed > 0, server.version, server.lost) for server in servers},
        }
        for name, value in counters.items():
            if name not in self.moved or self.moved[name][0] != value:
                self.moved[name], self.anything = (value, now), now
        if self.anything == now:
            self.cpu_then, self.rank_cpu_then = time.process_time(), {r.rank: r.cpu_seconds for r in ranks}
        still = now - self.anything
        here = [r for r in ranks if not r.machine]
        idle = {r.rank for r in here if r.cpu_seconds - self.rank_cpu_then.get(r.rank, 0.0) < BUSY * still}
        if self.samples and self.samples[0][0] < self.stage_began:
            self.samples.clear()  # a rate is one of this stage
        self.samples.append((now, g.tokens if g else 0, self.learned, g.opened - g.dialogues if g else 0))
        while len(self.samples) > 2 and now - self.samples[1][0] >= WINDOW:
            self.samples.popleft()
        return RunMoment(
            phase=self.phase,
            step=self.step,
            env=self.env,
            still=still,
            busy=time.process_time() - self.cpu_then >= BUSY * max(still, PERIOD),
            line=main_line() if still >= STALL_SECONDS / 2 else "",
            generator=g,
            groups=groups,
            calls=outside_calls(),
            servers=servers,
            ranks=ranks,
            idle_ranks=frozenset(idle if still > PERIOD else ()),
            learning=activity.oldest(*LEARNING),
            longest_update=activity.longest.get("update", 0.0),
            recording=activity.oldest(*RECORDING),
            publishing=activity.oldest("publish"),
            saving=activity.oldest("save"),
            queued=queued,
            recorded=parts.ledger is not None,
            since={name: now - at for name, (_, at) in self.moved.items()},
        )

    def _judge(self, moment: RunMoment) -> None:
        """Collect what is to be told."""
        self.pending = []
        if moment.still >= STALL_SECONDS:
            held_up_by = culprit(moment, STALL_SECONDS)
            self.alarm = held_up_by.text
            if not (held_up_by.computing and held_up_by.text.startswith("still")):
                self.alarm = f"nothing has moved for {moment.still:.0f} s: {held_up_by.text}"
            self._name("nothing", moment.still, self.alarm, held_up_by)
            return
        if "nothing" in self.told:
            del self.told["nothing"]
            if not (
                moment.servers and all(server.lost for server in moment.servers)
            ):  # then it ends, in the next moment
                self.pending.append(("the run moves again", "info"))
        stuck = suspects(moment, STALL_SECONDS)
        for suspect in stuck:
            text = suspect.text if suspect.computing else f"{suspect.text}; the rest of the run goes on"
            seconds = moment.since.get(suspect.component, STALL_SECONDS)
            self._name(suspect.component, max(seconds, STALL_SECONDS), text, suspect)
        self.alarm = "; ".join(suspect.text for suspect in stuck if not suspect.computing)

    def _name(self, key: str, seconds: float, text: str, suspect: Suspect) -> None:
        """Tell it once, and again when it has taken twice as long."""
        if seconds >= 2 * self.told.get(key, 0.0):
            self.told[key] = seconds
            self.pending.append((text, "info" if suspect.computing else "warning"))

    def _write(self, moment: RunMoment, state: str = "running", reason: str = "") -> None:
        g, groups, running = moment.generator or GeneratorFacts(), moment.groups or GroupFacts(), state == "running"
        versions = [version for version in (g.oldest_token, groups.oldest) if version is not None]
        (first, *old), (last, *new) = self.samples[0], self.samples[-1]
        sampled, learned, episodes = ((b - a) / (last - first) if last > first else 0.0 for a, b in zip(old, new))
        # public: `turnwise status --json` prints it, so names stay
        status = {
            "format": STATUS_FORMAT,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "started": round(self.started, 3),
            "written": round(time.time(), 3),
            "state": state,
            "reason": reason,
            "stage": {"name": self.stage, "step": self.stage_step, "total": self.stage_total, "of": self.stage_of}
            | {"seconds": round(time.monotonic() - self.stage_began, 1)},
            "phase": moment.phase if running else state,
            "step": self.step,
            "steps": self.steps,
            "still_seconds": round(moment.still, 1),
            "alarm": self.alarm if running else "",
            "components": [asdict(component) for component in component_states(moment)] if running else [],
            "queues": {
                "groups_running": groups.running,
                "groups_ready": groups.ready,
                "groups_training": groups.training,
                "requests_running": g.running,
                "requests_waiting": g.waiting,
                "environment_calls": moment.outside("environment").count,
                "ledger_writes": moment.queued,
            },
            "episodes": {"in_flight": g.dialogues, "ended": g.opened - g.dialogues},
            "versions": {
                "published": g.version,
                "oldest_in_flight": min(versions, default=g.version),
                "newest": g.version,
            },
            "throughput": {
                "window_seconds": round(last - first, 1),
                "sampled_tokens_per_second": round(sampled, 1),
                "learned_tokens_per_second": round(learned, 1),
                "episodes_per_minute": round(60 * episodes, 1),
            },
        }
        write_status(self.folder / STATUS, status)


@contextlib.contextmanager
def watched(folder: Path, events: RunEvents, env: str, steps: int) -> Iterator[None]:
    """Watch the run that tells ``events``."""
    watch = RunWatch(folder, events, env, steps)
    events.listen, events.watch = watch.listening(events.listen), watch
    try:
        with watch.running():
            yield
    finally:
        events.watch, watch.parts = None, RunParts()  # the engines of an ended run are freed at once


# ---------------------------------------------------- what another process reads


STATUS = "status.json"
STATUS_FORMAT = 1
SILENT_SECONDS = 10.0  # without a new status, a living process is called silent
ENDED = ("finished", "stopped", "failed", "killed")
HEADS = {"silent": "running, but silent", "failed": "ended by an error"}  # of other states: their name
PROCESS_STATES = {
    "R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped", "t": "stopped", "Z": "ended",
}  # fmt: skip


def write_status(path: Path, status: Mapping[str, Any]) -> None:
    """Replace the file in one rename. It is never flushed to the disk: after a power failure nobody asks what the run was doing.
    A full disk or a removed folder is no reason to stop a run: nothing is written then."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(status) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read_status(path: Path) -> dict[str, Any] | None:
    """What the run wrote last; None if there is no such file, or one of another format."""
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return status if isinstance(status, dict) and status.get("format") == STATUS_FORMAT else None


def process_state(process: int) -> tuple[str, float]:
    """What the system says of a process, and its CPU seconds so far. Nothing where the system has no ``/proc``."""
    if not Path("/proc/self/stat").exists():
        return "", 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return PROCESS_STATES.get(fields[0], "running"), seconds
    return "ended", 0.0


@dataclass(frozen=True)
class RunState:
    """One look at a run directory. ``state``: running, silent, finished, stopped, failed, killed or unknown."""

    run: str
    state: str
    explanation: str  # in words, empty where the state says it all
    process: int  # of the run; 0 where none is known
    alive: bool
    age: float | None  # seconds since its status was written
    step: int
    steps: int
    checkpoint: int  # the step of the newest one, 0: none
    status: dict[str, Any] = field(default_factory=dict)  # as written by the run; empty where there is none

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def ok(self) -> bool:
        """Neither dead before its end nor stuck."""
        return self.state in ("running", "finished", "stopped") and not self.alarm

    @property
    def alarm(self) -> str:
        return str(self.status.get("alarm", "")) if self.state == "running" else ""

    def as_dict(self) -> dict[str, Any]:
        written = {name: value for name, value in self.status.items() if name not in ("state", "reason", "process")}
        names = ("run", "state", "explanation", "process", "alive", "step", "steps", "checkpoint", "alarm")
        age = None if self.age is None else round(self.age, 1)
        return {**written, **{name: getattr(self, name) for name in names}, "age_seconds": age}


def read_state(path: str | Path) -> RunState:
    """Raises ``StoreError`` where there is no run."""
    run_dir, here = RunDir.open(path), socket.gethostname()
    settings = run_dir.metadata().get("settings", {})
    status = read_status(run_dir.path / STATUS) or {}
    process, locked = lock_holder(run_dir.lock)
    if locked and status.get("host") == here and status.get("process") != process:
        status = {}  # of the process that worked on the run before
    age = time.time() - float(status["written"]) if status else None
    state, explanation = _state(run_dir, status, process, locked, age, status.get("host", here))
    rows = [] if status else [row for row in read_rows(run_dir.metrics) if isinstance(row["step"], int)]
    checkpoint = run_dir.step
    return RunState(
        run=str(path),
        state=state,
        explanation=explanation,
        process=process or int(status.get("process", 0)),
        alive=state in ("running", "silent"),
        age=age,
        # a status is up to two seconds old, and a checkpoint may be newer
        step=max(int(status.get("step", rows[-1]["step"] if rows else 0)), checkpoint),
        steps=int(settings.get("steps", status.get("steps", 0))),
        checkpoint=checkpoint,
        status=status,
    )


def _state(
    run_dir: RunDir, status: dict[str, Any], process: int, locked: bool, age: float | None, host: str
) -> tuple[str, str]:
    written, reason = status.get("state", ""), str(status.get("reason", ""))
    if host != socket.gethostname() and written == "running" and age is not None:
        if age < SILENT_SECONDS:
            return "running", f"on {host}"
        return "unknown", f"it ran on {host} and last wrote {age:.0f} s ago; ask there whether process {process} lives"
    if locked and (age is None or age < SILENT_SECONDS):
        return "running", "" if status else "it has not written a status yet"
    if locked and process_state(process)[0] == "stopped":
        return "silent", (
            f"its process {process} is stopped (SIGSTOP) and has written nothing for {age:.0f} s; "
            f"kill -CONT {process} continues it"
        )
    if locked:
        return "silent", (
            f"its process {process} lives and has written nothing for {age:.0f} s: one call lets none of its threads run, or "
            "the machine is overloaded"
        )
    if process:
        last = f"; it last wrote {age:.0f} s ago, in the phase {status.get('phase')}" if age is not None else ""
        return "killed", f"its process {process} is dead and has not said why (killed, or out of memory){last}"
    if run_dir.summary.is_file():
        return "finished", ""
    return (str(written), reason) if written in ENDED else ("stopped", "no process works on it")


def newest_messages(path: str | Path, count: int = 3) -> list[str]:
    """The last warnings of a run."""
    rows = read_rows(Path(path) / MESSAGES)
    return [str(row.get("text", "")) for row in rows if row.get("level", "info") != "info"][-count:]


# ------------------------------------------------------------------------------ text


def status_text(state: RunState, warnings: list[str]) -> str:
    """All that is known as lines for a terminal, the state first."""
    return "\n".join([*_status_lines(state), *(f"warning   {text}" for text in warnings)])


def _status_lines(state: RunState) -> Iterator[str]:
    status = state.status
    process = f", process {state.process}" if state.process and state.alive else ""
    yield f"{state.run}: {HEADS.get(state.state, state.state)}{process}"
    if state.explanation:
        yield f"          {state.explanation}"
    checkpoint = f", newest checkpoint at step {state.checkpoint}" if state.checkpoint else ", no checkpoint yet"
    phase = f", phase {state.status['phase']}" if state.alive and state.status else ""
    yield f"step      {state.step} of {state.steps}{phase}{checkpoint}"
    if state.state in ("stopped", "failed", "killed"):
        yield f"next      turnwise resume {state.run}"
    if not status or state.ended:
        return
    stage, age = status["stage"], state.age or 0.0
    counted = f"{stage['step']} of {stage['total']}" if stage["step"] else f"{stage['total']}"
    counted = f", {counted} {stage['of']}" if stage["total"] else ""
    yield f"stage     {stage['name']}{counted}, for {format_duration(stage['seconds'] + age)}"
    yield f"age       started {format_duration(time.time() - status['started'])} ago, this was written {age:.0f} s ago"
    yield f"moved     {status['still_seconds'] + (age if state.state == 'silent' else 0):.0f} s ago"
    if state.alarm:
        yield f"STUCK     {state.alarm}"
    rates, queues, versions = status["throughput"], status["queues"], status["versions"]
    yield (
        f"rates     {rates['sampled_tokens_per_second']:,.0f} tokens/s sampled, {rates['learned_tokens_per_second']:,.0f} "
        f"tokens/s learned, {rates['episodes_per_minute']:,.0f} episodes/min (of the last {rates['window_seconds']:.0f} s)"
    )
    if any(component["name"] == "generator" for component in status["components"]):
        yield (
            f"groups    {queues['groups_running']} in rollout, {queues['groups_ready']} ready, {queues['groups_training']} in "
            f"training; {status['episodes']['in_flight']} episodes in flight, {status['episodes']['ended']} ended"
        )
        yield (
            f"queues    {queues['requests_running']} requests running, {queues['requests_waiting']} waiting, "
            f"{queues['environment_calls']} calls in environments, {queues['ledger_writes']} writes of the ledger"
        )
        yield (
            f"versions  {versions['oldest_in_flight']} to {versions['newest']} in flight, {versions['published']} published"
        )
    yield ""
    width = max([13, *(len(component["name"]) for component in status["components"])])
    yield f"{'component':<{width}} {'':<8} {'waits for':<13} {'progress':>9}  doing"
    yield from (component_row(component, width) for component in status["components"])


def component_row(component: Mapping[str, Any], width: int) -> str:
    since = component["since_progress"]
    ago = "" if since is None else f"{since:.0f} s ago"
    name, waits_for = f"{component['name']:<{width}}", component["waits_for"] or "-"
    return f"{name} {component['state']:<8} {waits_for:<13} {ago:>9}  {component['doing']}"
