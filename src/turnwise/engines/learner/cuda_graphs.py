"""The layers of a decoder captured as CUDA graphs, forward and backward: a pass costs the host two launches, not a thousand.

A graph has fixed sizes, so rows, keys and sequences are padded up to buckets. Padded rows are sequences of their own that nobody
asks anything of: their gradient is zero. Real runs hardly have the same sizes twice, and a capture costs as much as many passes:
the first graphs are of coarse sizes, which passes a little smaller borrow; sizes that come often get one of their own. All graphs
share one pool of memory, which is right because a backward pass follows its own forward pass before another begins; whoever
breaks that rule is read without.
A learner that adds up gradients (``blocks.adding``) has the graphs do it: no copy of them is made on the way.

Knows blocks and layouts; neither what the states are for nor who asks.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from turnwise.engines.learner.varlen_attention import Ragged
from turnwise.maths.numbers import at_least

log = logging.getLogger(__name__)

ROWS = [2**k * eighths // 8 for k in range(8, 24) for eighths in range(8, 16)]  # sizes of buckets: rows cost time ...
COARSE = [2**k * eighths // 8 for k in range(8, 24) for eighths in (8, 10, 13)]
KEYS = [2**k for k in range(8, 24)]  # ... the others next to none
SEQUENCES = [4**k for k in range(3, 10)]
LONGEST = [2**k for k in range(9, 24)]
SLACK = 1.26  # times the rows of its bucket may a pass borrow a graph of ...
OFTEN = 16  # ... until it has come so often


class Key(NamedTuple):
    """One bucket. ``keys`` 0: every sequence has its own rows for keys; ``grad``: with a backward pass."""

    rows: int
    keys: int
    sequences: int
    longest: tuple[int, int]
    kind: torch.dtype
    grad: bool

    @property
    def sizes(self) -> list[int]:
        """Of what a pass is given: ids, positions, where queries and keys begin, whose copies the keys are."""
        return [self.rows, self.rows, self.sequences + 1, self.sequences + 1, self.keys]


Read = Callable[[Tensor, Tensor, Ragged, Mapping[Tensor, Tensor]], Tensor]
"""ids [L], positions [L], layout, what stands for each of the weights -> states [L, d]."""


class Body:
    """Reads a decoder by graphs where it can. ``read`` must launch kernels only: no host may look at a tensor in it."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.weights: list[Tensor] = list(weights)
        self.parameters = [p for p in weights if p.requires_grad]
        self.seen: Counter[Key] = Counter()
        self.rehearsed: set[tuple[torch.dtype, bool, bool]] = set()
        self.graphs: dict[Key, _Graph] = {}
        self.pool: Any = None
        self.grads: list[Tensor] = []  # of the parameters, to which every graph adds
        self.adds = False  # whether these are the parameters' own, or what autograd is to hand on
        self.works = True
        self._pending: Callable[[], object | None] = lambda: None  # of the last forward pass with a gradient

    def __call__(self, read: Read, kind: torch.dtype, ids: Tensor, position: Tensor, layout: Ragged) -> Tensor | None:
        """States [L, d]; None: read it yourself."""
        grad = torch.is_grad_enabled() and bool(self.parameters)
        key = self._key(ids, layout, kind, grad)
        self.seen[key] += 1
        if not self.works or self._pending() is not None:
            return None
        graph = self.graphs.get(key) or self._borrowed(key, len(ids), layout)
        if graph is None:
            key = key if self.seen[key] >= OFTEN else self._key(ids, layout, kind, grad, COARSE)
            if not self._capture(key, read, next(iter(self.weights), ids).device):
                return None
            graph = self.graphs[key]
        graph.fill(ids, position, layout)
        if not grad:
            graph.forward.replay()
            return graph.out[: len(ids)].clone()
        token = _Token()
        self._pending = weakref.ref(token)
        return _Replay.apply(graph, token, len(ids), *self.parameters)

    @contextmanager
    def adding(self) -> Iterator[None]:
        self.adds = True
        try:
            yield
        finally:
            self.adds = False

    def gradients(self, replay: Callable[[], None]) -> Sequence[Tensor | None]:
        """What a backward pass gives to each parameter; nothing where it was added to the parameter's own already."""
        if not self.adds:
            before = [g.clone() for g in self.grads]  # somebody may be adding up in them
            torch._foreach_zero_(self.grads)
            replay()
            found = [g.clone() for g in self.grads]
            torch._foreach_copy_(self.grads, before)
            return found
        new = []
        for p, own in zip(self.parameters, self.grads):
            if p.grad is None:
                new.append(own)
            elif p.grad is not own:
                own.copy_(p.grad)
            p.grad = own
        if new:
            torch._foreach_zero_(new)
        replay()
        return [None] * len(self.grads)

    def _key(self, ids: Tensor, layout: Ragged, kind: torch.dtype, grad: bool, sizes: Sequence[int] = ROWS) -> Key:
        rows, longest = at_least(sizes, len(ids)), at_least(LONGEST, max(layout.longest))
        keys, sequences = _needs(layout, rows - len(ids), longest)
        return Key(rows, keys and at_least(KEYS, keys), at_least(SEQUENCES, sequences), (longest, longest), kind, grad)

    def _borrowed(self, key: Key, n: int, layout: Ragged) -> _Graph | None:
        """The smallest graph that has room for n rows of this layout, unless it would waste too much, too often."""
        if self.seen[key] >= OFTEN:
            return None
        for other in sorted(self.graphs, key=lambda k: k[:4]):
            alike = (other.kind, other.grad, bool(other.keys)) == (key.kind, key.grad, bool(key.keys))
            if alike and key.rows <= other.rows <= SLACK * key.rows and other.longest >= key.longest:
                keys, sequences = _needs(layout, other.rows - n, other.longest[0])
                if keys <= other.keys and sequences <= other.sequences:
                    return self.graphs[other]
        return None

    def _capture(self, key: Key, read: Read, device: torch.device) -> bool:
        """Rehearsed where nothing like it was: whatever is compiled or loaded then, others find. If one misses something all the
        same, it is rehearsed after all."""
        like = (key.kind, key.grad, bool(key.keys))
        for rehearse in (True,) if like not in self.rehearsed else (False, True):
            try:
                self.graphs[key] = _Graph(key, self, read, device, rehearse)
                self.rehearsed.add(like)
                return True
            except (RuntimeError, torch.AcceleratorError) as fault:  # an old driver, too little memory ...
                why = str(fault).splitlines()[0]
                log.debug("no graph of %s%s: %s", key, "" if rehearse else " unrehearsed", why)
        self.works = False
        log.warning("the learner reads without CUDA graphs from now on: %s", why)
        return False


