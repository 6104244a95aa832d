"""Where a step goes: spans around what the loop calls, a trace of the operators, and one page that adds it up.

The loop and the engines know nothing of it: while a ``Profile`` is ``over`` a loop, calls of its parts are timed, and they are
as they were afterwards. A span's own time is its wall time without the spans inside it, so the rows of the page sum to the
whole. On a GPU the device is waited for where a span ends. The trace slows what it watches, so times and trace are taken from
different steps wherever a run has two.
"""

from __future__ import annotations

import contextlib
import gzip
import inspect
import json
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.observe.span_timer import Clock, Route

PAGE, TRACE = "profile.md", "trace.json.gz"
TOP = 15
HOST, DEVICE = ("cpu_op",), ("kernel", "gpu_memcpy", "gpu_memset")  # kinds of events of a trace
CAPTURE = "capture"  # of CUDA graphs, wherever it happens: sizes that come for the first time, no part of a usual step
BESIDE = ("prefill", "decode")  # where they are inside nothing, they run beside the loop

SPANS: tuple[tuple[str, str, str], ...] = (  # span, part of the loop, what it is asked
    ("rollout", "collector", "collect_step"),
    ("prefill", "generator", "model_runner.prefill"),
    ("decode", "generator", "scheduler.run"),
    (CAPTURE, "generator", "model_runner.decoder._capture"),
    (CAPTURE, "learner", "graphs._capture"),
    ("mix in", "mixture", "mix"),
    ("check", "policy_check", "prepare"),
    ("measure", "learner", "measure"),
    ("credit", "objective", "credit"),
    ("update", "learner", "update"),
    ("publish", "generator", "publish"),
    ("record", "ledger", "flush"),
    ("record", "ledger", "seal"),
    ("checkpoint", "", "save"),
    ("log", "", "report"),
)
MEANING = {  # of the time that is a span's own
    ("rollout",): "rollout: environments, tools, waiting",
    ("rollout", "prefill"): "rollout: prefill",
    ("rollout", "decode"): "rollout: decode and sample",
    ("rollout", "render"): "rollout: messages to ids and back",
    ("update", "record"): "update: records, while a device computes",
    ("check",): "check that generator and learner agree",
    ("measure",): "measure signals",
    ("update",): "update: forward and loss",
    ("update", "backward"): "update: backward",
    ("update", "optimiser"): "update: optimiser",
    ("update", "measure"): "update: signals of the whole step",
    ("publish",): "publish weights",
    (CAPTURE,): "capture graphs of new sizes",
}


def _kind(path: Route) -> Route:
    return (CAPTURE,) if CAPTURE in path else path


def windows(start: int, steps: int) -> tuple[range, range]:
    """(steps that are timed, steps that are traced), counted from 1: a few in the middle, or what there is.

    >>> windows(0, 100)
    (range(11, 16), range(16, 18))
    >>> windows(0, 20)
    (range(3, 6), range(6, 8))
    >>> windows(0, 1)
    (range(1, 2), range(1, 2))
    """
    left = steps - start
    if left >= 24:  # early steps compile and capture
        timed, traced = (11, 16), (16, 18)
    elif left >= 7:
        timed, traced = (3, 6), (6, 8)
    elif left >= 3:
        timed, traced = (2, left), (left, left + 1)
    else:
        timed, traced = (1, max(left, 2)), (left, left + 1)
    return range(start + timed[0], start + timed[1]), range(start + traced[0], start + traced[1])


