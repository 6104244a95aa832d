"""Every kernel compiles for a GPU, without one: Triton brings its compiler along (``pip install triton``). What the interpreter
forgives, a compiler does not. Launchers are called as they are; only the launch itself is replaced."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from support.devices import FOUND, INTERPRETED
from torch import Tensor

pytestmark = pytest.mark.skipif(not FOUND or INTERPRETED, reason="no Triton, or one that interprets")

NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.float8_e4m3fn: "fp8e4nv",
}
AMPERE, HOPPER = 80, 90
BOTH = [(AMPERE, torch.bfloat16), (HOPPER, torch.bfloat16)]


class Compiler:
    """Stands for the launch of a kernel: compiles it for what it is given."""

    def __init__(self, generation: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target, self.seen = GPUTarget("cuda", generation, 32), set[str]()

    def __call__(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        import triton
        from triton.compiler import ASTSource

        fixed = {(p.num,): args[p.num] for p in kernel.params if p.is_constexpr}
        kinds = {p.name: "constexpr" if p.is_constexpr else _kind(args[p.num]) for p in kernel.params}
        built = triton.compile(ASTSource(kernel, kinds, fixed), target=self.target, options=options)
        assert len(built.asm["ptx"]) > 0
        self.seen.add(kernel.__name__)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + NAMES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


@pytest.fixture
def compiler(generation: int, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    from triton.runtime.jit import JITFunction

    made = Compiler(generation)
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **options: made(kernel, *args, **options))
    return made


def load(name: str) -> Any:
    return importlib.import_module(f"turnwise.engines.kernels.triton.{name}")


def zeros(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=kind)


def whole(*shape: int) -> Tensor:
    return zeros(*shape, kind=torch.int64)


@pytest.mark.parametrize(("generation", "kind"), [*BOTH, (HOPPER, torch.float32)])
def test_decoding(compiler: Compiler, kind: torch.dtype):
    k, lanes, H, K, D, W = load("decode"), 6, 9, 3, 64, 40
    x, qkv = zeros(lanes, 96), zeros(lanes, (H + 2 * K) * D, kind=kind)
    for delta in (None, zeros(lanes, 96, kind=kind)):
        k.add_norm(x, delta, zeros(96), 1e-5, kind)
    k.swiglu(zeros(lanes, 200, kind=kind))
    cache = [zeros(lanes, K, W, D, kind=kind) for _ in range(2)]
    for norm in (None, zeros(H + K, D)):
        rotary = (zeros(W, D), zeros(W, D), norm, whole(lanes))
        q = zeros(lanes, H * D, kind=kind)
        for shared in (None, whole(2, 2)):
            k.decode_attention(qkv, *cache, None, W, *rotary, q, 0.1, 1e-5, shared)
        wide = [zeros(lanes, K, 2100, D, kind=kind) for _ in range(2)]  # long rows are split
        k.decode_attention(qkv, *wide, None, 2100, *rotary, q, 0.1, 1e-5)
        pages, table = [zeros(9, K, 64, D, kind=kind) for _ in range(2)], zeros(lanes, 2, kind=torch.int32)
        k.decode_attention(qkv, *pages, table, 100, *rotary, q, 0.1, 1e-5)
        k.rope_and_cache(qkv, *cache, *rotary, whole(lanes), q, 1e-5)
    for size in (D, 128, 256):
        q, rows = zeros(lanes, H * size, kind=kind), zeros(lanes, K, W, size, kind=kind)
        k.prefill_attention(q, rows, rows, None, whole(lanes + 1), whole(lanes), whole(lanes), 64, q, 0.1)
    q = zeros(lanes, H * D, kind=kind)
    k.prefill_attention(q, *pages, table, whole(lanes + 1), whole(lanes), whole(lanes), 64, q, 0.1)
    outputs = (whole(8, lanes), zeros(8, lanes))
    k.sample(zeros(lanes, 3000), zeros(lanes), whole(lanes), whole(lanes), whole(lanes), whole(lanes), *outputs)
    if compiler.target.arch >= HOPPER and kind == torch.bfloat16:  # older ones have no such numbers
        k.quantise(zeros(lanes, 96, kind=kind))
    assert compiler.seen >= {
        "_add_norm", "_swiglu", "_decode_attention", "_split_decode_attention", "_combine", "_rope_and_cache",
        "_prefill_attention", "_paged_prefill_attention", "_partial_softmax", "_sample",
    }  # fmt: skip


@pytest.mark.parametrize(("generation", "kind"), [*BOTH, (HOPPER, torch.float32)])
def test_learning(compiler: Compiler, kind: torch.dtype):
    t, rows, d, D, V = load("layers"), 6, 96, 64, 5000
    x, dh, weight = zeros(rows, d), zeros(rows, d, kind=kind), zeros(d)
    t.add_norm(x, dh, weight, 1e-5, kind)
    for residual_grad in (None, x):
        t.norm_backward(dh, x, weight, 1e-5, residual_grad)
    angles = (zeros(rows, D // 2), zeros(rows, D // 2))
    t.rotate_(zeros(rows, 15 * D, kind=kind), *angles, 12, D)
    heads = [zeros(rows, n, D, kind=kind) for n in (9, 3, 3)]
    t.rotate_backward(*heads, *angles)
    both = zeros(rows, 200, kind=kind)
    t.swiglu_backward(both, t.swiglu(both))
    x, y = t.gather_copies(heads[1], heads[2], whole(rows))
    ends, members = torch.zeros(rows + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    for rotated in (None, angles):
        t.sum_copies(x, y, ends, members, None, rotated)
    logits, target, inverse = zeros(rows, V), whole(rows), zeros(rows)
    for entropy in (False, True):
        for residual in (None, zeros(rows, V, kind=kind)):
            _, lse, found = t.log_probs(logits, target, inverse, entropy, residual)
        t.log_probs_backward(logits, target, inverse, lse, inverse, inverse if entropy else None, found, kind)
    assert compiler.seen >= {
        "_norm_backward", "_rotate", "_swiglu_backward", "_gather_copies", "_sum_copies", "_log_probs", "_log_probs_backward",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("generation", "kind", "size"),
    [*[(*each, 64) for each in BOTH], (HOPPER, torch.bfloat16, 128), (HOPPER, torch.float32, 16)],
)
def test_attention(compiler: Compiler, kind: torch.dtype, size: int):
    a, rows, H, K = load("attention"), 10, 4, 2
    d = zeros(rows, H + 2 * K, size, kind=kind)
    (q, k, v), (dq, dk, dv) = (zeros(rows, H + 2 * K, size, kind=kind).split([H, K, K], 1), d.split([H, K, K], 1))
    ends = torch.tensor([0, 4, rows], dtype=torch.int32)
    angles = (zeros(rows, size // 2), zeros(rows, size // 2))
    for source in (None, whole(rows)):
        where = (ends, ends, source, (6, 6), 0.1)
        out, stats = a.forward(q, k, v, *where)
        a.backward(out, q, k, v, out, stats, *where)
        a.d_queries(out, q, k, v, out, stats, *where, dq, angles)
        a.d_keys(out, q, k, v, stats, *where, dk, dv, angles)
    assert compiler.seen >= {"_forward", "_d_queries", "_d_keys"}
