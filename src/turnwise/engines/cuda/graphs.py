"""Decoding on a GPU: one step of all lanes, from token to token, captured as a CUDA graph and replayed without a word from
the host.

A graph is captured for each bucket of lanes when it is first needed. Lanes of a bucket that nobody uses rest (position −1):
their slot rows, which may keep a waiting dialogue, are neither read nor written. Weights and slots stay where they are for
as long as a graph lives; new weights are copied into place.

Knows weights, slots and how a token is drawn; neither requests nor text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from turnwise.engines.decoder import Decoder, _Layer
from turnwise.engines.layouts import Reading, Stepping
from turnwise.engines.slots import Slots

HISTORY = 64  # steps of a run at most
LISTEN = 8  # steps after which the host hears what was drawn, while the next ones run


def buckets(most: int) -> list[int]:
    """Numbers of lanes that graphs are made for: powers of two and their midpoints."""
    sizes = [2**k for k in range(31)] + [3 * 2**k for k in range(4, 30)]
    return sorted({min(size, most) for size in sizes if size < 2 * most})


class GraphDecoder(Decoder):
    """The Llama family in the slots' dtype with a float32 residual stream, as a learner under autocast computes it."""

    def __init__(self, model: PreTrainedModel, slots: Slots) -> None:
        from turnwise.engines.cuda import kernels  # late: Triton is there only where CUDA is

        self.kernels = kernels
        slots.reserve(slots.context)  # a graph cannot follow slots that move
        self.kind = slots.dtype
        super().__init__(model, slots)
        self.cos, self.sin = self.cos[:, 0].float().contiguous(), self.sin[:, 0].float().contiguous()
        rows, device = slots.rows, slots.device
        self.tokens, self.position, self.begin, self.seed = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self.cold = torch.ones(rows, device=device)
        self.drawn = torch.zeros(HISTORY, rows, dtype=torch.int64, device=device)
        self.logp = torch.zeros(HISTORY, rows, device=device)
        self._told = [x.cpu().pin_memory() for x in (self.drawn, self.logp)]
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None

    # ------------------------------------------------------------------ weights

    def refresh(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Fuse the weights anew, in place. ``weights``: what was published, before it was rounded to the slots' dtype."""
        base = self.model.model
        exact = lambda name, own: (weights or {}).get(name, own).detach().to(self.slots.device, torch.float32)  # noqa: E731
        embedding = exact("model.embed_tokens.weight", base.embed_tokens.weight)
        norm = exact("model.norm.weight", base.norm.weight)
        head = self.model.lm_head.weight.detach().to(self.kind).t().contiguous()
        layers = [self._fuse(layer) for layer in base.layers]
        layers = [self._exact_norms(i, layer, exact) for i, layer in enumerate(layers)]
        if not hasattr(self, "layers"):
            self.embedding, self.norm, self.head, self.layers = embedding, norm, head, layers
            return
        new = [embedding, norm, head, *(t for layer in layers for t in _tensors(layer))]
        old = [self.embedding, self.norm, self.head, *(t for layer in self.layers for t in _tensors(layer))]
        for into, value in zip(old, new):
            into.copy_(value)

    def _exact_norms(self, i: int, layer: _Layer, exact: Any) -> _Layer:
        name = f"model.layers.{i}"
        kind = lambda t: None if t is None else t.to(self.kind)  # noqa: E731
        return _Layer(
            exact(f"{name}.input_layernorm.weight", layer.norm),
            layer.qkv.to(self.kind),
            kind(layer.qkv_bias),
            None if layer.qk_norm is None else layer.qk_norm.float(),
            layer.out.to(self.kind),
            kind(layer.out_bias),
            exact(f"{name}.post_attention_layernorm.weight", layer.mlp_norm),
            layer.gate_up.to(self.kind),
            layer.down.to(self.kind),
        )

    # ------------------------------------------------------------------ one pass

    def _norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        return self.kernels.add_norm(x, delta, weight, torch.empty(x.shape, dtype=self.kind, device=x.device), self.eps)

    def _product(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.mm(h, weight) if bias is None else torch.addmm(bias, h, weight)

    def _mlp(self, x: Tensor, delta: Tensor, layer: _Layer) -> Tensor:
        both = torch.mm(self._norm(x, delta, layer.mlp_norm), layer.gate_up)
        act = self.kernels.swiglu(both, torch.empty(len(x), both.shape[1] // 2, dtype=self.kind, device=x.device))
        return torch.mm(act, layer.down)

    def _logits(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Feed one token a lane; float32 logits of the next."""
        x = F.embedding(tokens, self.embedding)
        delta: Tensor | None = None
        for i, layer in enumerate(self.layers):
            qkv = self._product(self._norm(x, delta, layer.norm), layer.qkv, layer.qkv_bias)
            mixed = torch.empty(len(x), self.H * self.D, dtype=self.kind, device=x.device)
            k, v = self.slots.keys[i], self.slots.values[i]
            self.kernels.attend(
                qkv, k, v, self.cos, self.sin, layer.qk_norm, position, mixed, self.scale, self.eps
            )  # fmt: skip
            delta = self._mlp(x, self._product(mixed, layer.out, layer.out_bias), layer)
        return _wide_product(self._norm(x, delta, self.norm), self.head)

    def read(self, layout: Reading) -> None:
        """Keys and values of packed tokens; the last layer's attention and MLP feed only logits, which nobody wants."""
        x = F.embedding(layout.tokens, self.embedding)
        jobs, depth = len(layout.rows), layout.depth
        row, slot = layout.rows[layout.batch], layout.batch * depth + layout.offset
        zeros = lambda heads: torch.zeros(jobs * depth, heads, self.D, dtype=self.kind, device=x.device)  # noqa: E731
        q, k, v = zeros(self.H), zeros(self.Hkv), zeros(self.Hkv)  # rows of jobs, padded to the longest
        full = len(x) == jobs * depth
        delta: Tensor | None = None
        for i, layer in enumerate(self.layers):
            qkv = self._product(self._norm(x, delta, layer.norm), layer.qkv, layer.qkv_bias)
            self.kernels.settle(
                qkv, self.slots.keys[i], self.slots.values[i], self.cos, self.sin, layer.qk_norm, layout.position, row,
                slot, q, k, v, self.eps,
            )  # fmt: skip
            if i == len(self.layers) - 1:
                return
            out = self._look_back(i, layout, *(t.view(jobs, depth, -1, self.D).transpose(1, 2) for t in (q, k, v)))
            mixed = out.transpose(1, 2).reshape(jobs * depth, -1)
            mixed = mixed if full else mixed[slot]
            delta = self._mlp(x, self._product(mixed, layer.out, layer.out_bias), layer)

    def _look_back(self, i: int, layout: Reading, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [J, H, depth, D] attends to its own row: to itself alone where every row begins here, else to the slots."""
        grouped = self.Hkv != self.H
        if layout.begins:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
        keys, values = (t[layout.rows, :, : layout.width] for t in (self.slots.keys[i], self.slots.values[i]))
        mask = layout.mask(None)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self.scale, enable_gqa=grouped)

    def step(self, tokens: Tensor, layout: Stepping) -> Tensor:
        """Without a graph, for samplings that look at the whole distribution (top-p, top-k, min-p)."""
        return self._logits(tokens, layout.position)

    # ------------------------------------------------------------------ many steps

    def _advance(self, lanes: int) -> None:
        cut = slice(0, lanes)
        logits = self._logits(self.tokens[cut], self.position[cut])
        self.kernels.draw(
            logits, self.cold[cut], self.seed[cut], self.tokens[cut], self.position[cut], self.begin[cut], self.drawn,
            self.logp,
        )  # fmt: skip

    def _graph(self, lanes: int) -> torch.cuda.CUDAGraph:
        if lanes not in self.graphs:
            saved = self.position.clone()
            self.position.fill_(-1)  # rehearse with every lane at rest
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._advance(lanes)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                self._advance(lanes)
            self.pool = self.pool or graph.pool()
            self.graphs[lanes] = graph
            self.position.copy_(saved)
        return self.graphs[lanes]

    def run(
        self,
        steps: int,
        tokens: Sequence[int],
        held: Sequence[int],
        seeds: Sequence[int],
        temperatures: Sequence[float],
    ) -> Iterator[tuple[list[int], Tensor]]:
        """``steps`` tokens of every lane [0, n), step by step: ids [n] and log-probabilities [n]. All steps are launched at
        once; the host hears of the first ones while the GPU draws the others.

        ``held``: columns each row holds. A temperature of 0 is greedy. Beyond the context a lane rests."""
        assert steps <= HISTORY, f"{steps} steps in a run; at most {HISTORY}"
        n = len(tokens)
        lanes = next(size for size in buckets(self.slots.rows) if size >= n)
        graph = self._graph(lanes)
        self._set_out(lanes, tokens, held, seeds, temperatures)
        heard = []
        for begin in range(0, steps, LISTEN):
            cut = slice(begin, min(steps, begin + LISTEN))
            for _ in range(cut.start, cut.stop):
                graph.replay()
            told = torch.cuda.Event()
            copies = [
                self._told[i][cut].copy_(x[cut], non_blocking=True) for i, x in enumerate((self.drawn, self.logp))
            ]
            told.record()
            heard.append((told, copies))
        for told, (drawn, logp) in heard:
            told.synchronize()
            yield from zip(drawn[:, :n].tolist(), logp[:, :n].clone())

    def _set_out(
        self,
        lanes: int,
        tokens: Sequence[int],
        held: Sequence[int],
        seeds: Sequence[int],
        temperatures: Sequence[float],
    ) -> None:
        """Where every lane of a bucket begins; the unused ones rest."""
        free = lanes - len(tokens)
        rows = ([*tokens, *[0] * free], [*held, *[-1] * free], [*held, *[0] * free], [*seeds, *[0] * free])
        there = torch.tensor(rows).to(self.slots.device, non_blocking=True)
        for into, value in zip((self.tokens, self.position, self.begin, self.seed), there):
            into[:lanes] = value
        cold = [0.0 if t == 0 else 1 / t for t in temperatures]
        self.cold[: len(tokens)] = torch.tensor(cold).to(self.slots.device, non_blocking=True)


def _tensors(layer: _Layer) -> list[Tensor]:
    every = (getattr(layer, name) for name in _Layer.__dataclass_fields__)
    return [t for t in every if t is not None]


def _wide_product(h: Tensor, weight: Tensor) -> Tensor:
    """h·W accumulated and returned in float32: rounded logits would cost the log-probabilities three digits."""
    if h.dtype == torch.float32:
        return torch.mm(h, weight)
    return torch.mm(h, weight, out_dtype=torch.float32) if h.is_cuda else torch.mm(h.float(), weight.float())