@dataclass
class Profile:
    """``with Profile(folder).over(loop): await loop.run()`` leaves a page and a trace in the folder."""

    folder: Path
    title: str = ""
    clock: Clock = field(default_factory=Clock)
    tokens: float = 0.0
    total: float = 0.0
    _began: float = 0.0
    _watcher: Any = None
    _operators: Sequence[tuple[str, int, float]] = ()
    _times: dict[Route, float] = field(default_factory=dict)
    _calls: Counter[Route] = field(default_factory=Counter)

    @contextlib.contextmanager
    def over(self, loop: Any, **others: tuple[Any, Sequence[str]]) -> Iterator[None]:
        """``others``: further spans, each an object and the names of its methods."""
        import torch

        self.timed, self.traced = windows(loop.start, loop.steps)
        self.cuda = torch.cuda.is_available() and torch.device(getattr(loop.learner, "device", "cpu")).type == "cuda"
        if self.cuda:
            capturing = torch.cuda.is_current_stream_capturing  # what is being recorded cannot be waited for
            self.clock.settle = lambda: None if capturing() else torch.cuda.synchronize()
        spans = [(name, getattr(loop, part) if part else loop, ask) for name, part, ask in SPANS]
        spans += [(name, owner, ask) for name, (owner, asks) in others.items() for ask in asks]
        spans += [("backward", torch.autograd, ask) for ask in ("backward", "grad")]
        with contextlib.ExitStack() as stack:
            for name, owner, ask in spans:
                self._attach(stack, name, owner, ask)
            self._attach_optimisers(stack)
            stack.enter_context(_held(loop, "report", self._counting(loop.report)))
            stack.enter_context(_held(loop, "after_step", self._evaluations(loop.after_step)))
            self._turn(loop.start + 1)
            try:
                yield
            finally:
                self._stop_trace()
        if self.total:
            (self.folder / PAGE).write_text(self.page(), encoding="utf-8")

    def _attach(self, stack: contextlib.ExitStack, name: str, owner: Any, ask: str) -> None:
        *inner, last = ask.split(".")
        for part in inner:
            owner = getattr(owner, part, None)
        if callable(getattr(owner, last, None)):  # another engine may be built otherwise; its time is then its caller's
            stack.enter_context(_held(owner, last, self.clock.around(name, getattr(owner, last))))

    def _attach_optimisers(self, stack: contextlib.ExitStack) -> None:
        from torch.optim import optimizer

        inside: list[Any] = []

        def begin(*_: Any) -> None:
            inside.append(self.clock.span("optimiser"))
            inside[-1].__enter__()

        def end(*_: Any) -> None:
            if inside:
                inside.pop().__exit__(None, None, None)

        stack.callback(optimizer.register_optimizer_step_pre_hook(begin).remove)
        stack.callback(optimizer.register_optimizer_step_post_hook(end).remove)

    def _evaluations(self, after_step: Mapping[int, Callable[[], Any]]) -> dict[int, Callable[[], Any]]:
        return {step: self.clock.around("evaluate", evaluation) for step, evaluation in after_step.items()}

    def _counting(self, report: Callable[[int, Mapping[str, float]], None]) -> Callable[..., None]:
        """A step ends where it is reported; what comes after belongs to the next."""

        def wrapped(step: int, metrics: Mapping[str, float]) -> None:
            report(step, metrics)
            if step in self.timed:
                self.tokens += metrics.get("tokens", 0.0)
            self._turn(step + 1)

        return wrapped

    def _turn(self, step: int) -> None:
        """What is watched while ``step`` runs."""
        now = time.perf_counter()
        if self.clock.running and step - 1 in self.timed:
            self.total += now - self._began
        self.clock.running = step in self.timed or step in self.traced
        if step == self.timed.start:
            self.clock.seconds.clear()
            self.clock.calls.clear()
            self._forget_peak()
        if step == self.timed.stop:
            self._seal()
        if step == self.traced.start:
            self._start_trace()
        if step == self.traced.stop:
            self._stop_trace()
        self._began = time.perf_counter()

    # ---------------------------------------------------------------- the trace

    def _start_trace(self) -> None:
        from torch.profiler import ProfilerActivity, profile, record_function

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        self._watcher = profile(activities=kinds)
        self._watcher.start()
        self.clock.mark = record_function

    def _stop_trace(self) -> None:
        if self._watcher is None:
            return
        watcher, self._watcher = self._watcher, None
        self.clock.mark = lambda name: contextlib.nullcontext()
        watcher.stop()
        plain = self.folder / TRACE.removesuffix(".gz")
        watcher.export_chrome_trace(str(plain))
        text = plain.read_bytes()
        # the profiler's own packing and adding up take minutes for a million operators
        (self.folder / TRACE).write_bytes(gzip.compress(text, 1))
        plain.unlink()
        self._operators = operators(json.loads(text)["traceEvents"], DEVICE if self.cuda else HOST)

    # ----------------------------------------------------------------- the page

    def _forget_peak(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def _seal(self) -> None:
        """The times are taken: what is traced after them must not be added."""
        seconds, calls = self.clock.seconds, self.clock.calls
        self.clock.seconds, self.clock.calls = defaultdict(float), Counter()
        self._times, self._calls = defaultdict(float), Counter()
        for path, took in seconds.items():
            self._times[_kind(path)] += took
            if CAPTURE not in path[:-1]:  # a backward pass in it is no call of its own
                self._calls[_kind(path)] += calls[path]

    def page(self) -> str:
        steps, last = len(self.timed), self.timed.stop - 1
        rate = f"{self.tokens / self.total:,.0f} sampled tokens/s" if self.total else ""
        same = " These steps were also traced, which slows them." if set(self.timed) & set(self.traced) else ""
        return "\n".join(
            [
                f"# Where a step goes{': ' + self.title if self.title else ''}",
                "",
                f"Steps {self.timed.start} to {last}: {self.total / steps:.3f} s each, {rate}; {self.memory()}.{same}",
                f"In short: {self.brief()}.",
                "",
                "| what | seconds a step | share | calls a step |",
                "|---|---:|---:|---:|",
                *(
                    f"| {name} | {s / steps:.4f} | {s / self.total:.1%} | {n / steps:.1f} |"
                    for name, s, n in self.rows()
                ),
                "",
                *self._beside(),
                f"The dearest operators of step{'s' * (len(self.traced) > 1)} {_spoken(self.traced)} "
                f"({'on the device' if self.cuda else 'on the CPU'}, own time; the whole trace is in `{TRACE}`, for "
                "`chrome://tracing` or Perfetto):",
                "",
                "| operator | calls | ms | share |",
                "|---|---:|---:|---:|",
                *self._operator_rows(),
                "",
            ]
        )

    def rows(self) -> list[tuple[str, float, int]]:
        """(what, own seconds, calls) of all timed steps, in the order of a step; the rest comes last."""
        found = [path for path in self._times if path[0] not in BESIDE]
        order = [name for name, _, _ in SPANS] + ["render", "backward", "optimiser"]
        place = lambda path: [order.index(part) if part in order else len(order) for part in path]  # noqa: E731
        rows = [(MEANING.get(p, ": ".join(p)), self._times[p], self._calls[p]) for p in sorted(found, key=place)]
        rest = self.total - sum(seconds for _, seconds, _ in rows)
        return [*rows, ("the rest (packing, statistics, the loop itself)", max(rest, 0.0), len(self.timed))]

    def brief(self) -> str:
        """The shares of the loop's own stages, the largest first."""
        shares: dict[str, float] = defaultdict(float)
        for path, seconds in self._times.items():
            shares[path[0]] += seconds / self.total * (path[0] not in BESIDE)
        first = sorted(shares.items(), key=lambda pair: -pair[1])
        return ", ".join(f"{name} {share:.0%}" for name, share in first if share >= 0.005)

    def _beside(self) -> list[str]:
        """Rollouts in a thread of their own are no part of the sum."""
        beside = {path[0]: s for path, s in self._times.items() if path[0] in BESIDE}
        if not beside:
            return []
        told = ", ".join(f"{name} {seconds / len(self.timed):.4f} s a step" for name, seconds in beside.items())
        return [f"Beside it, in the generator's own thread or between steps: {told}.", ""]

    def _operator_rows(self) -> list[str]:
        whole = sum(own for _, _, own in self._operators) or 1.0
        return [
            f"| `{name[:80]}` | {calls} | {own / 1e3:.2f} | {own / whole:.1%} |"
            for name, calls, own in self._operators[:TOP]
        ]

    def memory(self) -> str:
        host = f"peak memory of the process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MB"
        if not self.cuda:
            return host
        import torch

        used, held = (f() / 2**20 for f in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved))
        return f"peak memory of the device {used:,.0f} MB used, {held:,.0f} MB held; {host}"


