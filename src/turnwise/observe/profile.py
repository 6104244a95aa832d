"""Profiles a training step: spans around what the loop calls, an operator trace, and one page that adds them up.

The loop and the engines do not know of it: inside ``Profile.over(loop)`` the methods of the loop's parts are replaced by timed
ones, and restored afterwards. The self time of a span is its wall time without the spans inside it, so the rows of the page
sum to the whole. On a GPU every span ends with a device synchronisation. Tracing slows the steps it records, so times and
trace come from different steps wherever a run has two.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import inspect
import json
import resource
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE, TRACE = "profile.md", "trace.json.gz"
TOP = 15
HOST, DEVICE = ("cpu_op",), ("kernel", "gpu_memcpy", "gpu_memset")  # categories of trace events
CAPTURE = "capture"  # of CUDA graphs, anywhere: happens for new sizes only and is no part of a typical step
CONCURRENT = ("prefill", "decode")  # as outermost spans they run concurrently with the loop

SPANS: tuple[tuple[str, str, str], ...] = (  # span, part of the loop, method
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
ROW_TITLES = {  # of the self time of a span
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
SpanPath = tuple[str, ...]  # the names of a span and of the spans around it, outermost first


@dataclass
class SpanTimer:
    """Self time (without the spans inside it) and number of calls of nested spans, by path. Each thread has its own stack. Does
    not know what the timed calls do, nor who reads the times."""

    seconds: dict[SpanPath, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[SpanPath] = field(default_factory=Counter)
    running: bool = False
    synchronize: Callable[[], None] = lambda: None  # waits for the device at the end of a span
    annotate: Callable[[str], Any] = lambda name: contextlib.nullcontext()  # names the span in a trace
    _local: threading.local = field(default_factory=threading.local)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        if not self.running:
            yield
            return
        stack: list[list[Any]] = self._local.__dict__.setdefault("stack", [])
        path = (*(stack[-1][0] if stack else ()), name)
        frame: list[Any] = [path, 0.0]  # path, and seconds in the spans inside it
        stack.append(frame)
        start = time.perf_counter()
        try:
            with self.annotate(name):
                yield
                self.synchronize()
        finally:
            seconds = time.perf_counter() - start
            stack.pop()
            self.seconds[path] += seconds - frame[1]
            self.calls[path] += 1
            if stack:
                stack[-1][1] += seconds

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, coroutine function or generator function, timed."""
        return wrapped_call(call, lambda: self.span(name))


def windows(start: int, steps: int) -> tuple[range, range]:
    """(timed steps, traced steps), counted from 1: a few in the middle, or as many as there are.

    >>> windows(0, 100)
    (range(11, 16), range(16, 18))
    >>> windows(0, 20)
    (range(3, 6), range(6, 8))
    >>> windows(0, 1)
    (range(1, 2), range(1, 2))
    """
    remaining = steps - start
    if remaining >= 24:  # early steps compile and capture
        timed, traced = (11, 16), (16, 18)
    elif remaining >= 7:
        timed, traced = (3, 6), (6, 8)
    elif remaining >= 3:
        timed, traced = (2, remaining), (remaining, remaining + 1)
    else:
        timed, traced = (1, max(remaining, 2)), (remaining, remaining + 1)
    return range(start + timed[0], start + timed[1]), range(start + traced[0], start + traced[1])


