"""The running requests, one batch lane per cache row: admit, decode, detect stops, deliver sampled tokens, compact.

Reports finished requests only through the callback ``report``. Knows requests and the KV cache; neither threads nor the event
loop.
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
from turnwise.engines.generator.attention_layouts import DecodeLayout
from turnwise.engines.generator.cuda_graphs import MAX_STEPS
from turnwise.engines.generator.kv_cache import CacheSlot, PrefillChunk, common_prefix_length
from turnwise.engines.generator.logit_shift import LaneShifts, LogitShift, Steering, Tempering
from turnwise.engines.generator.model_runner import Runner
from turnwise.engines.grammar import GrammarState, LaneMasks
from turnwise.engines.kernels.sampling import TokenSampler, kept_bytes, uniforms

COUNTS = (
    "tokens", "steps", "lane_steps", "prefill_tokens", "prefix_hits", "shared_tokens", "recomputed_tokens", "admissions",
    "publishes", "patience_timeouts", "preemptions",
)  # fmt: skip
COMPACT_BELOW = 7 / 8  # share of running lanes at which the batch is compacted, where it can be after any step ...
COMPACT_BELOW_GRAPHS = 3 / 4  # ... and where further decode steps are already in flight
DELIVER_EVERY = 32  # decode steps after which tokens from a GPU are delivered and the event loop runs
EAGER_SYNC_EVERY = 8  # decode steps between two copies to the host on a GPU without CUDA graphs
STOP_MARGIN = 8  # tokens decoded before the length of the stop string, so that no word boundary hides it

Certainty = tuple[Tensor, Tensor]  # entropy and confidence of each lane
Truncated = tuple[Tensor, Tensor]  # log of the kept mass [n], and the kept ids as ``kept_ids`` returns them
StepOutput = tuple[list[int], Tensor, Truncated | None, Certainty | None]
"""One decode step of all lanes: ids, log-probabilities [n], what was kept if any lane truncates, entropies [n] if any lane asks
for them."""


@dataclass(eq=False, slots=True)
class Request:
    """One turn to sample. ``sequence``: all ids so far, of which the first ``prompt_length`` are the prompt."""

    cache_slot: CacheSlot
    seed: int
    sequence: list[int]
    prompt_length: int
    sampling: Sampling
    budget: int  # tokens it may sample: its own limit or what the context leaves
    future: Any
    logp: list[float] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    kept_sets: list[bytes] = field(default_factory=list)  # ids kept at every token; empty where nothing truncates
    routes: list[bytes] = field(default_factory=list)  # experts at every position fed so far; empty without routers
    stop: Stop | None = None
    cancelled: bool = False
    shift: LogitShift | Steering | Tempering | None = None  # sampled by shifted log-probabilities
    grammar: GrammarState | None = None  # after all tokens that were sampled
    started: float = field(default_factory=time.perf_counter)
    held_before: float = 0.0  # seconds for which the generator had waited for other sessions when it came

    @property
    def sampled(self) -> int:
        return len(self.sequence) - self.prompt_length


class Scheduler:
    def __init__(
        self, model_runner: Runner, stop_ids: Sequence[int], decode: Callable[[list[int]], str] | None
    ) -> None:
        self.model_runner, self.kv_cache = model_runner, model_runner.kv_cache
        self.stop_ids = frozenset(stop_ids)
        self.decode = decode
        self.version = 0
        self.running: list[Request] = []
        self.count: Counter[str] = Counter()
        self.seconds = 0.0
        self._undelivered: list[StepOutput] = []
        config = model_runner.model.config
        self.vocabulary = int(config.get_text_config().vocab_size)
        self.has_values = model_runner.model.get_output_embeddings().weight.shape[0] > self.vocabulary

    def stats(self) -> dict[str, float]:
        rate = self.count["tokens"] / self.seconds if self.seconds else 0.0
        fast = float(self.model_runner.decoder is not None)
        passes = float(self.count["steps"] + self.model_runner.prefills)
        derived = {"seconds": self.seconds, "tokens_per_second": rate, "decoder": fast, "forward_passes": passes}
        return {name: float(self.count[name]) for name in COUNTS} | derived

    # ------------------------------------------------------------------ batch composition

    def admit(self, requests: Sequence[Request]) -> None:
        """Give waiting requests rows beside the running ones and prefill what their rows do not hold yet. Those without room for
        their KV wait on."""
        self.count["admissions"] += 1
        running = [r.cache_slot for r in self.running]
        plan = self.kv_cache.admit(running, [(r.cache_slot, r.sequence[:-1]) for r in requests])
        admitted = requests[: plan.admitted]
        for request in admitted:
            request.cache_slot.last_used = self.count["admissions"]
        self.count["prefix_hits"] += plan.cached
        self.count["shared_tokens"] += plan.shared
        for chunks in plan.rounds:
            self.count["prefill_tokens"] += self.model_runner.prefill(chunks)
        self.kv_cache.copy_blocks(plan.copies)
        self.running = sorted([*self.running, *admitted], key=_row)

    def recompute(self, version: int) -> None:
        """After a weight update, recompute the KV of every running row under the new policy."""
        self.version = version
        self.count["publishes"] += 1
        if self.kv_cache.table is not None:  # admitted again, rows share the pages of their prefixes again
            self.count["recomputed_tokens"] += sum(len(r.sequence) - 1 for r in self.running)
            self.remove(lambda r: True)
            return
        chunks = [PrefillChunk(_row(r), 0, r.sequence[:-1]) for r in self.running if len(r.sequence) > 1]
        if chunks:
            self.count["recomputed_tokens"] += self.model_runner.prefill(chunks)
        for request in self.running:
            self.kv_cache.cached_ids[_row(request)] = request.sequence[:-1]

    # ------------------------------------------------------------------ decoding

    def run(
        self, tick: int, report: Callable[[Request], None], interrupted: Callable[[int], bool]
    ) -> Generator[None, None, None]:
        """Decode ``tick`` tokens per lane, or fewer if all finish; requests are admitted only between two runs. Yields when
        requests finish, so that the executor can resolve them first. ``interrupted``: whether to stop after so many steps."""
        done = 0
        while self.running and done < tick and not interrupted(done):
            done += yield from self._decode_batch(tick - done, report, interrupted)
            if self.model_runner.graphs is not None:  # its batches end when a request can be admitted
                break

    def _decode_batch(
        self, tick: int, report: Callable[[Request], None], interrupted: Callable[[int], bool]
    ) -> Generator[None, None, int]:
        """Decode a fixed set of rows until enough lanes have finished to make compaction worthwhile. With CUDA graphs the decoder
        then stops launching, and tokens already in flight are kept. It decodes beyond the tick as long as every lane runs:
        no row could be reassigned anyway."""
        began = time.perf_counter()
        # graphs keep their logits on the GPU
        needs_logits = self.has_values or any(
            r.sampling.entropy or r.shift is not None or r.grammar is not None for r in self.running
        )
        graphs, compact, any_finished = self.model_runner.graphs is not None and not needs_logits, False, False
        steps = self._hold_columns(MAX_STEPS if graphs else tick, tick)
        lanes = self.running
        with_stop_strings = [i for i, r in enumerate(lanes) if r.sampling.stop]
        due: dict[int, list[int]] = {}  # lanes that reach their budget, by step
        for i, request in enumerate(lanes):
            due.setdefault(request.budget - request.sampled - 1, []).append(i)
        should_stop = lambda n: compact or interrupted(n) or (any_finished and n >= tick)  # noqa: E731
        outputs = self._replay_graphs(steps, should_stop) if graphs else self._decode_eagerly(steps)
        self._undelivered, step = [], 0
        for output in outputs:
            self._undelivered.append(output)
            finished = self._finished_lanes(output[0], due.get(step, ()), with_stop_strings)
            step += 1
            self.count["steps"] += 1  # at once: whoever looks from outside sees that a slow model still decodes
            if finished:
                self._deliver(list(finished))
                for lane, stop in finished.items():
                    lanes[lane].stop = stop
                    report(lanes[lane])
                any_finished = True
                threshold = (COMPACT_BELOW_GRAPHS if graphs else COMPACT_BELOW) * len(lanes)
                compact = sum(r.stop is None for r in lanes) <= threshold
                if compact and not graphs:
                    break
            if pause := graphs and len(self._undelivered) >= min(tick, DELIVER_EVERY):  # the GPU decodes on meanwhile
                self._deliver_running()
            if finished or pause:
                self.seconds += time.perf_counter() - began
                yield
                began = time.perf_counter()
            if interrupted(step) and not graphs:
                break
        self._deliver_running()
        self.remove(lambda r: r.stop is not None)
        self.count["lane_steps"] += step * len(lanes)
        self.seconds += time.perf_counter() - began
        yield
        return step

    def _hold_columns(self, steps: int, tick: int) -> int:
        """Make room in the cache for so many decode steps, or for fewer; return how many. Up to a tick idle dialogues give up
        their KV for it. Where there is no room for one step, the youngest request leaves the batch and is admitted again."""
        steps = min(steps, max(r.budget - r.sampled for r in self.running))
        while True:
            growths = [(len(r.sequence) - 1, min(steps, r.budget - r.sampled)) for r in self.running]
            if self.kv_cache.hold(growths, evict=steps <= tick):
                return steps
            if steps > 1:
                steps //= 2
                continue
            youngest = max(self.running, key=lambda r: (r.cache_slot.last_used, r.cache_slot.order))
            self.count["preemptions"] += 1
            self.remove(lambda r: r is youngest)  # noqa: B023

    def _decode_eagerly(self, steps: int) -> Iterator[StepOutput]:
        """Decode step by step. On a GPU tokens are copied to the host every ``EAGER_SYNC_EVERY`` steps: each copy waits for the
        GPU."""
        lanes, device = self.running, self.kv_cache.device
        layout = DecodeLayout(self.kv_cache, [len(r.sequence) - 1 for r in lanes], steps)
        sampler = TokenSampler([r.sampling for r in lanes], device)
        seed, position = torch.tensor([[r.seed for r in lanes], [len(r.sequence) for r in lanes]], device=device)
        u = uniforms(seed, position + torch.arange(steps, device=device)[:, None])  # [steps, n]
        tokens = torch.tensor([r.sequence[-1] for r in lanes], device=device)
        shifts, masks = LaneShifts(lanes, self.vocabulary), LaneMasks(lanes, self.vocabulary, device)
        # what comes next depends on the token, which a grammar reads on the host
        block = 1 if device.type == "cpu" or shifts or masks else EAGER_SYNC_EVERY
        wants_entropy = any(r.sampling.entropy for r in lanes)
        for begin in range(0, steps, block):
            outputs = []
            for step in range(begin, min(steps, begin + block)):
                logits = shifts.apply(self.model_runner.decode_step(tokens, layout))
                # a GPU computes the logits meanwhile
                tokens, logp, mass = sampler(logits, u[step], masks.allowed() if masks else None)
                shifts.append(tokens)
                if masks:
                    masks.append(tokens.tolist())
                truncated = None if mass is None or sampler.kept is None else (mass, sampler.kept)
                outputs.append((tokens, logp, truncated, sampler.certainty(logits) if wants_entropy else None))
                layout.advance()
            for ids, output in zip(torch.stack([x[0] for x in outputs]).tolist(), outputs):
                yield ids, *output[1:]

    def _replay_graphs(self, steps: int, should_stop: Callable[[int], bool]) -> Iterator[StepOutput]:
        """The same by a decoder that samples on the GPU; lanes that finish in between stay in the batch."""
        lanes, decoder = self.running, self.model_runner.graphs
        assert decoder is not None
        truncations = [(r.sampling.top_k, r.sampling.top_p, r.sampling.min_p) for r in lanes]
        # how many leading columns each lane's row has in common with the row of the lane before it
        pairs = pairwise(r.sequence for r in lanes)
        common_prefixes = [0, *(min(common_prefix_length(a, b), len(a) - 1, len(b) - 1) for a, b in pairs)]
        outputs = decoder.decode_steps(
            steps,
            [r.sequence[-1] for r in lanes],
            [len(r.sequence) - 1 for r in lanes],
            [r.seed for r in lanes],
            [r.sampling.temperature for r in lanes],
            truncations if any(_truncates(r.sampling) for r in lanes) else None,
            should_stop,
            common_prefixes,
        )
        return ((*output, None) for output in outputs)

    def _finished_lanes(
        self, tokens: list[int], due: Sequence[int], with_stop_strings: Sequence[int]
    ) -> dict[int, Stop]:
        """Lanes that finish with this token, and why. A stop id takes precedence over a string, a string over a limit."""
        finished = {i: Stop.LENGTH for i in due if self.running[i].stop is None}
        for i in with_stop_strings:
            request, strings = self.running[i], self.running[i].sampling.stop
            if request.stop is None:
                assert self.decode is not None
                # every token carries at least one byte, so these tokens cover the string and some context before it
                size = STOP_MARGIN + max(len(string.encode()) for string in strings)
                before = request.sequence[max(request.prompt_length, len(request.sequence) - size) :]
                text = self.decode([*before, *(output[0][i] for output in self._undelivered[-size:])][-size:])
                if any(string in text for string in strings):
                    finished[i] = Stop.STRING
        if not self.stop_ids.isdisjoint(tokens):
            for i, token in enumerate(tokens):
                if token in self.stop_ids and self.running[i].stop is None:
                    finished[i] = Stop.TOKEN
        return finished

    # ------------------------------------------------------------------ delivery

    def _deliver(self, lanes: Sequence[int]) -> None:
        """Append the undelivered tokens of these lanes to their requests."""
        outputs = self._undelivered
        tokens = list(zip(*(o[0] for o in outputs)))
        select = lambda rows: torch.stack(rows)[:, lanes].T.tolist()  # noqa: E731
        logp = select([o[1] for o in outputs])
        truncated = [o[2] for o in outputs if o[2] is not None]
        stacked = [torch.stack(rows)[:, lanes].transpose(0, 1).cpu() for rows in zip(*truncated)]
        mass, kept_rows = stacked or (None, None)
        measured = [o[3] for o in outputs if o[3] is not None]
        certainty = [select(list(rows)) for rows in zip(*measured)] if len(measured) == len(outputs) else None
        size = len(outputs)
        no_mass, version = [0.0] * size, [self.version] * size
        for index, lane in enumerate(lanes):
            request = self.running[lane]
            request.sequence.extend(tokens[lane])
            request.logp.extend(logp[index])
            request.mass.extend(no_mass if mass is None else mass[index].tolist())
            if kept_rows is not None and _truncates(request.sampling):
                request.kept_sets.extend(kept_bytes(kept_rows[index]))
            request.version.extend(version)
            if certainty is not None and request.sampling.entropy:
                request.entropy.extend(certainty[0][index])
                request.confidence.extend(certainty[1][index])
            self.kv_cache.cached_ids[_row(request)] = request.sequence[:-1]
        requests = [self.running[lane] for lane in lanes]
        spans = [(_row(r), len(r.routes), len(r.sequence) - 1) for r in requests]
        for request, routes in zip(requests, self.model_runner.read_routes(spans)):
            request.routes += routes
        self.count["tokens"] += size * len(lanes)

    def _deliver_running(self) -> None:
        unfinished = [i for i, r in enumerate(self.running) if r.stop is None]
        if unfinished and self._undelivered:
            self._deliver(unfinished)
        self._undelivered = []

    def remove(self, condition: Callable[[Request], bool]) -> None:
        """Take requests out of the batch between two runs and move the remaining rows together; rows that leave keep their KV."""
        remaining = [r for r in self.running if not condition(r)]
        if len(remaining) < len(self.running):
            self.running = remaining
            self.kv_cache.assign_rows([r.cache_slot for r in remaining])
            self.running.sort(key=_row)


def _truncates(sampling: Sampling) -> bool:
    return not (sampling.whole or sampling.greedy)


def _row(request: Request) -> int:
    assert request.cache_slot.row is not None
    return request.cache_slot.row
