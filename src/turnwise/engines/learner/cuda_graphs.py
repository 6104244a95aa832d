"""A decoder's layers captured as CUDA graphs, forward and backward: a pass costs the host two launches instead of a thousand.

A graph has fixed shapes, so rows, keys and sequences are padded up to buckets. Padding rows form sequences of their own whose
output gradient is zero. Real runs rarely repeat a shape, and one capture costs as much as many passes: the first graphs have
coarse buckets, which slightly smaller passes reuse, and a frequent bucket gets a dedicated graph. All graphs share one memory
pool. That is safe because a backward pass follows its forward pass before the next one starts; a pass that breaks this order
runs without a graph. Inside ``accumulating_gradients`` the graphs add directly into the parameters' gradients, without a copy.

Knows layers and layouts; knows neither what the states are for nor who needs them.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from turnwise.engines import capture, compat
from turnwise.engines.capture import GraphCapture
from turnwise.engines.learner.layouts import VarlenAttention
from turnwise.maths.numbers import first_at_least

log = logging.getLogger(__name__)

# Padding rows cost time, so their buckets are fine; padding in the other dimensions costs almost nothing.
ROW_BUCKETS = [2**k * eighths // 8 for k in range(8, 24) for eighths in range(8, 16)]
COARSE_ROW_BUCKETS = [2**k * eighths // 8 for k in range(8, 24) for eighths in (8, 10, 13)]
KEY_BUCKETS = [2**k for k in range(8, 24)]
SEQUENCE_BUCKETS = [4**k for k in range(3, 10)]
LENGTH_BUCKETS = [2**k for k in range(9, 24)]
MAX_ROW_RATIO = 1.26  # a pass may reuse a graph with up to this many times the rows of its own bucket ...
DEDICATED_AFTER = 16  # ... until its bucket has occurred this often


PassKind = tuple[torch.dtype, bool]
"""What a graph computes besides its shape: the compute dtype, and whether adapters are applied."""


class GraphBucket(NamedTuple):
    """The shape of a graph. ``keys`` 0: no shared prefixes, key i is row i. ``grad``: with a backward graph."""

    rows: int
    keys: int
    sequences: int
    max_seqlen: tuple[int, int]
    kind: PassKind
    grad: bool

    @property
    def input_sizes(self) -> list[int]:
        """Sizes of the inputs: ids, positions, cumulative lengths of queries and of keys, source rows of the keys."""
        return [self.rows, self.rows, self.sequences + 1, self.sequences + 1, self.keys]


LayersForward = Callable[[Tensor, Tensor, VarlenAttention, Mapping[Tensor, Tensor]], Tensor]
"""ids [L], positions [L], layout, the tensor to use for each weight -> states [L, d]."""


class CapturedLayers:
    """Runs a decoder's layers by CUDA graphs where possible. ``forward`` may only launch kernels: no host-device sync."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.weights: list[Tensor] = list(weights)
        self.parameters = [p for p in weights if p.requires_grad]
        self.bucket_counts: Counter[GraphBucket] = Counter()
        self.graphs: dict[GraphBucket, _Graph] = {}
        self.capture = GraphCapture()
        self.grads: list[Tensor] = []  # one per parameter; every backward graph adds to them
        self.accumulates = False  # True: ``grads`` are the parameters' .grad; False: autograd gets copies of them
        self.enabled = True
        self._pending: Callable[[], object | None] = lambda: None  # weak reference to an outstanding forward pass

    def __call__(
        self, forward: LayersForward, kind: PassKind, ids: Tensor, position: Tensor, layout: VarlenAttention
    ) -> Tensor | None:
        """States [L, d]; None: no graph can be used, run the layers without one."""
        grad = torch.is_grad_enabled() and bool(self.parameters)
        bucket = self._bucket(ids, layout, kind, grad)
        self.bucket_counts[bucket] += 1
        if not self.enabled or self._pending() is not None:
            return None
        graph = self.graphs.get(bucket) or self._reusable_graph(bucket, len(ids), layout)
        if graph is None:
            if self.bucket_counts[bucket] < DEDICATED_AFTER:
                bucket = self._bucket(ids, layout, kind, grad, COARSE_ROW_BUCKETS)
            if not self._capture(bucket, forward, next(iter(self.weights), ids).device):
                return None
            graph = self.graphs[bucket]
        graph.stage_inputs(ids, position, layout)
        if not grad:
            graph.forward.replay()
            return graph.out[: len(ids)].clone()
        pending = _PendingBackward()
        self._pending = weakref.ref(pending)
        return _Replay.apply(graph, pending, len(ids), *self.parameters)

    def gradients(self, replay: Callable[[], None]) -> Sequence[Tensor | None]:
        """Run a backward graph. Returns the gradient of each parameter; None where it went into the parameter's .grad."""
        if not self.accumulates:
            saved = [g.clone() for g in self.grads]  # they may hold a running sum
            compat.foreach_zero_(self.grads)
            replay()
            gradients = [g.clone() for g in self.grads]
            compat.foreach_copy_(self.grads, saved)
            return gradients
        new = []
        for p, buffer in zip(self.parameters, self.grads):
            if p.grad is None:
                new.append(buffer)
            elif p.grad is not buffer:
                buffer.copy_(p.grad)
            p.grad = buffer
        if new:
            compat.foreach_zero_(new)
        replay()
        return [None] * len(self.grads)

    def _bucket(
        self, ids: Tensor, layout: VarlenAttention, kind: PassKind, grad: bool, row_buckets: Sequence[int] = ROW_BUCKETS
    ) -> GraphBucket:
        rows = first_at_least(row_buckets, len(ids))
        length = first_at_least(LENGTH_BUCKETS, max(layout.max_seqlen))
        keys, sequences = _padded_sizes(layout, rows - len(ids), length)
        keys = keys and first_at_least(KEY_BUCKETS, keys)
        return GraphBucket(rows, keys, first_at_least(SEQUENCE_BUCKETS, sequences), (length, length), kind, grad)

    def _reusable_graph(self, bucket: GraphBucket, n: int, layout: VarlenAttention) -> _Graph | None:
        """The smallest captured graph with room for n rows of this layout. None: it pads too much, or the bucket is frequent."""
        if self.bucket_counts[bucket] >= DEDICATED_AFTER:
            return None
        kind = (bucket.kind, bucket.grad, bool(bucket.keys))
        for other in sorted(self.graphs, key=lambda k: k[:4]):
            if (other.kind, other.grad, bool(other.keys)) != kind or other.max_seqlen < bucket.max_seqlen:
                continue
            if bucket.rows <= other.rows <= MAX_ROW_RATIO * bucket.rows:
                keys, sequences = _padded_sizes(layout, other.rows - n, other.max_seqlen[0])
                if keys <= other.keys and sequences <= other.sequences:
                    return self.graphs[other]
        return None

    def _capture(self, bucket: GraphBucket, forward: LayersForward, device: torch.device) -> bool:
        """Capture a graph, after a pass without one: a kernel that a shape needs first cannot be loaded inside a capture."""
        try:
            self.graphs[bucket] = _Graph(bucket, self, forward, device)
            return True
        except (RuntimeError, torch.AcceleratorError) as fault:  # an old driver, too little memory ...
            why = str(fault).splitlines()[0]
            log.info("no graph of %s: %s", bucket, why)
        self.enabled = False
        log.warning("the learner runs without CUDA graphs from now on: %s", why)
        return False