@dataclass
class Profile:
    """``with Profile(folder).over(loop): await loop.run()`` writes a page and a trace to the folder."""

    folder: Path
    title: str = ""
    timer: SpanTimer = field(default_factory=SpanTimer)
    tokens: float = 0.0
    total: float = 0.0
    _step_start: float = 0.0
    _tracer: Any = None
    _operators: Sequence[tuple[str, int, float]] = ()
    _times: dict[SpanPath, float] = field(default_factory=dict)
    _calls: Counter[SpanPath] = field(default_factory=Counter)

    @contextlib.contextmanager
    def over(self, loop: Any, **others: tuple[Any, Sequence[str]]) -> Iterator[None]:
        """``others``: further spans, each an object and the names of its methods to time."""
        import torch

        self.timed, self.traced = windows(loop.start, loop.steps)
        self.cuda = torch.cuda.is_available() and torch.device(getattr(loop.learner, "device", "cpu")).type == "cuda"
        if self.cuda:
            capturing = torch.cuda.is_current_stream_capturing  # synchronising is not allowed during capture
            # of its own stream: with staleness another thread may be capturing a graph, which the device's would break
            self.timer.synchronize = lambda: None if capturing() else torch.cuda.current_stream().synchronize()
        spans = [(name, getattr(loop, part) if part else loop, method) for name, part, method in SPANS]
        spans += [(name, owner, method) for name, (owner, methods) in others.items() for method in methods]
        with contextlib.ExitStack() as stack:
            for name, owner, method in spans:
                *inner, last = method.split(".")
                owner = functools.reduce(lambda part, key: getattr(part, key, None), inner, owner)
                # another engine may lack this method: its time then counts for the caller
                if callable(call := getattr(owner, last, None)):
                    stack.enter_context(patched_attribute(owner, last, self.timer.wrap(name, call)))
            stack.enter_context(timed_backward(self.timer))
            stack.enter_context(timed_optimisers(self.timer))
            timed_report = loop.report

            def report(step: int, metrics: Mapping[str, float]) -> None:
                """A step ends with its report; what follows belongs to the next step."""
                timed_report(step, metrics)
                if step in self.timed:
                    self.tokens += metrics.get("tokens", 0.0)
                self._begin_step(step + 1)

            stack.enter_context(patched_attribute(loop, "report", report))
            evaluations = {step: self.timer.wrap("evaluate", run) for step, run in loop.after_step.items()}
            stack.enter_context(patched_attribute(loop, "after_step", evaluations))
            self._begin_step(loop.start + 1)
            try:
                yield
            finally:
                self._stop_trace()
        if self.total:
            (self.folder / PAGE).write_text(self.page(), encoding="utf-8")

    def _begin_step(self, step: int) -> None:
        """Switch timing and tracing on or off for ``step``."""
        now = time.perf_counter()
        if self.timer.running and step - 1 in self.timed:
            self.total += now - self._step_start
        self.timer.running = step in self.timed or step in self.traced
        if step == self.timed.start:
            self.timer.seconds.clear()
            self.timer.calls.clear()
            if self.cuda:
                import torch

                torch.cuda.reset_peak_memory_stats()
        if step == self.timed.stop:
            self._finish_timing()
        if step == self.traced.start:
            from torch.profiler import ProfilerActivity, profile, record_function

            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
            self._tracer = profile(activities=kinds)
            self._tracer.start()
            self.timer.annotate = record_function
        if step == self.traced.stop:
            self._stop_trace()
        self._step_start = time.perf_counter()

    def _stop_trace(self) -> None:
        if self._tracer is None:
            return
        tracer, self._tracer = self._tracer, None
        self.timer.annotate = lambda name: contextlib.nullcontext()
        tracer.stop()
        plain = self.folder / TRACE.removesuffix(".gz")
        tracer.export_chrome_trace(str(plain))
        text = plain.read_bytes()
        # the profiler's own compression and aggregation take minutes for a million operators
        (self.folder / TRACE).write_bytes(gzip.compress(text, 1))
        plain.unlink()
        self._operators = operators(json.loads(text)["traceEvents"], DEVICE if self.cuda else HOST)

    def _finish_timing(self) -> None:
        """Store the times; spans of traced steps after them must not be added."""
        seconds, calls = self.timer.seconds, self.timer.calls
        self.timer.seconds, self.timer.calls = defaultdict(float), Counter()
        self._times, self._calls = defaultdict(float), Counter()
        for path, self_time in seconds.items():
            row = (CAPTURE,) if CAPTURE in path else path
            self._times[row] += self_time
            if CAPTURE not in path[:-1]:  # a backward pass inside a capture is not a call of its own
                self._calls[row] += calls[path]

    def page(self) -> str:
        steps, last, traced = len(self.timed), self.timed.stop - 1, self.traced
        rate = f"{self.tokens / self.total:,.0f} sampled tokens/s" if self.total else ""
        traced_steps = str(traced.start) if len(traced) == 1 else f"{traced.start} to {traced.stop - 1}"
        traced_too = " These steps were also traced, which slows them." if set(self.timed) & set(traced) else ""
        rows = [f"| {name} | {s / steps:.4f} | {s / self.total:.1%} | {n / steps:.1f} |" for name, s, n in self.rows()]
        # rollouts in another thread are no part of the sum
        concurrent = {path[0]: seconds for path, seconds in self._times.items() if path[0] in CONCURRENT}
        times = ", ".join(f"{name} {seconds / steps:.4f} s per step" for name, seconds in concurrent.items())
        beside = [f"Concurrently, in the generator's thread or between steps: {times}.", ""] if concurrent else []
        whole = sum(self_time for _, _, self_time in self._operators) or 1.0
        operator_rows = [
            f"| `{name[:80]}` | {calls} | {self_time / 1e3:.2f} | {self_time / whole:.1%} |"
            for name, calls, self_time in self._operators[:TOP]
        ]
        lines = [
            f"# Where the time of a step goes{': ' + self.title if self.title else ''}",
            "",
            f"Steps {self.timed.start} to {last}: {self.total / steps:.3f} s each, {rate}; {self.memory()}.{traced_too}",
            f"By stage: {self.brief()}.",
            "",
            "| span | seconds per step | share | calls per step |",
            "|---|---:|---:|---:|",
            *rows,
            "",
            *beside,
            f"The most expensive operators of step{'s' * (len(traced) > 1)} {traced_steps} "
            f"({'on the device' if self.cuda else 'on the CPU'}, self time; the whole trace is in `{TRACE}`, for "
            "`chrome://tracing` or Perfetto):",
            "",
            "| operator | calls | ms | share |",
            "|---|---:|---:|---:|",
            *operator_rows,
            "",
        ]
        return "\n".join(lines)

    def rows(self) -> list[tuple[str, float, int]]:
        """(title, self seconds, calls) of all timed steps, in the order of a step; the remainder comes last."""
        paths = [path for path in self._times if path[0] not in CONCURRENT]
        order = [name for name, _, _ in SPANS] + ["render", "backward", "optimiser"]
        order_of = lambda path: [order.index(part) if part in order else len(order) for part in path]  # noqa: E731
        rows = [(ROW_TITLES.get(p, ": ".join(p)), self._times[p], self._calls[p]) for p in sorted(paths, key=order_of)]
        remainder = self.total - sum(seconds for _, seconds, _ in rows)
        return [*rows, ("other (packing, statistics, the loop itself)", max(remainder, 0.0), len(self.timed))]

    def brief(self) -> str:
        """The shares of the loop's stages, largest first."""
        shares: dict[str, float] = defaultdict(float)
        for path, seconds in self._times.items():
            shares[path[0]] += seconds / self.total * (path[0] not in CONCURRENT)
        by_share = sorted(shares.items(), key=lambda pair: -pair[1])
        return ", ".join(f"{name} {share:.0%}" for name, share in by_share if share >= 0.005)

    def memory(self) -> str:
        host = f"peak memory of the process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MB"
        if not self.cuda:
            return host
        import torch

        used, reserved = (f() / 2**20 for f in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved))
        return f"peak memory of the device {used:,.0f} MB allocated, {reserved:,.0f} MB reserved; {host}"


