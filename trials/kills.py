"""SIGKILL of a run or of a process that works for it: the run resumes, loses nothing, and ends with the weights of one that was
never killed. Kind of run, who is killed and at which moment are drawn from a grammar, with a seed."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from trials.commands import FORKS, command
from trials.finished_runs import audit, trained
from trials.moments import (
    CHECKPOINT,
    LEARNING,
    PUBLICATION,
    SAMPLING,
    START,
    Moment,
    Victim,
    family,
    hit,
    learn_told,
    told,
    words_of,
)
from trials.outcome import Outcome, Results
from trials.same_weights import PARTS

SEED = 33
LIMIT = 600.0  # seconds that a run may take: only a hang reaches it
STEPS, SAVED = 5, 2  # steps, and between two checkpoints
SMALL = f"""--env same_weights_parts:Letters --hidden 32 --layers 1 --vocabulary 320 --context 320 --threads 1 --device cpu
    --cold-steps 4 --cold-batch 8 --steps {STEPS} --groups 3 --group-size 4 --max-tokens 10 --eval-tasks 4 --checkpoint-every
    {SAVED} --trackers= --warmup 0 --lr 1e-3 --generator-seconds 5 --name run""".split()
SERVED = SMALL[:14]  # what a server shares with the run
END_SECONDS = 60.0  # for processes of a run that has ended to be gone: one that was starting imports torch first
CLOCK_SECONDS = 0.02  # a shorter call is over before a clock rings inside it
HASTE = 0.7  # of the measured seconds of a call: the machine may be less busy than it was
LIVES = 6  # of a run: after a kill it may stop once with a message, and go on when it is resumed
SHARED_MEMORY = Path("/dev/shm")
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0", "RAY_AUTH_MODE": "disabled"}
BEFORE = "not met"  # the run was over at that moment, or had no such process: not counted
RUN = "run"
Measures = dict[str, list[tuple[float, float]]]  # of each stage the events and seconds of every call
Whole = tuple[Path, Measures]  # the run of a kind that nobody kills


@dataclass(frozen=True)
class Kind:
    """Flags of a run, and who of it may be killed: by words in the command of the process. ``exact``: weights do not depend on
    timing."""

    flags: str
    who: dict[str, str] = dataclasses.field(default_factory=dict)
    exact: bool = True
    staleness: int = 0
    served: bool = False
    ray: bool = False


KINDS = {
    "plain groups": Kind("grpo"),
    "replay": Kind("spear_replay"),
    "separate critic": Kind("ppo --critic separate"),
    "several passes": Kind("dapo --epochs 2 --minibatches 2"),
    "staleness 2": Kind("grpo --staleness 2", exact=False, staleness=2),
    "agent": Kind("rloo --agent same_weights_parts:solve"),
    "local generator": Kind("grpo --generator local", {"generator": "turnwise.training.serve"}),
    "two ranks": Kind("grpo --ranks 2", {"rank 1": "turnwise.engines.sharded.worker"}),
    "server": Kind("grpo --generator URL", {"server": ""}, served=True),
    "isolated environment": Kind("grpo --isolate-env", {"environment host": "turnwise.environments.isolated"}),
    "episodes in processes": Kind("grpo --env-processes 2", {"environment host": "turnwise.training.episodes"}),
    "Ray": Kind(
        "grpo --staleness 1 --cluster ADDRESS,generators=1,environments=1,restarts=1000",
        {
            "driver": "", "learner": "ray::LearnerActor", "generator": "ray::GeneratorActor",
            "environment": "ray::EnvironmentActor",
        },
        exact=False, staleness=1, ray=True,
    ),
}  # fmt: skip
SLOW = ("two ranks", "local generator", "Ray")  # half as often as the others
STAGES = {LEARNING: 4, PUBLICATION: 4, SAMPLING: 2, CHECKPOINT: 1, START: 1}  # how often each is drawn


# ------------------------------------------------------------------------- the grammar


@dataclass(frozen=True)
class Kill:
    kind: str
    who: str
    stage: str
    occurrence: int  # of the stage in the run
    depth: float  # in [0, 1): how far inside it
    by: str  # events of the interpreter, or seconds: those reach into what computes without it, and may come late

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.who} in {self.stage} {self.occurrence}, at {self.depth:.4f} of its {self.by}"


def draw(seed: int) -> Iterator[Kill]:
    """Every kind of run and everyone in it, at moments that the seed gives."""
    rng, bag = random.Random(seed), list[str]()
    whos: dict[str, list[str]] = {kind: [] for kind in KINDS}
    while True:
        names = sorted([*KINDS, *(kind for kind in KINDS if kind not in SLOW)])
        bag = bag or rng.sample(names, len(names))
        kind = bag.pop()
        names = [*(() if KINDS[kind].ray else (RUN,)), *KINDS[kind].who]
        whos[kind] = whos[kind] or rng.sample(names, len(names))
        stage = rng.choices(list(STAGES), list(STAGES.values()))[0]
        occurrence = rng.randrange(STEPS // SAVED if stage == CHECKPOINT else 1 if stage == START else STEPS)
        by = "seconds" if stage == START else rng.choice(("events", "events", "seconds"))
        yield Kill(kind, whos[kind].pop(), stage, occurrence, rng.random(), by)


def missing() -> dict[str, str]:
    """Kinds of runs that this machine does not have, and why."""
    return {} if importlib.util.find_spec("ray") else {"Ray": "ray is not installed"}


# ---------------------------------------------------------------------------- the trial


def trial(
    kills: int,
    results: Results,
    progress: Callable[[str], None],
    only: str = "",
    jobs: int = 1,
    seconds: float = float("inf"),
    seed: int = SEED,
) -> Iterator[Outcome]:
    """``kills`` of those that ``seed`` draws, ``jobs`` of them at a time; those alone whose name contains ``only``. After
    ``seconds`` the kills that have not come out yet are given up; nothing is said of them."""
    for kind, why in missing().items():
        progress(f"kills: {kind} is not run: {why}")
    progress(f"kills: seed {seed}, {jobs} at a time")
    every = itertools.islice(draw(seed), 100 * kills)  # all, unless `only` names hardly any
    drawn = (kill for kill in every if only in kill.name)
    counted, left_out, until = 0, 0, time.monotonic() + seconds
    with Benches(jobs) as benches:
        while counted < kills:
            while benches.free and counted + len(benches.running) < kills and (kill := next(drawn, None)):
                if results.done("kills", kill.name):
                    counted += results.outcomes["kills", kill.name].count
                elif kill.kind in missing():
                    left_out += 1
                else:
                    benches.start(kill)
            if not benches.running or time.monotonic() > until:
                break
            for kill, (result, fault, took) in benches.ended(until):
                count = int(result != BEFORE)
                counted += count
                progress(f"kills: {counted} of {kills}; {kill.name}: {result}, {took:.1f} s {fault}")
                yield Outcome("kills", kill.name, result, fault, took, count, kill.kind)
        if left_out:
            progress(f"kills: {left_out} of {', '.join(missing())} were drawn and not run")
        if benches.running and counted < kills:
            progress(f"kills: the time is over: {len(benches.running)} were begun and given up")


class Benches:
    """Kills in several processes at a time, each on a bench of its own, after the run of their kind that nobody kills."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.running: list[Kill] = []
        self._tasks: dict[Future[Any], Kill | str] = {}
        self._whole: dict[str, Whole] = {}  # of each kind
        self._waiting: list[Kill] = []  # for that run

    def __enter__(self) -> Benches:
        resource_tracker.ensure_running()  # is to outlive the processes that kill
        self._before = set(family(os.getpid()))
        _adopt_orphans()
        self.folder = Path(tempfile.mkdtemp(prefix="tw-kills-"))
        # each process begins a group of its own: an interrupt reaches this one alone, which then ends all
        self._pool = ProcessPoolExecutor(self.jobs, multiprocessing.get_context("spawn"), os.setsid)
        return self

    def __exit__(self, *fault: object) -> None:
        """What still runs is killed with all its processes, and none of it outlives the folder."""
        self._pool.shutdown(wait=not self.running, cancel_futures=True)
        while left := set(family(os.getpid())) - self._before:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def free(self) -> bool:
        return len(self._tasks) < self.jobs and len(self._waiting) < 2 * self.jobs

    def start(self, kill: Kill) -> None:
        self.running.append(kill)
        if kill.kind in self._whole:
            self._kill(kill)
            return
        self._waiting.append(kill)
        if kill.kind not in self._tasks.values():
            self._tasks[self._pool.submit(_undisturbed, self.folder, kill.kind)] = kill.kind

    def _kill(self, kill: Kill) -> None:
        self._tasks[self._pool.submit(_killed, self.folder, kill, self._whole[kill.kind])] = kill

    def ended(self, until: float) -> Iterator[tuple[Kill, tuple[str, str, float]]]:
        """The kills that come out next, how each did, and its seconds; none if ``until`` comes first or only whole runs ended."""
        seconds = None if until == float("inf") else max(0.0, until - time.monotonic())
        for task in wait(self._tasks, seconds, FIRST_COMPLETED).done:
            kill = self._tasks.pop(task)
            if isinstance(kill, Kill):
                self.running.remove(kill)
                yield kill, task.result()
                continue
            self._whole[kill] = task.result()
            ready = [one for one in self._waiting if one.kind == kill]
            self._waiting = [one for one in self._waiting if one.kind != kill]
            for one in ready:
                self._kill(one)


