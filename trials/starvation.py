"""Runs that the machine starves: who, of what, from which moment and for how long are drawn from a grammar, with a seed.

A run must end with a message and a status other than 0, or as if nothing had happened: every group that was trained on is whole,
and where no group was given up the weights are those of a run that was not starved, bit for bit."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.support.chat_servers import ChatStub, serving
from tests.support.judged import judge
from trials.commands import FORKS, command
from trials.moments import family
from trials.outcome import Outcome, Results

SEED = 33
LIMIT = 600.0  # seconds that a run may take: only a hang reaches it
STEPS = 5
CALCULATOR = ["--env", "calculator", "--difficulty", "1"]
WHO = {
    "Python tool": CALCULATOR,
    "isolated environment": [*CALCULATOR, "--isolate-env"],
    "episodes in two processes": [*CALCULATOR, "--env-processes", "2"],
    "code reward": ["--data", "ROWS", "--reward", "code"],
    "local generator": [*CALCULATOR, "--generator", "local"],
    "two ranks": [*CALCULATOR, "--ranks", "2"],
    "served judge": [*CALCULATOR, "--judge", "JUDGE", "--judge-seconds", "10"],
}
ROOM = 64 << 20  # bytes of a disk or of shared memory that is filled
BEFORE = "not met"  # the run was over at that moment, or had no such process yet: not counted
Release = Callable[[], None]


# ------------------------------------------------------------------------- the grammar


def small(steps: int = STEPS, cold_steps: int = 0) -> list[str]:
    """The flags of a short run; a flag may be given once only."""
    return f"""--groups 2 --group-size 4 --steps {steps} --max-tokens 32 --context 256 --eval-tasks 6 --checkpoint-every 2
        --threads 1 --device cpu --cold-steps {cold_steps} --reward-seconds 10 --generator-seconds 10 --name run
        --seed 5""".split()


@dataclass(frozen=True)
class Attempt:
    who: str
    what: str
    moment: int  # steps that have been logged; -1: at once
    delay: float  # seconds after it
    lasts: float  # seconds; 0: for good
    scarce: float  # in [0, 1): how little is left

    @property
    def name(self) -> str:
        when = "from the start" if self.moment < 0 else f"{self.delay:.1f} s after step {self.moment}"
        return f"{self.who}: {self.what} {when}, {f'for {self.lasts:.1f} s' if self.lasts else 'for good'}, {self.scarce:.2f}"


def draw(seed: int) -> Iterator[Attempt]:
    """Every resource and everyone about equally often, in an order and at moments that the seed gives."""
    rng, whats, whos = random.Random(seed), list[str](), list[str]()
    while True:
        whats = whats or rng.sample(sorted(WHAT), len(WHAT))
        whos = whos or rng.sample(sorted(WHO), len(WHO))
        moment, lasts = rng.choice((-1, 0, 1, 2, 3)), rng.choice((0.0, rng.uniform(1, 6)))
        yield Attempt(whos.pop(), whats.pop(), moment, rng.uniform(0, 2), lasts, rng.random())


# ----------------------------------------------------------------------- what runs out


def _limits(kind: int, amount: Callable[[int], int]) -> Callable[[int, Path, Attempt, random.Random], Release | None]:
    """Every process of the run gets the limit ``amount(pid)``, as if its user had given it so."""

    def starve(pid: int, out: Path, attempt: Attempt, rng: random.Random) -> Release | None:
        before = {}
        for one in family(pid):
            with contextlib.suppress(OSError):
                most = max(1, int(amount(one) * (1 if attempt.moment < 0 else 0.2) * attempt.scarce) + _used(kind, one))
                before[one] = resource.prlimit(one, kind, (most, most))

        def release() -> None:
            for one in family(pid):
                with contextlib.suppress(OSError):
                    resource.prlimit(one, kind, before.get(one, before[pid]))

        return release

    return starve


def _used(kind: int, pid: int) -> int:
    if kind == resource.RLIMIT_NOFILE:
        return len(os.listdir(f"/proc/{pid}/fd"))
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize() if kind == resource.RLIMIT_AS else 0


def _processes(pid: int, out: Path, attempt: Attempt, rng: random.Random) -> Release | None:
    group = PIDS / f"turnwise-trial-{pid}"
    group.mkdir()
    pids = family(pid)
    for one in pids:
        with contextlib.suppress(OSError):
            (group / "cgroup.procs").write_text(str(one))
    threads = int((group / "pids.current").read_text())
    (group / "pids.max").write_text(str(threads + int(10 * attempt.scarce)))
    return lambda: None if not group.is_dir() else _write(group / "pids.max", "max")


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _disk(pid: int, out: Path, attempt: Attempt, rng: random.Random) -> Release | None:
    return _fill(out / "ballast", attempt)


def _shared_memory(pid: int, out: Path, attempt: Attempt, rng: random.Random) -> Release | None:
    return _fill(Path(f"/proc/{pid}/root/dev/shm/ballast"), attempt)  # of its own mount namespace


def _fill(ballast: Path, attempt: Attempt) -> Release:
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        space = os.statvfs(ballast.parent)
        file.write(bytes(max(0, space.f_bavail * space.f_frsize - int(attempt.scarce * 200_000))))
    return lambda: ballast.unlink(missing_ok=True)


def _kill(pid: int, out: Path, attempt: Attempt, rng: random.Random) -> Release | None:
    if not (children := family(pid)[1:]):
        return None
    _signal(rng.choice(children), signal.SIGKILL)
    return lambda: None


def _stop(pid: int, out: Path, attempt: Attempt, rng: random.Random) -> Release | None:
    if not (children := family(pid)[1:]):
        return None
    _signal(child := rng.choice(children), signal.SIGSTOP)
    return lambda: _signal(child, signal.SIGCONT)


def _slow(pid: int, out: Path, attempt: Attempt, rng: random.Random) -> Release | None:
    """The processes of the run together get a quarter to three quarters of one core."""
    group = CORES / f"turnwise-trial-{pid}"
    group.mkdir()
    for one in family(pid):
        with contextlib.suppress(OSError):
            (group / "cgroup.procs").write_text(str(one))
    period = int((group / "cpu.cfs_period_us").read_text())
    (group / "cpu.cfs_quota_us").write_text(str(int(period * (0.25 + attempt.scarce / 2))))
    return lambda: None if not group.is_dir() else _write(group / "cpu.cfs_quota_us", "-1")


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


PIDS, CORES = Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup/cpu")
WHAT: dict[str, Callable[[int, Path, Attempt, random.Random], Release | None]] = {
    "open files": _limits(resource.RLIMIT_NOFILE, lambda pid: 60),
    "memory": _limits(resource.RLIMIT_AS, lambda pid: 300 << 20),
    "size of files": _limits(resource.RLIMIT_FSIZE, lambda pid: 400_000),
    "processes": _processes,
    "disk": _disk,
    "shared memory": _shared_memory,
    "a killed child": _kill,
    "a stopped child": _stop,
    "a slow processor": _slow,
}


@cache
def missing() -> dict[str, str]:
    """What this machine does not let us starve a run of, and why."""
    if os.geteuid():
        return dict.fromkeys(("processes", "disk", "shared memory", "a slow processor"), "needs root")
    groups = {"processes": PIDS, "a slow processor": CORES}
    return {what: f"needs {path}" for what, path in groups.items() if not os.access(path / "cgroup.procs", os.W_OK)}


# ---------------------------------------------------------------------------- a run


def trial(attempts: int, results: Results, progress: Callable[[str], None], seed: int = SEED) -> Iterator[Outcome]:
    for what, why in missing().items():
        progress(f"starvation: {what} is left out: {why}")
    progress(f"starvation: seed {seed}")
    with tempfile.TemporaryDirectory() as scratch, serving(ChatStub(judge)) as url:
        bench = Bench(Path(scratch), url)
        counted = 0
        for attempt in draw(seed):
            if counted >= attempts:
                return
            if attempt.what in missing():
                continue
            if not results.done("starvation", attempt.name):
                progress(f"starvation: {attempt.name}")
                result, fault, seconds = bench.run(attempt)
                count = int(result != BEFORE)
                yield Outcome("starvation", attempt.name, result, fault, seconds, count, attempt.what)
            counted += results.outcomes["starvation", attempt.name].count


class Bench:
    """A small model, rows, and of each kind of run one that is not starved."""

    def __init__(self, folder: Path, judge_url: str) -> None:
        self.folder, self.judge_url = folder, judge_url
        self.rows = folder / "rows.jsonl"
        tasks = [{"prompt": f"Write a function f that adds {n}.", "tests": [f"assert f(1) == {n + 1}"]} for n in range(40)]
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in tasks))
        self.undisturbed = cache(self._undisturbed)
        self.model = cache(self._model)

    def _model(self) -> Path:
        """One that calls the tool, as far as a few steps on demonstrations teach it."""
        flags = [*small(steps=1, cold_steps=80), "--hidden", "64", "--layers", "2", "--vocabulary", "320"]
        status, err, _ = self._ended(self._start([*CALCULATOR, *flags], self.folder / "model"), self.folder / "model")
        assert status == 0, f"the run that the model comes from failed: {err}"
        return self.folder / "model" / "out" / "run" / "model"

    def _flags(self, who: str) -> list[str]:
        values = {"ROWS": str(self.rows), "JUDGE": self.judge_url}
        return [*("--model", str(self.model())), *(values.get(f, f) for f in WHO[who]), *small()]

    def _undisturbed(self, who: str) -> Path:
        folder = self.folder / f"undisturbed {who}"
        status, err, _ = self._ended(self._start(self._flags(who), folder), folder)
        assert status == 0 and not biased(folder / "out" / "run"), f"{who}, not starved: status {status}, {err}"
        return folder / "out" / "run"

    def run(self, attempt: Attempt) -> tuple[str, str, float]:
        """How a starved run came out, what must not be so, and its seconds."""
        folder, rng, release = self.folder / "starved", random.Random(attempt.name), None
        whole = self.undisturbed(attempt.who)
        with _small_disk(folder / "out", attempt.what == "disk"):
            process = self._start(self._flags(attempt.who), folder, attempt.what == "shared memory")
            try:
                if starved := self._reach(process, folder, attempt):
                    release = WHAT[attempt.what](process.pid, folder / "out", attempt, rng)
                    starved = release is not None  # it may have no process of its own yet
                    if attempt.lasts and release is not None:
                        process.join(attempt.lasts)
                        release()
                ended = self._ended(process, folder)
            finally:
                for one in family(process.pid)[::-1] + _session(process.pid):
                    _signal(one, signal.SIGKILL)
                if release is not None:
                    release()
                for groups in (PIDS, CORES):
                    with contextlib.suppress(OSError):
                        (groups / f"turnwise-trial-{process.pid}").rmdir()
            result, fault = verdict(ended, folder / "out" / "run", whole)
        shutil.rmtree(folder, ignore_errors=True)
        return (result if starved or fault else BEFORE), fault, ended[2]

    def _start(self, flags: list[str], folder: Path, own_memory: bool = False) -> Any:
        (folder / "out").mkdir(parents=True, exist_ok=True)
        argv = ["train", "grpo", *flags, "--out", str(folder / "out")]
        process = FORKS.Process(target=_child, args=(argv, str(folder), own_memory))
        process.start()
        return process

    def _reach(self, process: Any, folder: Path, attempt: Attempt) -> bool:
        """Wait for the moment; whether the run still ran then."""
        logged, deadline = folder / "out" / "run" / "metrics.jsonl", time.monotonic() + LIMIT
        directory = folder / "out" / "run" / "run.json"
        while process.is_alive() and attempt.moment >= 0 and time.monotonic() < deadline:
            if attempt.moment == 0 and directory.is_file():
                break
            if logged.is_file() and 0 < attempt.moment <= logged.read_bytes().count(b"\n"):
                break
            time.sleep(0.02)
        process.join(attempt.delay if attempt.moment >= 0 else 0.3)
        return process.is_alive()

    def _ended(self, process: Any, folder: Path) -> tuple[int | None, str, float]:
        """Exit status (None: it hung), standard error, seconds."""
        began = time.monotonic()
        process.join(LIMIT)
        status = process.exitcode
        if process.is_alive():
            process.kill()
            process.join()
        errors = folder / "stderr.txt"
        return status, errors.read_text(errors="replace") if errors.is_file() else "", time.monotonic() - began


def _child(argv: list[str], folder: str, own_memory: bool) -> None:
    if own_memory:  # a small /dev/shm that only this run sees
        library = ctypes.CDLL(None, use_errno=True)
        for done in (
            library.unshare(0x20000),  # CLONE_NEWNS
            library.mount(None, b"/", None, 0x44000, None),  # MS_REC | MS_PRIVATE
            library.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={ROOM}".encode()),
        ):
            assert done == 0, os.strerror(ctypes.get_errno())
    command(argv, folder, f"{folder}/stdout.txt", f"{folder}/stderr.txt")


@contextlib.contextmanager
def _small_disk(folder: Path, small: bool) -> Iterator[None]:
    folder.mkdir(parents=True)
    if small:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        if small:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def _session(leader: int) -> list[int]:
    """Processes of the session of a run that has ended: such as it left behind."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(entry.read_text().rpartition(")")[2].split()[3]) == leader:
                pids.append(int(entry.parent.name))
    return pids


