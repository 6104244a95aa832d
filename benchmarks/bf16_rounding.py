"""The difference of two bfloat16 forward passes that differ only in summation order, in nats per sampled token.

    python benchmarks/bf16_rounding.py [--layers 30] [--length 96]

A decoder of SmolLM2's shape with random weights runs in float32 and rounds where a model under autocast rounds. Noise of 1e-7
before each rounding emulates another summation order: the difference between generator and learner that cannot be avoided.
Prints one line with all roundings, then lines with some of them omitted: the gain of kernels with more precision there.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH, INNER, HEADS, KEYS, SIZE, VOCABULARY = 576, 1536, 9, 3, 64, 8192
OMITTED: list[tuple[str, ...]] = [
    (), ("delta",), ("gate", "silu"), ("qkv",), ("p",), ("delta", "gate", "silu", "qkv"),
    ("delta", "gate", "silu", "act", "qkv", "rotated", "p", "mixed"),
]  # fmt: skip


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


class RoundedDecoder:
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

    def rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), -1)

    def __call__(self, order: int, exact: Collection[str]) -> Tensor:
        """Log-probabilities [T, V] in the ``order``-th summation order, without the roundings named in ``exact``."""
        rng = torch.Generator().manual_seed(order)

        def perturbed(x: Tensor, name: str) -> Tensor:
            x = x * (1 + 1e-7 * torch.randn(x.shape, generator=rng))
            return x if name in exact else rounded(x)

        norm = lambda x: perturbed(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5), "normed")  # noqa: E731
        x = self.embedding[self.ids]
        for qkv, out, gate_up, down in self.layers:
            heads = perturbed(norm(x) @ qkv.T, "qkv").view(len(x), -1, SIZE)
            q, k, v = heads.split([HEADS, KEYS, KEYS], 1)
            q, k = perturbed(self.rotated(q), "rotated"), perturbed(self.rotated(k), "rotated")
            k, v = (t.repeat_interleave(HEADS // KEYS, 1) for t in (k, v))
            score = torch.einsum("qhd,khd->hqk", q, k).mul(SIZE**-0.5).masked_fill(self.future, -1e30)
            p = (score - score.amax(-1, keepdim=True)).exp()
            mixed = torch.einsum("hqk,khd->qhd", perturbed(p, "p"), v) / p.sum(-1).T[:, :, None]
            x = x + perturbed(perturbed(mixed.flatten(1), "mixed") @ out.T, "delta")
            gate, up = perturbed(norm(x) @ gate_up.T, "gate").chunk(2, 1)
            x = x + perturbed(perturbed(perturbed(F.silu(gate), "silu") * up, "act") @ down.T, "delta")
        return (norm(x) @ rounded(self.embedding).T).log_softmax(-1)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--length", type=int, default=96)
    options = parser.parse_args()
    decoder = RoundedDecoder(options.layers, options.length)
    for exact in OMITTED:
        one, other = decoder(1, exact), decoder(2, exact)
        sampled = torch.multinomial(one.exp(), 64, generator=torch.Generator().manual_seed(3))
        difference = (one - other).gather(1, sampled)
        label = f"without {', '.join(exact)}" if exact else "rounded where autocast rounds"
        print(f"{difference.abs().mean():.2e} (signed {difference.mean():+.1e})  {label}", flush=True)


if __name__ == "__main__":
    main()
