"""The operations of ``kernels.reference`` as C kernels for CPUs, in one pass over memory each; attention over packed sequences
and over the KV cache; and a small batch through all layers of a decoder in one call. float32 only.

``cpu.c`` is compiled once for a machine and loaded. It is linked without an OpenMP runtime, so its OpenMP calls bind to the one
that PyTorch has loaded. A second runtime would bring a second thread team, and two teams on the same cores wake each other up
at every product. ``TURNWISE_NATIVE=0`` disables the C kernels.

Legend: L packed positions, U of them computed, H query heads, K key heads, D head size. Knows tensors and compilers; neither
models nor requests.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turnwise.engines.kernels.reference import gather_copies, sum_copies  # noqa: F401 - only layouts on a GPU use them

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu.c")
# -fno-thread-jumps: GCC would compute both sides of a clamp, and dividing by the constant side gives subnormal numbers, which
# x86-64 handles in microcode: ``swiglu`` took fifteen times as long.
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-thread-jumps", "-fPIC")
CHUNK = 32  # rows of one partial sum, as in cpu.c
MAX_KEYS = 512  # with more keys, matrix products over blocks are faster than one key after another
HEAD_MULTIPLE = 8  # head sizes must be multiples of the widest vector that a kernel uses
PANEL_COLUMNS = 16  # as in cpu.c
MAX_ROWS = 64  # batch rows up to which ``FusedLayers`` is faster
MAX_BYTES = 1 << 30  # of the layers' weights, or of the head's, that may be stored a second time in panels
P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float  # pointer, integer, float
SIGNATURES = {
    "add_norm": (P, P, P, R, P, P, N, N),
    "norm_backward": (P, P, P, R, P, P, P, P, N, N),
    "rotate": (P, P, P, R, N, N, N, N),
    "swiglu": (P, P, N, N),
    "swiglu_backward": (P, P, P, P, N, N),
    "log_probs": (P, P, P, P, P, P, P, N, N),
    "log_probs_backward": (P, P, P, P, P, P, P, N, N),
    "varlen_attention": (P, P, P, P, P, P, P, P, N, N, N, N, N, N, R),
    "varlen_attention_backward": (P, P, P, P, P, P, P, P, P, P, P, P, N, N, N, N, N, N, N, R),
    "rope_and_cache": (P, P, P, P, P, P, P, P, N, N, N, N, N, N),
    "cached_attention": (P, P, P, P, P, P, P, N, N, N, N, N, N, N, R),
    "panel_matmul": (P, P, P, N, P, N, N, N),
    "forward_layers": (*[P] * 10, *[N] * 11, R, R),
}


@cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """The loaded kernels, or None and the reason."""
    if os.environ.get("TURNWISE_NATIVE") == "0":
        return None, "TURNWISE_NATIVE is 0"
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None, "no C compiler"
    try:
        # PyTorch's own OpenMP runtimes, which are mapped already: made global, our calls bind to them
        maps = Path("/proc/self/maps")
        lines = maps.read_text(encoding="utf-8").splitlines() if maps.is_file() else []
        for path in sorted({line.split()[-1] for line in lines}):
            if Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
                ctypes.CDLL(path, mode=os.RTLD_GLOBAL | os.RTLD_NOW)
        # RTLD_NOW: a symbol that does not bind now would crash later
        loaded = ctypes.CDLL(str(_built(compiler)), mode=os.RTLD_NOW)
        for name, types in SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = types, None
        return loaded, ""
    except (OSError, AttributeError, subprocess.SubprocessError) as fault:
        message = (getattr(fault, "stderr", None) or str(fault)).strip() or type(fault).__name__
        log.warning("the C kernels are missing, without which a CPU is slower: %s: %s", type(fault).__name__, message)
        return None, message.splitlines()[0]


def _built(compiler: str) -> Path:
    """The shared library; compiled unless an earlier run on the same kind of machine left it in the cache."""
    # what -march=native depends on: different machines may share a home directory
    machine, facts = platform.machine() + platform.processor(), Path("/proc/cpuinfo")
    if facts.is_file():
        prefixes = ("flags", "features", "model name", "cpu part")
        lines = {x for x in facts.read_text(encoding="utf-8").splitlines() if x.lower().startswith(prefixes)}
        machine = platform.machine() + "".join(sorted(lines))
    key = "\n".join((SOURCE.read_text(encoding="utf-8"), *FLAGS, compiler, machine))
    name = f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnwise"
    if (cache_dir / name).is_file():
        return cache_dir / name
    with tempfile.TemporaryDirectory() as folder:
        compiled, linked = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        compile_options, link_options = ["-c", str(SOURCE), "-o", str(compiled)], ["-lm", "-o", str(linked)]
        for command in ([compiler, *FLAGS, *compile_options], [compiler, "-shared", str(compiled), *link_options]):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            temporary = Path(shutil.copyfile(linked, cache_dir / f"{name}.{os.getpid()}"))
        except OSError as fault:
            log.warning("C kernels are compiled by every process, because none can keep them: %r", fault)
            cache_dir = Path(tempfile.mkdtemp(prefix="turnwise-"))
            temporary = Path(shutil.copyfile(linked, cache_dir / "kernels.so"))
        temporary.replace(cache_dir / name)  # atomically: another process may be loading it
    return cache_dir / name


def _run(name: str, *arguments: Tensor | float | Any) -> None:
    """Call a C function with the addresses of the tensors among its arguments."""
    getattr(library()[0], name)(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))


def fits(x: Tensor) -> bool:
    """Whether the kernels support this tensor."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    return library()[0] is not None