def _adopt_orphans() -> None:
    """What a killed process leaves becomes a child of this one, so that it is seen."""
    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _undisturbed(folder: Path, kind: str) -> Whole:
    return bench(folder).undisturbed(kind)


def _killed(folder: Path, kill: Kill, whole: Whole) -> tuple[str, str, float]:
    began = time.monotonic()
    return *bench(folder).run(kill, *whole), time.monotonic() - began


class Bench:
    """Where one process plays runs: the processes that are there before them, and a folder for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _adopt_orphans()
        tempfile.tempdir = str(folder)  # for the server that forks, too: it may be killed and leave what it has there
        os.environ |= RAY
        FORKS.Process(target=int).start()  # starts the server that forks
        self.cluster = functools.cache(self._cluster)

    def _cluster(self) -> str:
        """The address of a Ray cluster on this machine, which outlives the commands that use it."""
        here = str(Path(__file__).parents[1])  # the learner, a process of Ray's, tells its moments, too
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        import ray

        ray.init(
            "local", num_cpus=4, num_gpus=0, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False,
            namespace="turnwise", configure_logging=False,
        )  # fmt: skip
        return str(ray.get_runtime_context().gcs_address)

    def undisturbed(self, kind: str) -> Whole:
        """The run of a kind that nobody kills, and of each of its stages the events and seconds of every call."""
        life = KilledRun(self, kind, self.folder / kind.replace(" ", "-"))
        fault = life.to_the_end()
        assert not fault, f"{kind}, not killed: {fault}"
        initial = load_file(life.run / "initial" / "model.safetensors")
        assert _differing(load_file(life.run / "model" / "model.safetensors"), initial), f"{kind} learned nothing"
        return life.run, json.loads(life.moments.with_suffix(".json").read_text())

    def run(self, kill: Kill, whole: Path, measures: Measures) -> tuple[str, str]:
        """How a killed run came out, and what must not be so."""
        calls = measures.get(kill.stage) or [(0, 1.0)]
        events, seconds = calls[min(kill.occurrence, len(calls) - 1)]
        by = "events" if seconds < CLOCK_SECONDS and kill.stage != START else kill.by
        moment = Moment(kill.stage, kill.occurrence, kill.depth * (events if by == "events" else HASTE * seconds), by)
        life = KilledRun(self, kill.kind, self.folder / f"killed-{os.getpid()}", moment, kill.who)
        fault = life.to_the_end() or difference(life.run, whole, KINDS[kill.kind])
        reached = hit(life.moments)
        if fault:
            name = "".join(letter if letter.isalnum() else "-" for letter in kill.name)
            shutil.rmtree(kept := self.folder.with_name(f"tw-fault-{name}"), ignore_errors=True)
            shutil.copytree(life.folder, kept)
            fault += f" (kept in {kept})"
        shutil.rmtree(life.folder, ignore_errors=True)
        if reached is None:
            return (BEFORE if not fault else "failed"), fault
        return (f"failed in {reached[0]}" if fault else f"held in {reached[0]}"), fault


bench = functools.cache(Bench)  # one in each process


class KilledRun:
    """One run in a folder of its own, from its start over its kill to its end."""

    def __init__(self, bench: Bench, kind: str, folder: Path, moment: Moment | None = None, who: str = RUN) -> None:
        self.bench, self.kind, self.folder, self.moment, self.who = bench, KINDS[kind], folder, moment, who
        self.run, self.moments = folder / "out" / "run", folder / "moments"
        for path in (folder / "out", folder / "tmp", folder / "state"):
            path.mkdir(parents=True)
        (folder / "same_weights_parts.py").write_text(PARTS)
        self.server: Any = None
        self.seen: set[int] = set()  # every process that belonged to the run

    def to_the_end(self) -> str:
        """Start the run, let it be killed, resume it until it has ended. What was wrong; empty if nothing."""
        if self.kind.ray:
            self.bench.cluster()
        before, shared = set(family(os.getpid())), set(os.listdir(SHARED_MEMORY))
        try:
            if self.kind.served:
                self.port = _free_port()
                self._serve()
            fault = self._lives(before)
            if self.server is not None:
                self.server.terminate()
                self.server.join(END_SECONDS)
            return fault or self._left(before, shared)
        finally:
            for pid in set(family(os.getpid())) - before if not self.kind.ray else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            for pid in self.seen:  # became children of this process
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _lives(self, before: set[int]) -> str:
        for _ in range(LIVES):
            words = ["resume", str(self.run)] if (self.run / "run.json").is_file() else ["train", *self._flags()]
            process = self._start(words)
            until = time.monotonic() + LIMIT
            while process.is_alive():
                process.join(0.5)
                self.seen |= set(family(os.getpid())) - before
                if self.server is not None and not self.server.is_alive():
                    self._serve()  # what an operator or a supervisor does
                if time.monotonic() > until:
                    process.kill()
                    process.join()
                    return f"still running after {LIMIT:g} s: {self._said()}"
            if process.exitcode == 0:
                return ""
            if "Traceback (most recent call last)" in self._said():
                return f"traceback: {self._said()[-400:]}"
            if process.exitcode != -9 and "turnwise: " not in self._said():
                return f"exit status {process.exitcode} without a message: {self._said()[-400:]}"
            if hit(self.moments) is None:
                return f"exit status {process.exitcode} before any kill: {self._said()[-400:]}"
            if process.exitcode == -9 and not self.kind.ray and (left := self._processes_left(before)):
                return left  # beside a run that was killed and not resumed yet
        return f"it did not go on in {LIVES} lives: {self._said()[-400:]}"

    def _flags(self) -> list[str]:
        flags = self.kind.flags
        if self.kind.served:
            flags = flags.replace("URL", f"http://127.0.0.1:{self.port}")
        if self.kind.ray:
            flags = flags.replace("ADDRESS", self.bench.cluster())
        return [*flags.split(), *SMALL, "--out", str(self.folder / "out")]

    def _start(self, argv: list[str]) -> Any:
        words = self.kind.who.get(self.who, "")  # none: the command itself
        victim = Victim(words, os.getpid() if self.kind.ray and words else 0)
        if self.kind.served and self.who == "server":
            victim = Victim(root=self.server.pid)
        return self._child(argv, f"{self.folder}/stderr.txt", self.moments, self.moment, victim, self.kind.ray)

    def _serve(self) -> None:
        words = ["serve", "tiny", *SERVED, "--address", f"127.0.0.1:{self.port}"]
        self.server = self._child(words, f"{self.folder}/server.txt")
        until = time.monotonic() + LIMIT
        while time.monotonic() < until and self.server.is_alive():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            time.sleep(0.05)

    def _child(self, words: list[str], errors: str, *more: Any) -> Any:
        process = FORKS.Process(target=child, args=(words, str(self.folder), errors, *more))
        process.start()
        return process

    def _said(self) -> str:
        path = self.folder / "stderr.txt"
        return " ".join(path.read_text(errors="replace").split()) if path.is_file() else ""

    def _processes_left(self, before: set[int]) -> str:
        own = before | ({self.server.pid} if self.server is not None and self.server.is_alive() else set())
        until = time.monotonic() + END_SECONDS
        while left := [pid for pid in set(family(os.getpid())) - own if not self.kind.ray or "Actor" in words_of(pid)]:
            self.seen |= set(left)
            if time.monotonic() > until:
                return f"processes are left: {[words_of(pid)[-200:] for pid in left]}"
            time.sleep(0.1)
        return ""

    def _left(self, before: set[int], shared: set[str]) -> str:
        """What is left of a run that has ended, beside its directory."""
        if left := self._processes_left(before):
            return left
        memory = [name for name in set(os.listdir(SHARED_MEMORY)) - shared if _numbers(name) & self.seen]
        places = [self.folder / "tmp", self.folder / "state" / "turnwise" / "servers", self.folder / "out"]
        files = [str(path) for place in places if place.is_dir() for path in place.iterdir() if path != self.run]
        return f"files are left: {[*memory, *files]}" if memory or files else ""


def child(
    words: list[str], folder: str, errors: str, moments: Path | None = None, moment: Moment | None = None,
    victim: Victim | None = None, ray: bool = False,
) -> None:  # fmt: skip
    """What the process of a command does."""
    os.environ |= {"TMPDIR": f"{folder}/tmp", "XDG_STATE_HOME": f"{folder}/state"}
    tempfile.tempdir = None
    from turnwise.training import summary

    summary.curves = lambda rows, out, title="": Path(out).touch()  # charts would take 40 % of so short a run
    with contextlib.ExitStack() as stack:
        if moments is not None and ray:
            stack.enter_context(_in_learner(moments, moment, victim or Victim()))
        elif moments is not None:
            stack.enter_context(told(moments, moment, victim))
        command(words, folder, f"{folder}/stdout.txt", errors)


@contextlib.contextmanager
def _in_learner(moments: Path, moment: Moment | None, victim: Victim) -> Iterator[None]:
    """The run of a cluster is in the process of its learner, which Ray starts: it tells there. Who drives is this process."""
    from turnwise.training.cluster import driver

    start = driver.ClusterRun.start
    victim = victim if victim.words else Victim(root=os.getpid())

    def start_told(run: Any, learn: Callable[..., Any], notes: Any) -> None:
        start(run, functools.partial(learn_told, moments, moment, victim, learn), notes)

    driver.ClusterRun.start = start_told  # type: ignore[method-assign]
    try:
        yield
    finally:
        driver.ClusterRun.start = start  # type: ignore[method-assign]


# -------------------------------------------------------------------------- the verdict


def difference(run: Path, whole: Path, kind: Kind) -> str:
    """In what a killed run differs from one that was not; empty if in nothing."""
    fault, _ = audit(run, trained(whole), kind.staleness)
    if fault:
        return fault
    names = [{_without_numbers(str(path.relative_to(folder))) for path in folder.rglob("*")} for folder in (run, whole)]
    if more := sorted(names[0] - names[1]):
        return f"the run directory holds {more[:5]}, and that of the other run does not"
    if not kind.exact:
        return ""
    mine, theirs = (load_file(path / "model" / "model.safetensors") for path in (run, whole))
    differing = _differing(mine, theirs)
    return f"weights differ: {differing[:3]}" if differing else ""


def _differing(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [key for key in theirs if key not in mine or not (mine[key] == theirs[key]).all()]


def _without_numbers(name: str) -> str:
    return "".join("0" if letter.isdigit() else letter for letter in name)


def _numbers(name: str) -> set[int]:
    return {int(part) for part in "".join(c if c.isdigit() else " " for c in name).split()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