def operators(events: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[tuple[str, int, float]]:
    """(name, calls, self microseconds) of a trace's events of these categories, most expensive first."""
    self_time: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    threads: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in kinds and event.get("ph") == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["name"]))
    for thread in threads.values():  # subtract the time of nested events
        open_: list[tuple[float, str]] = []
        for start, minus, name in sorted(thread):
            while open_ and open_[-1][0] <= start:
                open_.pop()
            self_time[name] -= minus
            calls[name] += 1
            if open_:
                self_time[open_[-1][1]] += minus
            open_.append((start - minus, name))
    return sorted(((name, calls[name], time) for name, time in self_time.items()), key=lambda row: -row[2])


@contextlib.contextmanager
def timed_backward(timer: SpanTimer) -> Iterator[None]:
    """Time every backward pass inside the block."""
    import torch

    # PyTorch has hooks per tensor and per module, but none around a whole backward pass. So both functions that
    # ``Tensor.backward`` and our engines look up at each call are replaced. That others call them through the module is
    # not documented; if it changed, backward passes would count for their callers and nothing else.

    with contextlib.ExitStack() as stack:
        for name in ("backward", "grad"):
            timed = timer.wrap("backward", getattr(torch.autograd, name))
            stack.enter_context(patched_attribute(torch.autograd, name, timed))
        yield


@contextlib.contextmanager
def timed_optimisers(timer: SpanTimer) -> Iterator[None]:
    """Time every optimiser step inside the block, through the hooks PyTorch has for all optimisers."""
    from torch.optim import optimizer

    open_spans: list[Any] = []

    def begin(*_: Any) -> None:
        open_spans.append(timer.span("optimiser"))
        open_spans[-1].__enter__()

    def end(*_: Any) -> None:
        if open_spans:
            open_spans.pop().__exit__(None, None, None)

    handles = [optimizer.register_optimizer_step_pre_hook(begin), optimizer.register_optimizer_step_post_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------- calls seen from outside


def wrapped_call(
    call: Callable[..., Any], around: Callable[[], contextlib.AbstractContextManager[None]]
) -> Callable[..., Any]:
    """The same function, coroutine function or generator function inside ``around()``; of a generator, each of its steps."""
    if inspect.iscoroutinefunction(call):

        @functools.wraps(call)
        async def in_coroutine(*args: Any, **kwargs: Any) -> Any:
            with around():
                return await call(*args, **kwargs)

        return in_coroutine
    if inspect.isgeneratorfunction(call):

        @functools.wraps(call)
        def in_generator(*args: Any, **kwargs: Any) -> Iterator[Any]:
            inner, exhausted = call(*args, **kwargs), object()
            while True:
                with around():
                    item = next(inner, exhausted)
                if item is exhausted:
                    return
                yield item

        return in_generator

    @functools.wraps(call)
    def in_function(*args: Any, **kwargs: Any) -> Any:
        with around():
            return call(*args, **kwargs)

    return in_function


@contextlib.contextmanager
def patched_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside the block, also of a frozen dataclass; restore it, or its absence, afterwards."""
    attributes = vars(owner)
    before = attributes.get(name, attributes)
    write = setattr if inspect.ismodule(owner) else object.__setattr__  # which a module refuses
    write(owner, name, value)
    try:
        yield
    finally:
        if before is attributes:
            object.__delattr__(owner, name)
        else:
            write(owner, name, before)