# ------------------------------------------------------------------ between the products of a layer


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, delta, weight = x.contiguous(), None if delta is None else delta.contiguous(), weight.contiguous()
    h, total = torch.empty_like(x), x if delta is None else torch.empty_like(x)
    _run("add_norm", x, delta, weight, eps, total, h, *x.shape)
    return total, h


def norm_backward(
    dh: Tensor, total: Tensor, weight: Tensor, eps: float, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dh, total, weight = dh.contiguous(), total.contiguous(), weight.contiguous()
    residual_grad = None if residual_grad is None else residual_grad.contiguous()
    dx, h = torch.empty_like(total), torch.empty_like(total)
    # a sum for every chunk of rows: their order, and so the bits, are the same with any number of threads
    partial = total.new_empty(-(-total.shape[0] // CHUNK), total.shape[1])
    _run("norm_backward", dh, total, weight, eps, residual_grad, dx, h, partial, *total.shape)
    return dx, dx, h, partial.sum(0)


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, size: int, sign: float = 1.0) -> None:
    _run("rotate", qkv, cos.contiguous(), sin.contiguous(), sign, qkv.shape[0], heads, size, qkv.stride(0))


def rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Overwrites the gradients where they are one buffer already."""
    whole = one_buffer(dq, dk, dv)
    if whole is None:
        whole = torch.cat((dq, dk, dv), 1).flatten(1)
    rotate_(whole, cos, sin, dq.shape[1] + dk.shape[1], dq.shape[2], -1.0)
    return whole


def one_buffer(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The buffer [L, (H + 2K) D] that q [L, H, D], k and v [L, K, D] are adjacent views of, if there is one."""
    rows, heads, size = q.shape[0], (q.shape[1], k.shape[1], v.shape[1]), q.shape[2]
    width = sum(heads) * size
    address, adjacent = q.data_ptr(), True
    for part, count in zip((q, k, v), heads):
        adjacent &= part.stride() == (width, size, 1) and part.data_ptr() == address
        address += count * size * part.element_size()
    return q.as_strided((rows, width), (width, 1)) if adjacent else None


def swiglu(gate_up: Tensor) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _run("swiglu", gate_up, out, *out.shape)
    return out


def swiglu_backward(gate_up: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    d, d_gate_up = d.contiguous(), torch.empty_like(gate_up)
    act = torch.empty_like(d)
    _run("swiglu_backward", gate_up, d, d_gate_up, act, *d.shape)
    return d_gate_up, act


def log_probs(
    logits: Tensor, targets: Tensor, inverse: Tensor, with_entropy: bool, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    logits, targets, inverse = logits.contiguous(), targets.contiguous(), inverse.contiguous()
    logp, lse = torch.empty_like(inverse), torch.empty_like(inverse)
    entropy = torch.empty_like(inverse) if with_entropy else None
    assert residual is None or residual.is_contiguous()
    _run("log_probs", logits, targets, inverse, logp, lse, entropy, residual, *logits.shape)
    return logp, lse, entropy


def log_probs_backward(
    logits: Tensor, targets: Tensor, inverse: Tensor, lse: Tensor, g_logp: Tensor | None, g_entropy: Tensor | None,
    entropy: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Overwrites the logits."""
    logits, targets, inverse, lse = (x.contiguous() for x in (logits, targets, inverse, lse))
    if entropy is None:
        g_entropy = None
    grads = [None if g is None else g.contiguous() for g in (g_logp, g_entropy, entropy)]
    _run("log_probs_backward", logits, targets, inverse, lse, *grads, *logits.shape)
    return logits.to(dtype)


# ------------------------------------------------------------------ attention over packed sequences


@dataclass(frozen=True, eq=False)
class Packing:
    """The rows that each sequence attends to, and those that it computes."""

    row: Tensor  # [L] which of the U rows each position is
    start: Tensor  # [S + 1]
    owned: Tensor  # [L] bytes: 1 where the position's output is computed
    longest: int

    @classmethod
    def of(cls, row: Tensor, first: Tensor, start: Tensor) -> Packing:
        owned = torch.zeros(len(row), dtype=torch.uint8)
        owned[first] = 1
        return cls(row.contiguous(), start.contiguous(), owned, int((start[1:] - start[:-1]).max()))


def attention_fits(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> bool:
    """Whether ``varlen_attention`` supports these tensors."""
    supported = q.shape[2] == v.shape[2] and q.shape[2] % HEAD_MULTIPLE == 0 and q.shape[1] % k.shape[1] == 0
    return supported and packing.longest <= MAX_KEYS and all(map(fits, (q, k, v)))


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, packing: Packing) -> Tensor:
    """q [U, H, D], k and v [U, K, D] -> [U, H, D], without padding or copies of shared prefixes."""
    return _VarlenAttention.apply(q, k, v, scale, packing)


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, packing: Packing) -> Tensor:
        if one_buffer(q, k, v) is None:
            q, k, v = torch.cat((q, k, v), 1).split([q.shape[1], k.shape[1], v.shape[1]], 1)
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2])
        rows = (packing.row, packing.start, packing.owned)
        sizes = (len(packing.start) - 1, packing.longest, q.shape[1], k.shape[1], q.shape[2], q.stride(0))
        _run("varlen_attention", q, k, v, *rows, out, lse, *sizes, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.packing = scale, packing
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        packing: Packing = ctx.packing
        d_out = d_out.contiguous()
        heads = (q.shape[1], k.shape[1], v.shape[1])
        whole = q.new_zeros(len(q), sum(heads), q.shape[2])
        dq, dk, dv = whole.split(heads, 1)
        rows = (packing.row, packing.start, packing.owned)
        sizes = (len(packing.start) - 1, packing.longest, *heads[:2], q.shape[2], whole.stride(0), q.stride(0))
        _run("varlen_attention_backward", q, k, v, *rows, out, lse, d_out, dq, dk, dv, *sizes, ctx.scale)
        return dq, dk, dv, None, None


# ------------------------------------------------------------------ attention over the KV cache


def rope_and_cache(
    qkv: Tensor, keys: Tensor, values: Tensor, table: Tensor | None, cos: Tensor, sin: Tensor, row: Tensor, position: Tensor
) -> None:  # fmt: skip
    """Rotate the queries and keys of qkv [n, (H + 2K) D] in place; copy keys and values to their columns of the cache
    [rows, K, T, D]. cos and sin [context, D/2]. ``table``: int32 [rows, pages] the pages of T columns that a row has, where
    the cache is [pages, K, T, D]."""
    _, heads, width, size = keys.shape
    sizes = (qkv.shape[0], qkv.shape[1] // size - 2 * heads, heads, size, width, 0 if table is None else table.shape[1])
    _run("rope_and_cache", qkv, cos, sin, row, position, table, keys, values, *sizes)


def cached_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, table: Tensor | None, row: Tensor, position: Tensor, longest: int, scale: float
) -> Tensor:  # fmt: skip
    """Attention of every token over the columns of its row up to its own, [n, H D]. ``longest``: at least the largest
    position + 1. ``table``: as in ``rope_and_cache``."""
    _, heads, width, size = keys.shape
    query_heads = qkv.shape[1] // size - 2 * heads
    out = qkv.new_empty(qkv.shape[0], query_heads * size)
    pages_per_row = 0 if table is None else table.shape[1]
    sizes = (qkv.shape[0], longest, query_heads, heads, size, width, pages_per_row)
    _run("cached_attention", qkv, row, position, table, keys, values, out, *sizes, scale)
    return out


# ------------------------------------------------------------------ a small batch through all layers
#
# The matrix products are C kernels too, over weights stored in panels. OpenBLAS repacks both operands of every product, which
# pays for many rows; a decode step has few. ``benchmarks/cpu_products.py`` compares the two paths. Beside other libraries than
# OpenBLAS this one is disabled: with MKL on an x86-64 with AVX-512 (one thread, CPU time of a decode step) it is 1.1 to 1.4
# times faster up to 8 rows, equal at 16 and slower from 32 rows on, and a 135M model with one row gains nothing. Accelerate was
# not measured.


@cache
def panels_pay() -> bool:
    return "BLAS_INFO=open" in torch.__config__.show()


def panels_fit(weights: Sequence[Tensor]) -> bool:
    """Whether products with these [in, out] weights can use panels."""
    divisible = all(w.shape[1] % PANEL_COLUMNS == 0 for w in weights)
    return divisible and panels_pay() and sum(w.nbytes for w in weights) <= MAX_BYTES


def to_panels(weight: Tensor) -> Tensor:
    """[in, out] -> [out / 16, in, 16]."""
    return weight.view(len(weight), -1, PANEL_COLUMNS).transpose(0, 1).contiguous()


def panel_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [L, in] times panels -> [L, out]."""
    out = x.new_empty(len(x), len(weight) * PANEL_COLUMNS)
    _run("panel_matmul", x, weight, None, 0, out, len(x), x.shape[1], out.shape[1])
    return out


class FusedLayers:
    """The layers of a decoder with their weights in panels, and its head where that fits."""

    def __init__(self, layers: Sequence[Any], head: Tensor) -> None:
        self.head = to_panels(head) if panels_fit([head]) else None
        self.d, self.F = layers[0].down.shape[1], layers[0].down.shape[0]
        self.weights: list[Tensor | None] = []  # keeps the tensors alive that the table points to
        for w in layers:  # in the order of the C struct
            qkv, out, gate_up, down = map(to_panels, (w.qkv, w.out, w.gate_up, w.down))
            self.weights += [w.norm, qkv, w.qkv_bias, out, w.out_bias, w.mlp_norm, gate_up, down]
        addresses = [None if t is None else t.data_ptr() for t in self.weights]
        self.table = (ctypes.c_void_p * len(addresses))(*addresses)
        self.count = len(layers)

    def __call__(
        self, x: Tensor, kv_cache: Any, cos: Tensor, sin: Tensor, row: Tensor, position: Tensor, heads: int, longest: int,
        scale: float, eps: float, last: bool,
    ) -> Tensor:  # fmt: skip
        """x [L, d] through all layers, in place; ``LlamaDecoder._forward`` says what is computed."""
        key_heads, width, size = kv_cache.keys[0].shape[1:]
        workspace = x.new_empty(len(x) * (self.d + (2 * heads + 2 * key_heads) * size + 3 * self.F))
        # anew at each call: the cache moves when it grows
        addresses = [[t.data_ptr() for t in tensors] for tensors in (kv_cache.keys, kv_cache.values)]
        caches = [(ctypes.c_void_p * self.count)(*of_layers) for of_layers in addresses]
        pages_per_row = 0 if kv_cache.table is None else kv_cache.table.shape[1]
        _run(
            "forward_layers", x, self.table, *caches, cos, sin, row, position, kv_cache.table, workspace, len(x), self.count,
            last, self.d, self.F, heads, key_heads, size, width, pages_per_row, longest, scale, eps,
        )  # fmt: skip
        return x
