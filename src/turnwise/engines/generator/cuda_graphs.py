"""Decoding on a GPU: one step of all lanes, from token to token, captured as a CUDA graph and replayed without a word from
the host.

A graph is captured for each bucket of lanes when it is first needed, and for each bucket of readings when it comes again. Lanes
of a bucket that nobody uses rest (position −1): their slot rows, which may keep a waiting dialogue, are neither read nor written.
Weights and slots stay where they are for as long as a graph lives; new weights are copied into place. Where a graph cannot be
captured the same step runs without one.

Knows weights, slots and how a token is drawn; neither requests nor text.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnwise.engines.generator import weight_views
from turnwise.engines.generator.attention_layouts import Reading, Stepping
from turnwise.engines.generator.graph_inputs import CAPTURED, Page, Size
from turnwise.engines.generator.kv_cache import Slots
from turnwise.engines.generator.llama_decoder import Decoder, _Layer
from turnwise.engines.kernels.decode_reference import SISTERS, quantise
from turnwise.engines.kernels.sampling import ALL, pick, truncate, uniforms

log = logging.getLogger(__name__)

HISTORY = 512  # steps of a run at most
LISTEN = 4  # steps after which the host hears what was drawn ...
AHEAD = 2  # ... while as many blocks less one are on their way: at most these ride on when enough is enough

CROWD = 768  # programs (lanes times key heads) from which on lanes look together: fewer would leave a GPU idle ...
SAVED = 0.25  # ... and the share of columns that need not be read again: four lanes a program cost some time themselves

Cut = tuple[int, float, float]
"""(top-k, top-p, min-p) of a lane; (0, 1, 0) cuts nothing."""

Shape = tuple[int, bool, bool]
"""What a graph is made for: lanes, whether some look at a part of the distribution only, whether lanes look together."""


def buckets(most: int) -> list[int]:
    """Numbers of lanes that graphs are made for: powers of two and their midpoints."""
    sizes = [2**k for k in range(31)] + [3 * 2**k for k in range(4, 30)]
    return sorted({min(size, most) for size in sizes if size < 2 * most})


@dataclass(frozen=True, slots=True)
class Narrow:
    """A product's weights in e4m3: data [out, in], scale [out, 1]."""

    data: Tensor
    scale: Tensor