def operators(events: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[tuple[str, int, float]]:
    """(name, calls, own microseconds) of a trace's events of these kinds, the dearest first."""
    own: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    lines: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in kinds and event.get("ph") == "X":
            lines[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["name"]))
    for line in lines.values():  # what runs inside another is not the other's own
        open_: list[tuple[float, str]] = []
        for began, minus, name in sorted(line):
            while open_ and open_[-1][0] <= began:
                open_.pop()
            own[name] -= minus
            calls[name] += 1
            if open_:
                own[open_[-1][1]] += minus
            open_.append((began - minus, name))
    return sorted(((name, calls[name], time) for name, time in own.items()), key=lambda row: -row[2])


def _spoken(steps: range) -> str:
    return str(steps.start) if len(steps) == 1 else f"{steps.start} to {steps.stop - 1}"


@contextlib.contextmanager
def _held(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute with another value for a while; also of what is frozen."""
    own = vars(owner)
    before = own.get(name, own)
    object.__setattr__(owner, name, value) if not inspect.ismodule(owner) else setattr(owner, name, value)
    try:
        yield
    finally:
        if before is own:
            object.__delattr__(owner, name)
        elif inspect.ismodule(owner):
            setattr(owner, name, before)
        else:
            object.__setattr__(owner, name, before)