# -------------------------------------------------------------------------- the verdict


def verdict(ended: tuple[int | None, str, float], run: Path, whole: Path) -> tuple[str, str]:
    """What came out, and what must not come out so; empty if nothing."""
    status, err, seconds = ended
    if status is None:
        return "hung", f"still running after {seconds:.0f} s"
    message = " ".join(err.rpartition("turnwise: ")[2].split())[:300]
    if partial := biased(run):
        return "biased", f"exit status {status}, {partial}; {message}"
    if "Traceback (most recent call last)" in err:
        return "traceback", f"exit status {status}, {err.strip().splitlines()[-1][:300]}"
    if status == 0:
        differing = _given_up(run) == 0 and _differ(run, whole)
        return ("ran", "") if not differing else ("biased", f"exit status 0, and the weights are other ones: {differing}")
    if status not in (1, 2) or "turnwise: " not in err:
        return "died", f"exit status {status}, no message: {err.strip()[-300:]!r}"
    return "stopped", ""


def biased(run: Path) -> str:
    """A group that was trained on although an episode of it is missing or failed: these environments and rewards fail none."""
    from turnwise.store.ledger import SqliteLedger

    if not (run / "ledger.sqlite").is_file():
        return ""
    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        for summary in ledger.groups():
            if summary.state == "trained":
                episodes = ledger.group(summary.group_id).trajectories
                reasons = [t.reason for t in episodes if t.status == "failed"]
                if reasons or len(episodes) != 4:
                    count = f"{len(episodes)} episodes, {len(reasons)} failed"
                    return f"group {summary.group_id} was trained on with {count}: {reasons[:1]}"
    return ""


def _given_up(run: Path) -> int:
    from turnwise.store.ledger import SqliteLedger

    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        return ledger.group_counts().dropped


def _differ(run: Path, whole: Path) -> str:
    mine, theirs = (load_file(path / "model" / "model.safetensors") for path in (run, whole))
    return ", ".join(key for key in theirs if key not in mine or not bool((mine[key] == theirs[key]).all()))[:200]