class GraphDecoder(Decoder):
    """The Llama family in the slots' dtype with a float32 residual stream, as a learner under autocast computes it."""

    @staticmethod
    def misfit(model: PreTrainedModel, windows: set[int | None]) -> str:
        config = model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        fits = size >= 16 and not size & (size - 1)
        return Decoder.misfit(model, windows) or ("" if fits else f"head size {size}, not a power of two from 16 on")

    def __init__(self, model: PreTrainedModel, slots: Slots, narrow: bool = False, kernels: Any = None) -> None:
        """``kernels``: the module that has them; Triton's unless given."""
        if kernels is None:
            pass  # late: Triton is there only where CUDA is

        self.kernels, self.on_gpu = kernels, slots.device.type == "cuda"
        slots.reserve(slots.context)  # a graph cannot follow slots that move
        self.kind = slots.dtype
        super().__init__(model, slots, narrow)
        self.cos, self.sin = self.cos[:, 0].float().contiguous(), self.sin[:, 0].float().contiguous()
        rows, device = slots.rows, slots.device
        self.tokens, self.position, self.begin, self.seed = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self.cold = torch.ones(rows, device=device)
        self.top_k = torch.full((rows, 1), ALL, device=device)
        self.top_p = torch.ones(rows, 1, dtype=torch.float64, device=device)
        self.min_p = torch.zeros_like(self.top_p)
        self.shared = torch.zeros(2, -(-rows // SISTERS), dtype=torch.int64, device=device)
        self.drawn = torch.zeros(HISTORY, rows, dtype=torch.int64, device=device)
        self.logp, self.mass = torch.zeros(2, HISTORY, rows, device=device)
        told = [torch.zeros_like(x, device="cpu") for x in (self.drawn, self.logp, self.mass)]
        self._told = [x.pin_memory() for x in told] if self.on_gpu else told
        self.graphs: dict[Shape, Callable[[], None]] = {}
        self.readers: dict[Size, tuple[Page, Callable[[], None]]] = {}
        self.met: set[Size] = set()  # read once, without a graph
        self.pool: Any = None
        self.faults: set[str] = set()  # why a step had to run without a graph

    def describe(self) -> str:
        kind = str(self.kind).removeprefix("torch.") + (" with fp8 weights" if self.narrow else "")
        how = "kernels without CUDA graphs" if self.faults or not self.on_gpu else "CUDA graphs"
        return f"{how}, {kind}, grouped-query kernel" + "".join(f"; {fault}" for fault in sorted(self.faults))

    # ------------------------------------------------------------------ weights

    def refresh(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Take the model's weights anew, in place. ``weights``: what was published, before it was rounded to the slots' dtype."""
        if hasattr(self, "layers") and not self.narrow:
            for name, place, own in self._places:
                place.copy_((weights or {}).get(name, own))
            return
        base = self.model.model
        exact = lambda name, own: (weights or {}).get(name, own).detach().to(self.slots.device, torch.float32)  # noqa: E731
        embedding = exact("model.embed_tokens.weight", base.embed_tokens.weight)
        norm = exact("model.norm.weight", base.norm.weight)
        head = self.model.lm_head.weight.detach().to(self.kind).t().contiguous()
        layers = [self._exact_norms(f"model.layers.{i}", layer, exact) for i, layer in enumerate(base.layers)]
        if not hasattr(self, "layers"):
            self.embedding, self.norm, self.head, self.layers = embedding, norm, head, layers
            return
        new = [embedding, norm, head, *(t for layer in layers for t in _tensors(layer))]
        old = [self.embedding, self.norm, self.head, *(t for layer in self.layers for t in _tensors(layer))]
        for into, value in zip(old, new):
            into.copy_(value)

    @cached_property
    def _places(self) -> list[tuple[str, Tensor, Tensor]]:
        """A weight's name, where it lies here, and the model's own."""
        every = list(weight_views.outside(self.embedding, self.norm, self.head))
        for i, layer in enumerate(self.layers):
            every += weight_views.inside(i, layer, self.H, self.Hkv, self.D)
        own = self.model.state_dict()
        return [(name, place, own[name]) for name, place in every if name in own]

    def _exact_norms(self, name: str, module: Any, exact: Any) -> _Layer:
        """A layer's products in ``kind``, its norms in float32 as they were published."""
        fused, attention = self._fuse(module), module.self_attn
        qk_norm = None
        if fused.qk_norm is not None:
            q = exact(f"{name}.self_attn.q_norm.weight", attention.q_norm.weight)
            k = exact(f"{name}.self_attn.k_norm.weight", attention.k_norm.weight)
            qk_norm = torch.cat((q.expand(self.H, -1), k.expand(self.Hkv, -1)))
        kind = lambda t: t.to(self.kind) if isinstance(t, Tensor) else t  # noqa: E731
        return _Layer(
            exact(f"{name}.input_layernorm.weight", fused.norm),
            kind(fused.qkv),
            kind(fused.qkv_bias),
            qk_norm,
            kind(fused.out),
            kind(fused.out_bias),
            exact(f"{name}.post_attention_layernorm.weight", fused.mlp_norm),
            kind(fused.gate_up),
            kind(fused.down),
        )

    def _turned(self, *layers: nn.Linear) -> Any:
        if not self.narrow:
            return super()._turned(*layers)
        return Narrow(*quantise(torch.cat([layer.weight.detach() for layer in layers])))

    # ------------------------------------------------------------------ one pass

    def _norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        return self.kernels.add_norm(x, delta, weight, torch.empty(x.shape, dtype=self.kind, device=x.device), self.eps)

    def _product(self, h: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, Narrow):
            out = self.kernels.narrow_product(h, weight.data, weight.scale)
            return out if bias is None else out.add_(bias)
        return torch.mm(h, weight) if bias is None else torch.addmm(bias, h, weight)

    def _mlp(self, x: Tensor, delta: Tensor, layer: _Layer) -> Tensor:
        both = self._product(self._norm(x, delta, layer.mlp_norm), layer.gate_up)
        act = self.kernels.swiglu(both, torch.empty(len(x), both.shape[1] // 2, dtype=self.kind, device=x.device))
        return self._product(act, layer.down)

    def _logits(self, tokens: Tensor, position: Tensor, shared: Tensor | None = None) -> Tensor:
        """Feed one token a lane; float32 logits of the next."""
        x = self.embedding[tokens]  # not F.embedding: 12.5 µs for 16 lanes, where this takes 2
        delta: Tensor | None = None
        for i, layer in enumerate(self.layers):
            qkv = self._product(self._norm(x, delta, layer.norm), layer.qkv, layer.qkv_bias)
            mixed = torch.empty(len(x), self.H * self.D, dtype=self.kind, device=x.device)
            k, v = self.slots.keys[i], self.slots.values[i]
            self.kernels.attend(
                qkv, k, v, self.cos, self.sin, layer.qk_norm, position, mixed, self.scale, self.eps, shared
            )  # fmt: skip
            delta = self._mlp(x, self._product(mixed, layer.out, layer.out_bias), layer)
        return _wide_product(self._norm(x, delta, self.norm), self.head)

    def read(self, layout: Reading) -> None:
        """Keys and values of packed tokens. Sizes that come again are captured, where launching would take longer than they."""
        size = Size.of(layout)
        page, read = self.readers.get(size) or self._reader(size)
        page.fill(layout)
        read()

    def _reader(self, size: Size) -> tuple[Page, Callable[[], None]]:
        page = Page(size, self.slots.device)
        read = partial(self._read, page)
        if size not in self.met or size.tokens > CAPTURED:
            self.met.add(size)
            return page, read
        self.readers[size] = page, self._captured(read, f"of {size.tokens} tokens to read")
        return self.readers[size]

    def _read(self, page: Page) -> None:
        """The last layer's attention and MLP feed only logits, which nobody wants."""
        x = self.embedding[page.tokens]
        delta: Tensor | None = None
        # zeros, since tokens that are none must stay numbers
        q, mixed = torch.zeros(2, len(x), self.H * self.D, dtype=self.kind, device=x.device)
        for i, layer in enumerate(self.layers):
            qkv = self._product(self._norm(x, delta, layer.norm), layer.qkv, layer.qkv_bias)
            k, v = self.slots.keys[i], self.slots.values[i]
            self.kernels.settle(
                qkv, k, v, self.cos, self.sin, layer.qk_norm, page.position, page.row, q, self.eps
            )  # fmt: skip
            if i < len(self.layers) - 1:
                self.kernels.look_back(q, k, v, page.ends, page.start, page.rows, page.size.depth, mixed, self.scale)
                delta = self._mlp(x, self._product(mixed, layer.out, layer.out_bias), layer)

    def step(self, tokens: Tensor, layout: Stepping) -> Tensor:
        """One step by itself, to compare with other forwards."""
        return self._logits(tokens, layout.position)

    # ------------------------------------------------------------------ many steps

    def _advance(self, lanes: int, cuts: bool, together: bool) -> None:
        cut = slice(0, lanes)
        place = self.position[cut].clone() if cuts else None
        shared = self.shared.flatten()[: 2 * -(-lanes // SISTERS)].view(2, -1) if together else None
        logits = self._logits(self.tokens[cut], self.position[cut], shared)
        self.kernels.draw(
            logits, self.cold[cut], self.seed[cut], self.tokens[cut], self.position[cut], self.begin[cut], self.drawn,
            self.logp,
        )  # fmt: skip
        if place is not None:
            self._draw_from_part(logits, place)

    def _draw_from_part(self, logits: Tensor, place: Tensor) -> None:
        """Lanes with top-k, top-p or min-p draw once more, as ``Sampler`` does; the others keep what they have."""
        cut = slice(0, len(place))
        cold, limits = self.cold[cut], (self.top_k[cut], self.top_p[cut], self.min_p[cut])
        whole = ((limits[0] == ALL) & (limits[1] == 1) & (limits[2] == 0)) | (cold == 0)[:, None]
        p = (logits * cold[:, None]).softmax(-1)
        kept, mass = truncate(p, whole, *limits)
        token = pick(kept, uniforms(self.seed[cut], place + 1)).clamp_(
            max=logits.shape[1] - 1
        )  # lanes at rest hold anything
        mine = (place >= 0) & ~whole[:, 0]
        lane, step = torch.arange(len(place), device=place.device), (place - self.begin[cut]).clamp(min=0)
        found = (token[:, 0], p.gather(1, token)[:, 0].log() - mass, mass)
        for into, value in zip((self.drawn, self.logp, self.mass), found):
            into[step, lane] = torch.where(mine, value, into[step, lane])
        self.tokens[cut] = torch.where(mine, token[:, 0], self.tokens[cut])

    def _replay(self, *shape: *Shape) -> Callable[[], None]:
        """Takes one step of a bucket: a captured graph, or where that failed the step itself."""
        if shape not in self.graphs:
            lanes, cuts, _ = shape
            saved = self.position.clone()
            self.position.fill_(-1)  # rehearse with every lane at rest
            what = f"of {lanes} lanes{' with cut distributions' * cuts}"
            try:
                self.graphs[shape] = self._captured(partial(self._advance, *shape), what)
            finally:
                self.position.copy_(saved)
        return self.graphs[shape]

    def _captured(self, run: Callable[[], None], what: str) -> Callable[[], None]:
        """As a graph, or where that fails as it is. It is rehearsed here: nothing it is given may matter."""
        if not self.on_gpu:
            return run
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # a learner may allocate in another thread meanwhile: only this one must not
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                run()
        except RuntimeError as fault:
            why = f"no graph {what}: {str(fault).splitlines()[0]}"
            self.faults.add(why)
            log.warning("%s; it runs without one, and slower", why)
            return run
        self.pool = self.pool or graph.pool()
        return graph.replay

    def rehearse(self) -> None:
        deque(self.run(2, [0], [0], [0], [1.0]), 0)

    def run(
        self,
        steps: int,
        tokens: Sequence[int],
        held: Sequence[int],
        seeds: Sequence[int],
        temperatures: Sequence[float],
        cuts: Sequence[Cut] | None = None,
        enough: Callable[[int], bool] = lambda launched: False,
        alike: Sequence[int] = (),
    ) -> Iterator[tuple[list[int], Tensor, Tensor | None]]:
        """``steps`` tokens of every lane [0, n), step by step: ids, log-probabilities, and with ``cuts`` the kept log mass [n].
        The host hears of a block of steps while the GPU draws the next. Once so many are ``enough`` nothing more is launched;
        what was, is told.

        ``held``: columns each row holds; ``alike``: how many of them it has in common with the row before it. A temperature of
        0 is greedy. Beyond the context a lane rests."""
        assert steps <= HISTORY, f"{steps} steps in a run; at most {HISTORY}"
        n = len(tokens)
        lanes = next(size for size in buckets(self.slots.rows) if size >= n)
        shared = self._together(lanes, steps, held, alike)
        replay = self._replay(lanes, cuts is not None, shared is not None)
        self._set_out(lanes, tokens, held, seeds, temperatures, cuts, shared)
        heard: deque[tuple[Any, list[Tensor]]] = deque()
        begin = 0
        while True:
            while begin < steps and len(heard) < AHEAD and not enough(begin):
                block = slice(begin, min(steps, begin + LISTEN))
                heard.append(self._launch(replay, block))
                begin = block.stop
            if not heard:
                return
            told, (drawn, logp, mass) = heard.popleft()
            if told is not None:
                told.synchronize()
            masses = mass[:, :n].clone() if cuts is not None else [None] * len(drawn)
            yield from zip(drawn[:, :n].tolist(), logp[:, :n].clone(), masses)

    def _together(self, lanes: int, steps: int, held: Sequence[int], alike: Sequence[int]) -> list[list[int]] | None:
        """By fours of lanes: the columns they share, and the row these are read in. None where that would not pay."""
        if not alike or lanes * self.Hkv < CROWD:
            return None
        fours = range(0, lanes, SISTERS)
        common = [min(alike[at + 1 : at + SISTERS], default=0) for at in fours]
        looked = sum(held) + len(held) * steps // 2
        if (SISTERS - 1) * sum(common) < SAVED * looked:
            return None
        return [common, list(fours)]

    def _launch(self, replay: Callable[[], None], block: slice) -> tuple[Any, list[Tensor]]:
        """Some steps, and the way home of what they draw."""
        for _ in range(block.start, block.stop):
            replay()
        every = zip(self._told, (self.drawn, self.logp, self.mass))
        copies = [here[block].copy_(there[block], non_blocking=True) for here, there in every]
        told = torch.cuda.Event() if self.on_gpu else None
        if told is not None:
            told.record()
        return told, copies

    def _set_out(
        self,
        lanes: int,
        tokens: Sequence[int],
        held: Sequence[int],
        seeds: Sequence[int],
        temperatures: Sequence[float],
        cuts: Sequence[Cut] | None,
        shared: Sequence[Sequence[int]] | None,
    ) -> None:
        """Where every lane of a bucket begins; the unused ones rest."""
        n, device = len(tokens), self.slots.device
        if shared is not None:
            flat = torch.tensor(shared).flatten()
            self.shared.flatten()[: len(flat)] = flat.to(device, non_blocking=True)
        free = lanes - n
        rows = ([*tokens, *[0] * free], [*held, *[-1] * free], [*held, *[0] * free], [*seeds, *[0] * free])
        there = torch.tensor(rows).to(device, non_blocking=True)
        for into, value in zip((self.tokens, self.position, self.begin, self.seed), there):
            into[:lanes] = value
        self.cold[:n] = torch.tensor([0.0 if t == 0 else 1 / t for t in temperatures]).to(device, non_blocking=True)
        if cuts is not None:
            top_k, top_p, min_p = zip(*cuts)
            self.top_k[:n, 0] = torch.tensor([k or ALL for k in top_k]).to(device, non_blocking=True)
            self.top_p[:n, 0] = torch.tensor(top_p, dtype=torch.float64).to(device, non_blocking=True)
            self.min_p[:n, 0] = torch.tensor(min_p, dtype=torch.float64).to(device, non_blocking=True)
            self.mass.zero_()


def _tensors(layer: _Layer) -> list[Tensor]:
    every = [getattr(layer, f.name) for f in fields(layer)]
    parts = [(x.data, x.scale) if isinstance(x, Narrow) else (x,) for x in every]
    return [t for part in parts for t in part if t is not None]


def _wide_product(h: Tensor, weight: Tensor) -> Tensor:
    """h·W accumulated and returned in float32: rounded logits would cost the log-probabilities three digits."""
    if h.dtype == torch.float32:
        return torch.mm(h, weight)
    return torch.mm(h, weight, out_dtype=torch.float32) if h.is_cuda else torch.mm(h.float(), weight.float())
