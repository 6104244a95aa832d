"""An analytical model of tokens/s, memory and weight-sync time on many GPUs, compared with published figures.

    python benchmarks/scaling_model.py [--write docs/scaling.md] [--check]

Formulas and sources: docs/scaling.md. Every constant below is measured here, quoted there, or an estimate (marked as such).
``--write`` updates the tables of the page between their markers.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

GB = 1e9


@dataclass(frozen=True)
class Card:
    name: str
    bandwidth: float  # bytes/s of a copy
    peak: float  # FLOP/s of a large product in bf16
    memory: float  # bytes


@dataclass(frozen=True)
class Model:
    name: str
    n: float  # parameters
    layers: int
    width: int
    kv: int  # key heads x head size
    bytes: int = 2  # per weight and per cached number, while generating

    @property
    def cache(self) -> float:
        """Bytes of the KV cache of one token."""
        return 2 * self.bytes * self.layers * self.kv


H200 = Card("H200", 4.20e12, 790e12, 149.3e9)  # measured: copies, products; 139 GiB
H200_FP8 = Card("H200, fp8", 4.20e12, 1580e12, 149.3e9)  # estimate: twice the measured peak of bf16
H100 = Card(
    "H100", 2.93e12, 790e12, 80 * GB
)  # 3.35 TB/s by its data sheet, times the fraction an H200 reaches of its 4.8
A100 = Card("A100", 1.555e12, 312e12, 40 * GB)  # by its data sheet

SMOL = Model("SmolLM2-135M", 0.1345e9, 30, 576, 192)
B1 = Model("1B", 1.24e9, 16, 2048, 512)  # Llama-3.2-1B
B7 = Model("7B", 7.62e9, 28, 3584, 512)  # Qwen2.5-7B
B8 = Model("Llama-3.1-8B", 8.03e9, 32, 4096, 1024)
B8_FP8 = Model("Llama-3.1-8B, fp8", 8.03e9, 32, 4096, 1024, 1)
B32 = Model("Qwen3-32B", 32.8e9, 64, 5120, 1024)
B70 = Model("70B", 70.6e9, 80, 8192, 1024)  # Llama-3.1-70B
B70_FP8 = Model("Llama-3.3-70B, fp8", 70.6e9, 80, 8192, 1024, 1)

ROOF = 0.5  # fraction of the roofline that batched decoding reaches; from TensorRT-LLM's tables, see the page
HOST = 3e-3  # seconds of host work per decode step, from vLLM at one request (quoted)
HOST_OURS = 1.0e-3  # the part of our 1.7 ms per step that the roofline does not explain (measured, 135M, H200)
MFU = 0.45  # of the measured peak, FSDP2 on 8 GPUs and more (quoted: torchtitan)
LINK, NET, LATENCY = 450 * GB, 50 * GB, 15e-6  # NVLink one way, network per GPU (data sheets); an all-reduce (estimate)
SYNC, SYNC_START = 65 * GB, 0.3  # bytes/s and seconds of a weight update (quoted: checkpoint-engine)
LANES = 256  # vLLM's usual number of concurrent sequences


def lanes(m: Model, card: Card, tp: int, length: float, most: float = LANES) -> int:
    """How many sequences of this mean length fit beside the weights: (0.9 M t − w N) / (c · length)."""
    return max(0, min(most, int((0.9 * card.memory * tp - m.bytes * m.n) / (m.cache * length))))


def decode_step(
    m: Model, card: Card, tp: int, batch: float, held: float, roof: float = ROOF, host: float = HOST
) -> float:
    """Seconds of one decode step: max(reads, products) / roof + host + two all-reduces per layer."""
    reads = (m.bytes * m.n + batch * m.cache * held) / (tp * card.bandwidth)
    products = 2 * m.n * batch / (tp * card.peak)
    transfer = 2 * batch * m.width * 2 * (tp - 1) / tp / LINK
    return max(reads, products) / roof + host + (2 * m.layers * (LATENCY + transfer) if tp > 1 else 0.0)


def generation(
    m: Model, card: Card, tp: int, prompt: int, new: int, most: float = LANES, roof: float = ROOF, host: float = HOST
) -> float:
    """Sampled tokens/s of one GPU, all lanes busy; a prompt costs 2 N an id at the same share of the peak."""
    batch = lanes(m, card, tp, prompt + new / 2, most)
    if not batch:
        return 0.0
    step = decode_step(m, card, tp, batch, prompt + new / 2, roof, host)
    prefill = batch * prompt / new * 2 * m.n / (tp * card.peak * roof)
    return batch / (step + prefill) / tp


def learning(m: Model, card: Card, length: float, passes: float = 6.0, mfu: float = MFU) -> float:
    """Tokens/s of one GPU: peak · MFU / (passes N + passes L d T)."""
    return card.peak * mfu / (passes * m.n + passes * m.layers * m.width * length)


def learner_bytes(m: Model, gpus: int, tokens: int = 16384) -> float:
    """Bytes per GPU: weights, gradients and two moments in float32 and a reference in bf16, sharded; two gathered layers; one
    activation per layer and id, and about 34 inside the layer that is being recomputed."""
    states = (16 + 2) * m.n / gpus
    return states + 2 * 2 * m.n / m.layers + 2 * tokens * m.width * (m.layers + 34)


def sync(m: Model) -> float:
    return SYNC_START + 2 * m.n / SYNC


def tp_of(m: Model, card: Card, gpus: int, length: float) -> int:
    """The smallest power of two of GPUs in one node that holds the weights and 64 sequences."""
    fits = [t for t in (1, 2, 4, 8) if t <= gpus and lanes(m, card, t, length) >= 64]
    return fits[0] if fits else 0


def whole(
    m: Model, card: Card, gpus: int, tp: int, rows: int, prompt: int, new: int, longest: int
) -> tuple[float, float, float]:
    """(seconds to generate, to learn, to sync) of a step in which all GPUs first generate and then learn. After the mean length
    only the longest sequences remain, one token per decode step; log-probabilities of the old policy cost another 2 N."""
    busy = min(LANES, rows * tp / gpus)  # a replica decodes its share of the rows
    tail = (longest - new) * decode_step(m, card, tp, 1, prompt + longest, 1.0)
    return (
        rows * new / (generation(m, card, tp, prompt, new, busy) * gpus) + tail,
        rows * (prompt + new) / (learning(m, card, prompt + new, 8.0) * gpus),
        sync(m),
    )


# ------------------------------------------------------------------------ tables


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *lines])


def projections(prompt: int = 512, new: int = 1024, longest: int = 4096, rows: int = 4096) -> str:
    """The projected rates of 1, 8 and 64 H200."""
    lines = []
    for m in (B1, B7, B70):
        for gpus in (1, 8, 64):
            held = prompt + new / 2
            tp = tp_of(m, H200, gpus, held)
            need = learner_bytes(m, gpus)
            if not tp:
                lines.append([m.name, str(gpus), "–", "does not fit", *["–"] * 2, f"{need / GB:,.0f}", "–", "–"])
                continue
            rate = generation(m, H200, tp, prompt, new) * gpus
            kv = lanes(m, H200, tp, held) * m.cache * held / tp
            served = m.bytes * m.n / tp + kv
            fits = need < 0.9 * H200.memory
            learned = learning(m, H200, prompt + new, 8.0) * gpus
            step = sum(whole(m, H200, gpus, tp, rows, prompt, new, longest)) if fits else 0.0
            both = [f"{learned / 1e3:,.1f} k", f"{rows * new / step / 1e3:,.1f} k"] if fits else ["does not fit", "–"]
            sizes = [f"{served / GB:,.0f}", f"{need / GB:,.0f}", f"{sync(m):.1f} s"]
            lines.append([m.name, str(gpus), str(tp), f"{rate / 1e3:,.0f} k", both[0], *sizes, both[1]])
    heads = [
        "model", "GPUs", "TP", "generation, tok/s", "learning, tok/s", "generator, GB a GPU", "learner, GB a GPU",
        "weight sync", "whole step, sampled tok/s",
    ]  # fmt: skip
    return table(heads, lines)


def checks() -> list[tuple[str, str, float, float, str]]:
    """(what, unit, published or measured, by the formulas, used to set a constant?)"""
    many = 4096
    gen = lambda m, c, p, n: generation(m, c, 1, p, n, many) * 1.0  # noqa: E731
    one = 1 / decode_step(B8, A100, 1, 1, 1088, 1.0)
    ours = generation(SMOL, H200, 1, 128, 128, 256, ROOF, HOST_OURS)
    nemo8 = sum(whole(B8, H100, 16, 1, 2048, 160, 900, 3936))
    nemo32 = sum(whole(B32, H100, 32, 4, 2048, 160, 3046, 3936))
    fsdp = lambda m, c, mfu=MFU: learning(m, c, 8192, 6.0, mfu)  # noqa: E731
    return [
        ("ours, 135M, H200, batch 256, 128+128 (measured)", "tok/s", 156e3, ours, "sets our host time"),
        ("vLLM, 8B, A100, one request", "tok/s", 75, one, "sets vLLM's host time"),
        ("TensorRT-LLM, 8B fp8, H200, 128+2048", "tok/s", 26_221, gen(B8_FP8, H200_FP8, 128, 2048), "sets the roof"),
        ("TensorRT-LLM, 8B fp8, H200, 1000+1000", "tok/s", 17_744, gen(B8_FP8, H200_FP8, 1000, 1000), ""),
        ("TensorRT-LLM, 8B fp8, H200, 128+128", "tok/s", 27_911, gen(B8_FP8, H200_FP8, 128, 128), ""),
        ("TensorRT-LLM, 70B fp8, H200, 128+2048", "tok/s", 4_336, gen(B70_FP8, H200_FP8, 128, 2048), ""),
        ("TensorRT-LLM, 70B fp8, H200, 1000+1000", "tok/s", 2_909, gen(B70_FP8, H200_FP8, 1000, 1000), ""),
        ("ours, learning, 135M, H200, 64 x 512 (measured)", "tok/s", 390e3, learning(SMOL, H200, 512), ""),
        (
            "plain step, 135M, H200, 64 x 512 (measured)",
            "tok/s",
            151e3,
            learning(SMOL, H200, 512),
            "too small for that MFU",
        ),
        ("torchtitan FSDP2, 8B, 8 H100, compiled", "tok/s a GPU", 6_667, fsdp(B8, H100), "sets the MFU"),
        ("torchtitan FSDP2, 8B, 128 H100, compiled", "tok/s a GPU", 6_514, fsdp(B8, H100), ""),
        ("torchtitan FSDP2, 70B, 64 A100", "tok/s a GPU", 331, fsdp(B70, A100), ""),
        ("checkpoint-engine, 235B bf16, 8 H800", "s", 6.55, SYNC_START + 470e9 / SYNC, "sets the rate"),
        ("checkpoint-engine, 106B bf16, 8 H800", "s", 3.59, SYNC_START + 212e9 / SYNC, ""),
        ("checkpoint-engine, 1T fp8, 256 H20", "s", 17.3, SYNC_START + 1030e9 / SYNC, ""),
        ("verl, FSDP to vLLM in place, 7B, 4 L20", "s", 0.55, sync(B7), ""),
        ("NeMo RL, GRPO on policy, 8B, 16 H100, 2048 x 1,060", "s a step", 97.7, nemo8, "tests the whole"),
        ("NeMo RL, GRPO on policy, 32B, 32 H100, 2048 x 3,206", "s a step", 393, nemo32, "tests the whole"),
    ]


def checked() -> str:
    show = lambda x: f"{x:,.0f}" if x >= 20 else f"{x:,.2f}"  # noqa: E731
    rows = [[w, f"{show(p)} {u}", show(f), f"{f / p:.2f}", note] for w, u, p, f, note in checks()]
    return table(["what", "published", "by the formulas", "ratio", ""], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="update the tables of this page")
    parser.add_argument("--check", action="store_true", help="only the comparison with published figures")
    options = parser.parse_args()
    parts = {"checks": checked()} if options.check else {"projections": projections(), "checks": checked()}
    if not options.write:
        print("\n\n".join(parts.values()))
        return
    text = options.write.read_text(encoding="utf-8")
    for name, content in parts.items():
        marker = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert marker.search(text), f"{options.write} has no place for {name}"
        text = marker.sub(lambda match, content=content: match[1] + content + "\n" + match[2], text)
    options.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
