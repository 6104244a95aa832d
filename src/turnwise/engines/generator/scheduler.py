"""The running requests, one lane per row: step them all, notice who is done, hand out what was sampled.

Talks to the world only through ``report``. Knows requests and slots, neither threads nor the event loop.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from turnwise.core.records import Sampling, Stop
from turnwise.engines.generator.attention_layouts import Job, Stepping
from turnwise.engines.generator.cuda_graphs import HISTORY
from turnwise.engines.generator.kv_cache import Move, Seat
from turnwise.engines.generator.model_runner import Network
from turnwise.engines.kernels.sampling import Sampler, uniforms

COUNTS = (
    "tokens", "steps", "lane_steps", "prefill_tokens", "prefix_hits", "shared_tokens", "reread_tokens", "admissions",
    "publishes", "impatience",
)  # fmt: skip
THIN = 7 / 8  # share of living lanes at which the others close ranks, where that can happen after any step ...
THIN_AHEAD = 3 / 4  # ... and where some steps more are on their way already
HANDFUL = 32  # steps after which what a GPU has drawn is handed out, and others may say something
BLOCK = 8  # steps between two looks of the host at a GPU without graphs
TAIL = 8  # extra tokens decoded before the stop string's own length, so that no word boundary hides it


@dataclass(eq=False, slots=True)
class Request:
    """One turn being sampled. ``sequence`` is everything so far, the first ``given`` of it not ours."""

    seat: Seat
    seed: int
    sequence: list[int]
    given: int
    sampling: Sampling
    budget: int  # tokens it may sample: its own limit or what the context leaves
    future: Any
    logp: list[float] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    stop: Stop | None = None
    cancelled: bool = False
    since: float = field(default_factory=time.perf_counter)

    @property
    def sampled(self) -> int:
        return len(self.sequence) - self.given


class Lanes:
    def __init__(self, network: Network, stop_ids: Sequence[int], decode: Callable[[list[int]], str] | None) -> None:
        self.network, self.slots = network, network.slots
        self.stop_ids = frozenset(stop_ids)
        self.decode = decode
        self.version = 0
        self.running: list[Request] = []
        self.count: Counter[str] = Counter()
        self.seconds = 0.0
        self._history: list[tuple[list[int], Tensor, Tensor | None]] = []

    def stats(self) -> dict[str, float]:
        rate = self.count["tokens"] / self.seconds if self.seconds else 0.0
        fast = float(self.network.decoder is not None)
        derived = {"seconds": self.seconds, "tokens_per_second": rate, "decoder": fast}
        return {name: float(self.count[name]) for name in COUNTS} | derived

    # ------------------------------------------------------------------ composition

    def admit(self, requests: Sequence[Request]) -> None:
        """Seat newcomers beside the running ones and read what their rows do not hold yet."""
        self.count["admissions"] += 1
        donors = self._donors([r for r in requests if r.seat.row is None])
        for request in requests:
            request.seat.used = self.count["admissions"]
        self.slots.arrange([r.seat for r in [*self.running, *requests]], donors)
        leaders: dict[tuple[int, ...], Request] = {}
        jobs, copies = [], []
        for request in requests:
            row, ids = _row(request), request.sequence[:-1]
            known = common(self.slots.held[row], ids)
            self.slots.held[row] = ids
            self.count["prefix_hits"] += known
            if known == len(ids):
                continue
            leader = leaders.setdefault(tuple(ids), request)
            if leader is request:
                jobs.append(Job(row, known, ids[known:]))
            else:
                copies.append(Move(_row(leader), row, len(ids)))
                self.count["shared_tokens"] += len(ids) - known
        if jobs:
            self.count["prefill_tokens"] += self.network.read(jobs)
        self.slots.move(copies)
        self.running = sorted([*self.running, *requests], key=_row)

    def _donors(self, requests: Sequence[Request]) -> dict[Seat, tuple[int, int]]:
        """For each newcomer the row that holds most of its ids, other dialogues' and free rows included."""
        heads: dict[tuple[int, ...], list[int]] = {}
        for row, held in enumerate(self.slots.held):
            if len(held) >= TAIL:
                heads.setdefault(tuple(held[:TAIL]), []).append(row)
        donors: dict[Seat, tuple[int, int]] = {}
        for request in requests:
            rows = heads.get(tuple(request.sequence[:TAIL]), ())
            best = max(((common(self.slots.held[row], request.sequence[:-1]), -row) for row in rows), default=(0, 0))
            if best[0]:
                donors[request.seat] = (-best[1], best[0])
        return donors

    def reread(self, version: int) -> None:
        """The weights changed: give every running row the KV of the new policy."""
        self.version = version
        self.count["publishes"] += 1
        jobs = [Job(_row(r), 0, r.sequence[:-1]) for r in self.running if len(r.sequence) > 1]
        if jobs:
            self.count["reread_tokens"] += self.network.read(jobs)
        for request in self.running:
            self.slots.held[_row(request)] = request.sequence[:-1]

    # ------------------------------------------------------------------ stepping

    def run(
        self, tick: int, report: Callable[[Request], None], interrupted: Callable[[int], bool]
    ) -> Generator[None, None, None]:
        """``tick`` tokens for every lane, or as many as it takes; newcomers can only be admitted between two runs. Pauses
        (yields) where requests were done, so that whoever drives it can serve them first. ``interrupted``: whether to stop after
        so many steps."""
        done = 0
        while self.running and done < tick and not interrupted(done):
            done += yield from self._stretch(tick - done, report, interrupted)
            if self.network.graphs is not None:  # its stretches end when somebody can be admitted
                break

    def _stretch(
        self, tick: int, report: Callable[[Request], None], interrupted: Callable[[int], bool]
    ) -> Generator[None, None, int]:
        """Step an unchanging set of rows until enough lanes are dead to be worth closing ranks. A decoder that draws ahead is
        told so, and what it has drawn by then is not thrown away; it goes on beyond the tick while everybody lives: nobody's
        place could be taken."""
        began, lanes = time.perf_counter(), self.running
        ahead, few, died = self.network.graphs is not None, False, False
        steps = min(HISTORY if ahead else tick, max(r.budget - r.sampled for r in lanes))
        watch = [i for i, r in enumerate(lanes) if r.sampling.stop]
        due: dict[int, list[int]] = {}
        for i, request in enumerate(lanes):
            due.setdefault(request.budget - request.sampled - 1, []).append(i)
        enough = lambda launched: few or interrupted(launched) or (died and launched >= tick)  # noqa: E731
        drawing = self._ahead(steps, enough) if ahead else self._one_by_one(steps)
        self._history, step = [], 0
        for drawn, logp, mass in drawing:
            self._history.append((drawn, logp, mass))
            ended = self._ended(drawn, due.get(step, ()), watch)
            step += 1
            if ended:
                self._finish(ended, report)
                died = True
                few = sum(r.stop is None for r in lanes) <= (THIN_AHEAD if ahead else THIN) * len(lanes)
                if few and not ahead:
                    break
            if pause := ahead and len(self._history) >= min(tick, HANDFUL):  # a GPU draws on meanwhile
                self._collect_living()
            if ended or pause:
                self.seconds += time.perf_counter() - began
                yield
                began = time.perf_counter()
            if interrupted(step) and not ahead:
                break
        self._close_ranks()
        self.count["steps"] += step
        self.count["lane_steps"] += step * len(lanes)
        self.seconds += time.perf_counter() - began
        yield
        return step

    def _one_by_one(self, steps: int) -> Iterator[tuple[list[int], Tensor, Tensor | None]]:
        """What every lane draws, step by step: ids, log-probabilities, kept mass. On a GPU the host looks at several steps at
        once: a look at each would stop the GPU as often."""
        lanes, device = self.running, self.slots.device
        layout = Stepping(self.slots, [len(r.sequence) - 1 for r in lanes], steps)
        sampler = Sampler([r.sampling for r in lanes], device)
        seed, position = (
            torch.tensor(x, device=device) for x in ([r.seed for r in lanes], [len(r.sequence) for r in lanes])
        )
        u = uniforms(seed, position + torch.arange(steps, device=device)[:, None])  # [steps, n]
        tokens = torch.tensor([r.sequence[-1] for r in lanes], device=device)
        block = 1 if device.type == "cpu" else BLOCK
        for begin in range(0, steps, block):
            found = []
            for step in range(begin, min(steps, begin + block)):
                tokens, logp, mass = sampler(self.network.step(tokens, layout), u[step])
                found.append((tokens, logp, mass))
                layout.advance()
            for ids, (_, logp, mass) in zip(torch.stack([x[0] for x in found]).tolist(), found):
                yield ids, logp, mass

    def _ahead(self, steps: int, enough: Callable[[int], bool]) -> Iterator[tuple[list[int], Tensor, Tensor | None]]:
        """The same, drawn by a decoder that needs no host; lanes that end in between ride along."""
        lanes, graphs = self.running, self.network.graphs
        assert graphs is not None
        cuts = [(r.sampling.top_k, r.sampling.top_p, r.sampling.min_p) for r in lanes]
        return graphs.run(
            steps,
            [r.sequence[-1] for r in lanes],
            [len(r.sequence) - 1 for r in lanes],
            [r.seed for r in lanes],
            [r.sampling.temperature for r in lanes],
            cuts if any(_cuts(r.sampling) for r in lanes) else None,
            enough,
            self._alike(),
        )

    def _alike(self) -> list[int]:
        """How many first columns of its row each lane has in common with the lane before it."""
        every = [r.sequence for r in self.running]
        return [0, *(min(common(a, b), len(a) - 1, len(b) - 1) for a, b in pairwise(every))]

    def _ended(self, drawn: list[int], due: Sequence[int], watch: Sequence[int]) -> dict[int, Stop]:
        """Lanes that are done after this token, and why. A stop id wins over a string, a string over a limit."""
        ended = {i: Stop.LENGTH for i in due if self.running[i].stop is None}
        for i in watch:
            if self.running[i].stop is None and self._says_stop(i):
                ended[i] = Stop.STRING
        if not self.stop_ids.isdisjoint(drawn):
            for i, token in enumerate(drawn):
                if token in self.stop_ids and self.running[i].stop is None:
                    ended[i] = Stop.TOKEN
        return ended

    def _says_stop(self, lane: int) -> bool:
        """Does the decoded tail hold a stop string that the last token completed?"""
        assert self.decode is not None
        request = self.running[lane]
        # every token carries at least a byte, so these tokens cover the string and some context before it
        size = TAIL + max(len(string.encode()) for string in request.sampling.stop)
        before = request.sequence[max(request.given, len(request.sequence) - size) :]
        text = self.decode([*before, *(drawn[lane] for drawn, _, _ in self._history[-size:])][-size:])
        return any(string in text for string in request.sampling.stop)

    # ------------------------------------------------------------------ handing out

    def _collect(self, lanes: Sequence[int]) -> None:
        """Move what these lanes sampled in this stretch from the history into their requests."""
        drawn = list(zip(*(h[0] for h in self._history)))
        mine = lambda rows: torch.stack(rows)[:, lanes].T.tolist()  # noqa: E731
        logp = mine([h[1] for h in self._history])
        mass = mine([h[2] for h in self._history]) if self._history[0][2] is not None else None
        size = len(self._history)
        none, version = [0.0] * size, [self.version] * size
        for at, lane in enumerate(lanes):
            request = self.running[lane]
            request.sequence.extend(drawn[lane])
            request.logp.extend(logp[at])
            request.mass.extend(none if mass is None else mass[at])
            request.version.extend(version)
            self.slots.held[_row(request)] = request.sequence[:-1]
        self.count["tokens"] += size * len(lanes)

    def _finish(self, ended: dict[int, Stop], report: Callable[[Request], None]) -> None:
        self._collect(list(ended))
        for lane, stop in ended.items():
            self.running[lane].stop = stop
            report(self.running[lane])

    def _collect_living(self) -> None:
        living = [i for i, r in enumerate(self.running) if r.stop is None]
        if living and self._history:
            self._collect(living)
        self._history = []

    def _close_ranks(self) -> None:
        """Collect from the living, drop the dead and move the living together."""
        self._collect_living()
        self.drop(lambda r: r.stop is not None)

    def drop(self, gone: Callable[[Request], bool]) -> list[Request]:
        """Take requests out of their lanes between two runs; their rows keep the KV."""
        out = [r for r in self.running if gone(r)]
        if out:
            self.running = [r for r in self.running if not gone(r)]
            self.slots.arrange([r.seat for r in self.running])
            self.running.sort(key=_row)
        return out


def _cuts(sampling: Sampling) -> bool:
    return not (sampling.whole or sampling.greedy)


def _row(request: Request) -> int:
    assert request.seat.row is not None
    return request.seat.row


def common(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:  # by halves: slices compare faster than a loop
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