class _Token:
    """Lives as long as a forward pass waits for its backward pass."""


class _Graph:
    def __init__(self, key: Key, body: Body, read: Read, device: torch.device, rehearse: bool) -> None:
        self.key, self.body = key, weakref.proxy(body)
        self.flat = torch.zeros(sum(key.sizes), dtype=torch.int64, device=device)
        self.spent, self.turn = False, 0  # whether a backward pass used it up; how many forward passes there were
        first = torch.arange(min(key.rows, key.longest[0]))
        ends = torch.tensor([0, len(first)])
        self.fill(
            torch.zeros_like(first), first, Ragged(ends, ends, key.longest, first if key.keys else None, len(first))
        )
        if rehearse:
            self._rehearse(read)
            torch.cuda.empty_cache()  # what it leaves a graph's pool cannot use, and it is as large
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward, pool=body.pool, capture_error_mode="thread_local"):
            out, leaves = self._read(read)
        body.pool = body.pool or self.forward.pool()
        self.out = out.detach()
        if key.grad:
            self.d_out = torch.zeros_like(self.out)
            body.grads = body.grads or [torch.zeros_like(p) for p in body.parameters]
            with torch.cuda.graph(self.backward, pool=body.pool, capture_error_mode="thread_local"):
                torch._foreach_add_(body.grads, torch.autograd.grad(out, leaves, self.d_out))

    def _read(self, read: Read) -> tuple[Tensor, list[Tensor]]:
        """The states, and the leaves to differentiate by: the parameters themselves may still be part of another pass."""
        own = {p: p.detach().requires_grad_(p.requires_grad) for p in self.body.weights}
        return read(*self.given(), own), [own[p] for p in self.body.parameters]

    def given(self) -> tuple[Tensor, Tensor, Ragged]:
        """What was last filled in: ids, positions, layout."""
        ids, position, queries, keys, source = self.flat.split(self.key.sizes)
        copied = source if self.key.keys else None
        return ids, position, Ragged(queries.int(), keys.int(), self.key.longest, copied, self.key.rows)

    def _rehearse(self, read: Read) -> None:
        """Once without a graph, on a stream of its own: kernels are compiled, libraries take their workspaces."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out, leaves = self._read(read)
            if self.key.grad:
                torch.autograd.grad(out, leaves, torch.zeros_like(out))
        torch.cuda.current_stream().wait_stream(side)

    def fill(self, ids: Tensor, position: Tensor, layout: Ragged) -> None:
        """A batch of this bucket, and the padding that makes it whole: put together on the host and sent as one, since every word
        to a GPU takes the host longer than a thousand numbers."""
        n, pads, longest = len(ids), self.key.rows - len(ids), self.key.longest[0]
        here = torch.zeros(len(self.flat), dtype=torch.int64, pin_memory=self.flat.is_cuda)
        *rows, queries, keys, source = here.split(self.key.sizes)
        for into, value in zip(rows, (ids, position)):
            into[:n] = value
        ends = torch.arange(1, -(-pads // longest) + 1).mul_(longest).clamp_(max=pads)  # of the padding's own sequences
        for into, value in ((queries, layout.queries.cpu()), (keys, layout.keys.cpu())):
            given, whole = len(value), len(value) + len(ends)
            into[:given] = value
            into[given:whole] = ends + value[-1]
            into[whole:] = value[-1] + pads
        if layout.source is not None:  # each row of the padding has one copy; keys beyond those are nobody's
            m = len(layout.source)
            source[:m] = layout.source
            source[m : m + pads] = torch.arange(n, n + pads)
        self.flat.copy_(here, non_blocking=True)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _Graph, token: _Token, rows: int, *parameters: Tensor) -> Tensor:
        graph.forward.replay()
        graph.spent, graph.turn = False, graph.turn + 1
        ctx.graph, ctx.token, ctx.rows, ctx.turn = graph, token, rows, graph.turn
        return graph.out[:rows].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Any, ...]:
        graph: _Graph = ctx.graph
        assert graph.turn == ctx.turn, "another forward pass came before this second backward pass"
        if graph.spent:  # asked a second time: the first backward pass wrote over what the forward pass had kept
            graph.forward.replay()
        graph.d_out[: ctx.rows] = d
        graph.d_out[ctx.rows :] = 0
        found = graph.body.gradients(graph.backward.replay)
        graph.spent = True
        ctx.token = None  # the next forward pass may come, unless this one is still held for another backward pass
        return None, None, None, *found


def _needs(layout: Ragged, pads: int, longest: int) -> tuple[int, int]:
    """Keys (0: those of its own rows) and ends of sequences, with so many rows of padding."""
    keys = 0 if layout.source is None else len(layout.source) + pads
    return keys, len(layout.queries) + -(-pads // longest)
