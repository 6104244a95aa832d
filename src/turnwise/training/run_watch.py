"""A thread that watches a run: once a second it writes what every component does to ``status.json``, and where nothing moves
for ``STALL_SECONDS`` it names the culprit in the log.

It only reads counters that the components keep anyway, so a watched run and an unwatched one are the same, bit for bit. A fault
of the watch is told and ends the watch, never the run. Does not know how a component works: ``run_facts`` reads them, ``waiting``
finds words.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from turnwise.core.protocols import Listener
from turnwise.observe.run_status import STATUS, STATUS_FORMAT, write_status
from turnwise.training.events import RunEvents
from turnwise.training.interrupt import RunStopped
from turnwise.training.run_facts import (
    LEARNING,
    RECORDING,
    RunParts,
    calls_ended,
    main_line,
    moved_episodes,
    outside_calls,
)
from turnwise.training.waiting import BUSY, RunMoment, Suspect, component_states, culprit, suspects

STALL_SECONDS = 30.0  # without any progress, before the culprit is named; named again after twice that, four times ...
PERIOD = 1.0  # seconds between two looks
WINDOW = 60.0  # seconds over which throughput is measured
FROZEN_SECONDS = 5.0  # a look that comes so late was kept waiting itself
PHASES = {"demonstrations": "cold start", "learn": "rollout"}  # by stage, while no call of the loop says more
AFTER = {"evaluate after": "results"}  # what follows a stage that has ended; after any other: the engines are built


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
        self.began = self.stage_began = time.monotonic()
        self.started = time.time()
        self.moved: dict[str, tuple[Any, float]] = {}  # component → its counters, and when they last changed
        self.anything = time.monotonic()  # when the last of them changed
        self.cpu_then, self.rank_cpu_then = time.process_time(), dict[int, float]()
        self.samples: deque[tuple[float, float, float, float]] = deque()  # time, tokens sampled, learned, episodes
        self.told: dict[str, float] = {}  # component → seconds at which it was named
        self.alarm = ""
        self.looked = time.monotonic()
        self.pending: list[tuple[str, str]] = []  # text and level of what is to be told
        self._stop, self._new_stage = threading.Event(), False

    # ---------------------------------------------------------------- the run's side

    def listening(self, listen: Listener) -> Listener:
        """The same listener; the watch hears what it hears."""

        def heard(event: str, facts: Mapping[str, Any]) -> None:
            if event == "stage":
                self.stage, self.stage_total = str(facts["name"]), int(facts.get("total", 0))
                self.stage_of, self.stage_step = str(facts.get("of", "steps")), 0
                self.stage_began, self._new_stage = time.monotonic(), True
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
        ]
        attached += [(loop.learner, name, name) for name in LEARNING] + [
            (loop.ledger, name, name) for name in RECORDING
        ]
        attached += [(getattr(loop.learner, "pool", None), "call", "ranks")]
        evaluations, before = {n: activity.wrap("evaluate", f) for n, f in loop.after_step.items()}, loop.after_step
        with contextlib.ExitStack() as stack:
            for owner, method, name in attached:
                stack.enter_context(activity.attached(owner, method, name))
            loop.after_step = evaluations
            try:
                yield
            finally:
                loop.after_step = before

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
                facts = self._look()
                self._judge(facts)
                self._write(facts)
                self._tell_pending()
                self._tell_moves()
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
        activity = self.parts.activity
        for names, phase in (
            (("save",), "checkpoint"), (("publish",), "publication"), (LEARNING, "learning"), (("evaluate",), "evaluation"),
        ):  # fmt: skip
            if activity.oldest(*names) is not None:
                return phase
        if self.stage in self.events.seconds:
            return AFTER.get(self.stage, "prepare")
        return "evaluation" if self.stage.startswith("evaluate") else PHASES.get(self.stage, self.stage)

    def _look(self) -> RunMoment:
        parts, activity, now = self.parts, self.parts.activity, time.monotonic()
        g, groups, servers, ranks = parts.generator_facts(), parts.groups(), parts.servers(), parts.ranks()
        ended, queued = activity.ended, parts.ledger_queue
        cold = self.heard if self.phase == "cold start" else 0
        counters: dict[str, Any] = {
            "run": (self.heard, self.stage),
            "environments": calls_ended(),
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
        known = [r for r in ranks if not r.machine]
        idle = {r.rank for r in known if r.cpu_seconds - self.rank_cpu_then.get(r.rank, 0.0) < BUSY * still}
        self._sample(now, g.tokens if g else 0, g.opened - g.dialogues if g else 0)
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

    # ------------------------------------------------------------------------ alarms

    def _judge(self, facts: RunMoment) -> None:
        """Collect what is to be told: it is written to the status first, because a listener may be stuck, too."""
        self.pending = []
        if facts.still >= STALL_SECONDS:
            held_up_by = culprit(facts, STALL_SECONDS)
            text = f"nothing has moved for {facts.still:.0f} s: {held_up_by.text}"
            text = held_up_by.text if held_up_by.computing and held_up_by.text.startswith("still") else text
            self._name("nothing", facts.still, text, held_up_by)
            self.alarm = text
            return
        if "nothing" in self.told:
            del self.told["nothing"]
            if not (facts.servers and all(server.lost for server in facts.servers)):  # then it ends, in the next moment
                self.pending.append(("the run moves again", "info"))
        stuck = suspects(facts, STALL_SECONDS)
        for suspect in stuck:
            text = suspect.text if suspect.computing else f"{suspect.text}; the rest of the run goes on"
            seconds = facts.since.get(suspect.component, STALL_SECONDS)
            self._name(suspect.component, max(seconds, STALL_SECONDS), text, suspect)
        self.alarm = "; ".join(suspect.text for suspect in stuck if not suspect.computing)

    def _name(self, key: str, seconds: float, text: str, suspect: Suspect) -> None:
        """Tell it once, and again when it has taken twice as long."""
        if seconds >= 2 * self.told.get(key, 0.0):
            self.told[key] = seconds
            self.pending.append((text, "info" if suspect.computing else "warning"))

    def _tell_pending(self) -> None:
        for text, level in self.pending:
            self.events.message(text, level)

    def _tell_moves(self) -> None:
        """Tell of episodes whose process died."""
        if causes := moved_episodes():
            count, cause = causes.total(), causes.most_common(1)[0][0]
            which = (
                "1 episode goes on in another process" if count == 1 else f"{count} episodes go on in other processes"
            )
            self.events.message(f"{which}: {cause}", "warning")

    # ------------------------------------------------------------------------ status

    def _sample(self, now: float, tokens: float, episodes: float) -> None:
        if self._new_stage:  # a rate is one of this stage
            self._new_stage = False
            self.samples.clear()
        self.samples.append((now, tokens, self.learned, episodes))
        while len(self.samples) > 2 and now - self.samples[1][0] >= WINDOW:
            self.samples.popleft()

    def _rates(self) -> dict[str, float]:
        (first, *old), (last, *new) = self.samples[0], self.samples[-1]
        seconds = last - first
        sampled, learned, episodes = ((b - a) / seconds if seconds > 0 else 0.0 for a, b in zip(old, new))
        return {
            "window_seconds": round(seconds, 1),
            "sampled_tokens_per_second": round(sampled, 1),
            "learned_tokens_per_second": round(learned, 1),
            "episodes_per_minute": round(60 * episodes, 1),
        }

    def _write(self, facts: RunMoment, state: str = "running", reason: str = "") -> None:
        g, groups = facts.generator, facts.groups
        versions = [v for v in (g.oldest_token if g else None, groups.oldest if groups else None) if v is not None]
        published = g.version if g else 0
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
            "phase": facts.phase if state == "running" else state,
            "step": self.step,
            "steps": self.steps,
            "still_seconds": round(facts.still, 1),
            "alarm": self.alarm if state == "running" else "",
            "components": [asdict(component) for component in component_states(facts)] if state == "running" else [],
            "queues": {
                "groups_running": groups.running if groups else 0,
                "groups_ready": groups.ready if groups else 0,
                "groups_training": groups.training if groups else 0,
                "requests_running": g.running if g else 0,
                "requests_waiting": g.waiting if g else 0,
                "environment_calls": facts.outside("environment").count,
                "ledger_writes": facts.queued,
            },
            "episodes": {"in_flight": g.dialogues if g else 0, "ended": g.opened - g.dialogues if g else 0},
            "versions": {
                "published": published,
                "oldest_in_flight": min(versions, default=published),
                "newest": published,
            },
            "throughput": self._rates(),
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


__all__ = ["PERIOD", "STALL_SECONDS", "RunWatch", "watched"]
