"""What the parts of a run report at one moment, read from another thread: requests, dialogues, calls into environments, groups,
servers, ranks. Only reads; a part that does not exist yet, or that another engine lacks, reports nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.environments.isolated import moved
from turnwise.environments.watchdog import WATCHDOG, WatchedCall, describe_line, line_awaited, line_of
from turnwise.observe.activity import Activity

AGENT_LIMIT = 1e6  # seconds: a call without a limit of its own is an agent's whole episode
REWARDS = f"{Path(__file__).parent.parent / 'rewards'}"
LEARNING, RECORDING = ("update", "measure"), ("seal", "flush")


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


@dataclass(frozen=True)
class RankFacts:
    rank: int
    process: int
    state: str  # running, sleeping, stopped, ended; empty where the system does not tell
    cpu_seconds: float
    machine: str = ""  # where it is not this one: then nothing is known of its processor


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
        engines = [engine for engine in _engines(self.generator) if hasattr(engine, "sessions")]
        sessions = [session for engine in engines for session in tuple(engine.sessions.values())]
        requests = [r for session in sessions if (r := session.request) is not None and r.stop is None]
        running = sum(len(engine.scheduler.running) for engine in engines)
        open_now = len(sessions) if engines else int(stats.get("open", 0))
        servers = self.servers()
        owed = sum(server.owed for server in servers)
        versions = [r.version[0] for r in requests if r.version]
        return GeneratorFacts(
            running=running or owed,
            waiting=max(0, len(requests) - running),
            dialogues=open_now,
            silent=sum(1 for s in sessions if not (s.pending or s.parked)) if engines else max(0, open_now - owed),
            opened=sum(int(getattr(engine, "_opened", 0)) for engine in _engines(self.generator)),
            tokens=int(stats.get("tokens", 0)),
            progress=tuple(stats.get(name, 0.0) for name in ("tokens", "steps", "prefill_tokens", "publishes")),
            version=self.generator.version,
            oldest_token=min(versions, default=None),
        )

    def servers(self) -> list[ServerFacts]:
        replicas = [r for engine in _engines(self.generator) for r in getattr(engine, "replicas", ())]
        return [ServerFacts(r.url, r.sessions, r.owed, r.answered, r.version, r.lost) for r in replicas]

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
        oldest = min(issued, default=None)
        return GroupFacts(len(getattr(c, "running", ())), len(c.ready), c.training, dropped, oldest)

    @property
    def ledger_queue(self) -> int:
        return self.ledger.queued if self.ledger is not None else 0


def moved_episodes() -> Counter[str]:
    """Why episodes went on in another process since the last look, and how many."""
    causes: Counter[str] = Counter()
    while moved:
        causes[moved.popleft()] += 1
    return causes


def _engines(generator: Any) -> Iterator[Any]:
    """A generator and those it consists of: the exact one and the one for drafts, the policy's and the opponents'."""
    if generator is None:
        return
    inner = [getattr(generator, name) for name in ("main", "exact", "cheap", "opponents") if hasattr(generator, name)]
    if not inner:
        yield generator
    for part in inner:
        yield from _engines(part)


# ------------------------------------------------------------- calls outside


def outside_calls() -> dict[str, OutsideCalls]:
    """Calls in progress by kind: ``environment``, ``reward``, ``agent``."""
    kinds: dict[str, list[WatchedCall]] = {"environment": [], "reward": [], "agent": []}
    for call in tuple(WATCHDOG.calls.values()):
        if call.name:
            kinds[_kind(call)].append(call)
    return {kind: _longest(calls) for kind, calls in kinds.items()}


def _kind(call: WatchedCall) -> str:
    if call.seconds > AGENT_LIMIT:
        return "agent"
    return "reward" if call.code is not None and call.code.co_filename.startswith(REWARDS) else "environment"


def _longest(calls: Sequence[WatchedCall]) -> OutsideCalls:
    if not calls:
        return OutsideCalls()
    call = min(calls, key=lambda c: c.began)
    seconds = time.monotonic() - call.began
    line = "" if seconds < 1 else line_awaited(call.awaited) if call.awaited is not None else line_of(call)
    return OutsideCalls(len(calls), call.name.split(".")[-1], seconds, line)


def calls_ended() -> int:
    return WATCHDOG.ended


def main_line() -> str:
    """The line at which the main thread is; empty while its event loop only waits."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is not None and frame.f_code.co_name in ("select", "poll") and "selectors" in frame.f_code.co_filename:
        return ""
    return describe_line(frame)


# ----------------------------------------------------------------- processes

STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped", "t": "stopped", "Z": "ended"}


def process_state(process: int) -> tuple[str, float]:
    """What the system says of a process, and its CPU seconds so far. Nothing where the system has no ``/proc``."""
    if not Path("/proc/self/stat").exists():
        return "", 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return STATES.get(fields[0], "running"), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return "ended", 0.0
