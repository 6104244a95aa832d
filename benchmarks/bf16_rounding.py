"""How far two bfloat16 forwards that differ by the order of their sums alone are apart, in nats of a sampled token.

    python benchmarks/bf16_rounding.py [--layers 30] [--length 96]

A decoder of SmolLM2's shape with random weights, computed in float32 and rounded where a model under autocast rounds. Another
order of sums is imitated by noise of 1e-7 before each rounding: what a sampler and a learner cannot help to differ by.
One line for all roundings, then some with a few of them left out: what kernels that keep more digits there would gain.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH, INNER, HEADS, KEYS, SIZE, VOCABULARY = 576, 1536, 9, 3, 64, 8192
LEFT_OUT: list[tuple[str, ...]] = [
    (), ("delta",), ("gate", "silu"), ("qkv",), ("p",), ("delta", "gate", "silu", "qkv"),
    ("delta", "gate", "silu", "act", "qkv", "turned", "p", "mixed"),
]  # fmt: skip


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


class Decoder:
    def __init__(self, layers: int, length: int) -> None:
        torch.manual_seed(0)
        make = lambda *shape: torch.randn(*shape) * 0.02  # noqa: E731
        shapes = ((HEADS + 2 * KEYS) * SIZE, WIDTH), (WIDTH, HEADS * SIZE), (2 * INNER, WIDTH), (WIDTH, INNER)
        self.layers = [[rounded(make(*shape)) for shape in shapes] for _ in range(layers)]
        self.embedding = make(VOCABULARY, WIDTH)
        self.ids = torch.randint(0, VOCABULARY, (length,))
        angle = torch.arange(length)[:, None] * 1e5 ** (-torch.arange(SIZE // 2) / (SIZE // 2))
        self.cos, self.sin = angle.cos()[:, None], angle.sin()[:, None]
        self.future = torch.ones(length, length).triu(1).bool()

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), -1)

    def __call__(self, order: int, exact: Collection[str]) -> Tensor:
        """Log-probabilities [T, V], summed in the ``order``-th order, with some roundings left out."""
        dice = torch.Generator().manual_seed(order)

        def near(x: Tensor, name: str) -> Tensor:
            x = x * (1 + 1e-7 * torch.randn(x.shape, generator=dice))
            return x if name in exact else rounded(x)

        norm = lambda x: near(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5), "normed")  # noqa: E731
        x = self.embedding[self.ids]
        for qkv, out, gate_up, down in self.layers:
            heads = near(norm(x) @ qkv.T, "qkv").view(len(x), -1, SIZE)
            q, k, v = heads.split([HEADS, KEYS, KEYS], 1)
            q, k = near(self.turned(q), "turned"), near(self.turned(k), "turned")
            k, v = (t.repeat_interleave(HEADS // KEYS, 1) for t in (k, v))
            score = torch.einsum("qhd,khd->hqk", q, k).mul(SIZE**-0.5).masked_fill(self.future, -1e30)
            p = (score - score.amax(-1, keepdim=True)).exp()
            mixed = torch.einsum("hqk,khd->qhd", near(p, "p"), v) / p.sum(-1).T[:, :, None]
            x = x + near(near(mixed.flatten(1), "mixed") @ out.T, "delta")
            gate, up = near(norm(x) @ gate_up.T, "gate").chunk(2, 1)
            x = x + near(near(near(F.silu(gate), "silu") * up, "act") @ down.T, "delta")
        return (norm(x) @ rounded(self.embedding).T).log_softmax(-1)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--length", type=int, default=96)
    given = parser.parse_args()
    decoder = Decoder(given.layers, given.length)
    for exact in LEFT_OUT:
        one, other = decoder(1, exact), decoder(2, exact)
        drawn = torch.multinomial(one.exp(), 64, generator=torch.Generator().manual_seed(3))
        apart = (one - other).gather(1, drawn)
        told = f"without {', '.join(exact)}" if exact else "rounded where autocast rounds"
        print(f"{apart.abs().mean():.2e} (signed {apart.mean():+.1e})  {told}", flush=True)


if __name__ == "__main__":
    main()