class _PendingBackward:
    """Alive while a forward pass waits for its backward pass."""


class _Graph:
    """The forward and backward graph of one bucket."""

    def __init__(
        self, bucket: GraphBucket, captured: CapturedLayers, forward: LayersForward, device: torch.device
    ) -> None:
        self.bucket, self.captured = bucket, weakref.proxy(captured)
        self.input_buffer = torch.zeros(sum(bucket.input_sizes), dtype=torch.int64, device=device)
        self.activations_overwritten = False  # by a backward pass
        self.forward_count = 0
        first = torch.arange(min(bucket.rows, bucket.max_seqlen[0]))
        ends = torch.tensor([0, len(first)])
        layout = VarlenAttention(ends, ends, bucket.max_seqlen, first if bucket.keys else None, len(first))
        self.stage_inputs(torch.zeros_like(first), first, layout)

        def run_once() -> None:  # without a graph, so that kernels are compiled and libraries allocate workspaces
            out, leaves = self._run(forward)
            if bucket.grad:
                torch.autograd.grad(out, leaves, torch.zeros_like(out))

        capture.warm_up(run_once)
        with capture.exclusive():
            torch.cuda.empty_cache()  # the graph's pool cannot use what the warm-up allocated, and it is as large
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with captured.capture.into(self.forward):
            out, leaves = self._run(forward)
        self.out = out.detach()
        if bucket.grad:
            self.d_out = torch.zeros_like(self.out)
            captured.grads = captured.grads or [torch.zeros_like(p) for p in captured.parameters]
            with captured.capture.into(self.backward):
                compat.foreach_add_(captured.grads, torch.autograd.grad(out, leaves, self.d_out))

    def _run(self, forward: LayersForward) -> tuple[Tensor, list[Tensor]]:
        """The states, and the leaves to differentiate by. Leaves are aliases: the parameters may be part of another pass."""
        alias = {p: p.detach().requires_grad_(p.requires_grad) for p in self.captured.weights}
        return forward(*self.inputs(), alias), [alias[p] for p in self.captured.parameters]

    def inputs(self) -> tuple[Tensor, Tensor, VarlenAttention]:
        ids, position, cu_seqlens_q, cu_seqlens_k, source = self.input_buffer.split(self.bucket.input_sizes)
        bucket, source = self.bucket, source if self.bucket.keys else None
        layout = VarlenAttention(cu_seqlens_q.int(), cu_seqlens_k.int(), bucket.max_seqlen, source, bucket.rows)
        return ids, position, layout

    def stage_inputs(self, ids: Tensor, position: Tensor, layout: VarlenAttention) -> None:
        """Pad the inputs to the bucket and stage all of them in one pinned host-to-device copy: the fixed cost of a copy
        exceeds that of transferring a thousand numbers."""
        n, pads, longest = len(ids), self.bucket.rows - len(ids), self.bucket.max_seqlen[0]
        staged = torch.zeros(len(self.input_buffer), dtype=torch.int64, pin_memory=self.input_buffer.is_cuda)
        *rows, cu_seqlens_q, cu_seqlens_k, source = staged.split(self.bucket.input_sizes)
        for target, value in zip(rows, (ids, position)):
            target[:n] = value
        ends = torch.arange(1, -(-pads // longest) + 1).mul_(longest).clamp_(max=pads)  # of the padding's sequences
        for target, value in ((cu_seqlens_q, layout.cu_seqlens_q.cpu()), (cu_seqlens_k, layout.cu_seqlens_k.cpu())):
            real, padded = len(value), len(value) + len(ends)
            target[:real] = value
            target[real:padded] = ends + value[-1]
            target[padded:] = value[-1] + pads
        if layout.key_source is not None:  # each padding row has one key; keys after those belong to no row
            m = len(layout.key_source)
            source[:m] = layout.key_source
            source[m : m + pads] = torch.arange(n, n + pads)
        self.input_buffer.copy_(staged, non_blocking=True)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _Graph, pending: _PendingBackward, rows: int, *parameters: Tensor) -> Tensor:
        graph.forward.replay()
        graph.activations_overwritten, graph.forward_count = False, graph.forward_count + 1
        ctx.graph, ctx.pending, ctx.rows, ctx.forward_count = graph, pending, rows, graph.forward_count
        return graph.out[:rows].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Any, ...]:
        graph: _Graph = ctx.graph
        assert graph.forward_count == ctx.forward_count, "another forward pass came before this second backward pass"
        if graph.activations_overwritten:  # a second backward pass: the first one overwrote the saved activations
            graph.forward.replay()
        graph.d_out[: ctx.rows] = d
        graph.d_out[ctx.rows :] = 0
        gradients = graph.captured.gradients(graph.backward.replay)
        graph.activations_overwritten = True
        ctx.pending = None  # allow the next forward pass, unless this one is retained for another backward pass
        return None, None, None, *gradients


def _padded_sizes(layout: VarlenAttention, pads: int, longest: int) -> tuple[int, int]:
    """Number of keys (0: without shared prefixes) and of sequence boundaries, including ``pads`` rows of padding."""
    keys = 0 if layout.key_source is None else len(layout.key_source) + pads
    return keys, len(layout.cu_seqlens_q) + -(-pads // longest)
