"""The moment of a kill, found by the run itself: what it is doing stands in a file that outlives it.

The calls are those that the run's own watch lists (``training/watch.py``): ``collect``, ``update``, ``publish``, ``save``. Inside
the drawn one, after as many events of the interpreter or as much time as were drawn, the process is killed, and which stage it
was in is what the file holds then: measured, not aimed at."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START, BETWEEN, SAMPLING, LEARNING, PUBLICATION, CHECKPOINT, END = STAGES = (
    "start", "between", "sampling", "learning", "publication", "checkpoint", "end",
)  # fmt: skip
CALLS = {"collect": SAMPLING, "measure": LEARNING, "update": LEARNING, "publish": PUBLICATION, "save": CHECKPOINT}
RECORD = struct.Struct("<BBBB")  # stage and step now; stage and step of the kill, 0 and 0 before it
LATE_SECONDS = 60.0  # that a process which is to be killed may take to be there


def family(pid: int) -> list[int]:
    """A process and its descendants that live."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry.name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                if fields[0] != b"Z":
                    children.setdefault(int(fields[1]), []).append(int(entry.name))
    pids = [pid]
    for one in pids:
        pids += children.get(one, [])
    return pids


def words_of(pid: int) -> str:
    """The command of a process; empty where it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


@dataclass(frozen=True)
class Victim:
    """The process ``root`` (0: the run's own), or of its descendants one whose command contains ``words``."""

    words: str = ""
    root: int = 0

    def pid(self) -> int:
        """Its number; 0 while there is none."""
        root = self.root or os.getpid()
        if not self.words:
            return root
        return next((pid for pid in family(root)[1:] if self.words in words_of(pid)), 0)


@dataclass(frozen=True)
class Moment:
    """Inside the call number ``occurrence`` of a stage: after ``amount`` events of the interpreter, or seconds."""

    stage: str
    occurrence: int
    amount: float
    by: str = "events"


class Told:
    """Lists what the run in this process does. With a ``moment`` it kills the ``victim`` then; without, it measures calls."""

    def __init__(self, file: Path, moment: Moment | None = None, victim: Victim | None = None) -> None:
        with file.open("a+b") as opened:
            opened.truncate(RECORD.size)
            self._memory = mmap.mmap(opened.fileno(), RECORD.size)
        self.moment, self.victim = moment, victim or Victim()
        self.step, self.base, self.active = 0, START, dict.fromkeys(STAGES, 0)
        self.occurred = dict.fromkeys(STAGES, 0)
        self.measured = defaultdict[str, list[tuple[int, float]]](list)  # events and seconds of each call
        self.began = time.monotonic()
        self.armed = moment is not None and self.hit() is None  # this is no later life of a process that did it
        self._tell()
        if self.armed and moment is not None and moment.stage == START:
            self._after(moment.amount)

    def hit(self) -> tuple[str, int] | None:
        """Stage and step of the kill; None before it."""
        stage, step = RECORD.unpack(self._memory)[2:]
        return (STAGES[stage - 1], step) if stage else None

    def _tell(self) -> None:
        self.stage = next((stage for stage in reversed(STAGES) if self.active[stage]), self.base)
        self._memory[:2] = bytes((STAGES.index(self.stage), min(self.step, 255)))

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        from turnwise.training.watch import Activity, RunWatch

        call, over = Activity.call, RunWatch.over

        @contextlib.contextmanager
        def told_call(activity: Activity, name: str) -> Iterator[None]:
            with call(activity, name), self.inside(name):
                yield

        @contextlib.contextmanager
        def told_over(watch: RunWatch, loop: Any) -> Iterator[None]:
            self.measured[START].append((0, time.monotonic() - self.began))
            self.step, self.base = loop.start, BETWEEN
            self._tell()
            with over(watch, loop):
                yield
            self.base = END
            self._tell()

        Activity.call, RunWatch.over = told_call, told_over  # type: ignore[method-assign]
        try:
            yield
        finally:
            Activity.call, RunWatch.over = call, over  # type: ignore[method-assign]

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        stage = CALLS.get(name)
        if stage is None:
            yield
            return
        self.active[stage] += 1
        self._tell()
        moment, events, began = self.moment, 0, time.monotonic()

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal events
            events += 1
            if armed and moment is not None and events > moment.amount:
                sys.setprofile(None)
                self.fire()

        armed = self.armed and moment is not None and (moment.stage, moment.occurrence) == (stage, self.occurred[stage])
        self.occurred[stage] += 1
        if armed and moment is not None and moment.by == "seconds":
            self._after(moment.amount)
        elif armed or self.moment is None:
            sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.measured[stage].append((events, time.monotonic() - began))
            self.active[stage] -= 1
            self.step += name == "publish"
            self._tell()

    def _after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self.fire)
        timer.daemon = True
        timer.start()

    def fire(self) -> None:
        """Kill the victim now; or, where it is not there yet, as soon as it is."""
        if not self.armed:
            return
        self.armed = False
        if pid := self.victim.pid():
            self._kill(pid)
        elif self.moment is not None and self.moment.stage == START:
            until = time.monotonic() + LATE_SECONDS

            def wait() -> None:
                while not (pid := self.victim.pid()) and time.monotonic() < until:
                    time.sleep(0.005)
                if pid:
                    self._kill(pid)

            threading.Thread(target=wait, daemon=True).start()

    def _kill(self, pid: int) -> None:
        self._memory[2:] = bytes((STAGES.index(self.stage) + 1, min(self.step, 255)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def measures(self) -> dict[str, list[tuple[float, float]]]:
        """Of each stage the events and seconds of each of its calls."""
        return dict(self.measured)


def hit(file: Path) -> tuple[str, int] | None:
    """What a run was doing when it, or a process of it, was killed; None where nothing was."""
    return Told(file).hit() if file.is_file() else None


@contextlib.contextmanager
def told(file: Path, moment: Moment | None = None, victim: Victim | None = None) -> Iterator[None]:
    """Inside the block the run of this process tells ``file`` what it does; without ``moment`` also how long each call takes."""
    one = Told(file, moment, victim)
    try:
        with one.install():
            yield
    finally:
        if moment is None:
            file.with_suffix(".json").write_text(json.dumps(one.measures()))


def learn_told(file: Path, moment: Moment | None, victim: Victim, learn: Callable[..., Any], *arguments: Any) -> Any:
    """The learner of a cluster, which is a process of Ray's: ``learn(*arguments)`` inside ``told``."""
    with told(file, moment, victim):
        return learn(*arguments)
