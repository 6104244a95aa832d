"""Our Triton kernels beside libraries that offer the same operations: Liger (norm, SwiGLU) and FlexAttention (ragged attention).

    python benchmarks/library_kernels.py [--rows 16384] [--width 2048] [--mlp 8192] [--sequences 64] [--repeats 30]

One GPU. Each operation runs forward and backward, sides take turns, medians in microseconds. Liger is optional: without it
its rows are left out. Norms are compared as a decoder layer needs them: residual add, RMSNorm, and their backward pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from turnwise.engines.kernels.triton import attention, layers

Step = Callable[[], object]


def median_us(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    """The median device time of each step; they take turns, so a change of clocks hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(5):
            step()
    for _ in range(repeats):
        for name, step in steps.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3)
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def norm_steps(rows: int, width: int) -> dict[str, Step]:
    half = torch.bfloat16
    x, delta = torch.randn(rows, width, device="cuda"), torch.randn(rows, width, device="cuda", dtype=half)
    weight, d_out = torch.rand(width, device="cuda"), torch.randn(rows, width, device="cuda", dtype=half)
    residual_grad = torch.randn(rows, width, device="cuda")

    def ours() -> object:
        total, _ = layers.add_norm(x, delta, weight, 1e-5, half)
        return layers.norm_backward(d_out, total, weight, 1e-5, residual_grad)

    steps: dict[str, Step] = {"turnwise": ours}
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Fused
    except ImportError:
        return steps
    a, b = x.to(half).requires_grad_(), delta.clone().requires_grad_()
    w, d_residual = weight.to(half).requires_grad_(), residual_grad.to(half)

    def liger() -> object:
        out, total = Fused.apply(a, b, w, 1e-5)
        return torch.autograd.grad((out, total), (a, b, w), (d_out, d_residual))

    return {**steps, "liger (bf16 residual)": liger}


def swiglu_steps(rows: int, mlp: int) -> dict[str, Step]:
    gate_up = torch.randn(rows, 2 * mlp, device="cuda", dtype=torch.bfloat16)
    d_out = torch.randn(rows, mlp, device="cuda", dtype=torch.bfloat16)

    def ours() -> object:
        layers.swiglu(gate_up)
        return layers.swiglu_backward(gate_up, d_out)

    steps: dict[str, Step] = {"turnwise": ours}
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return steps
    gate, up = (part.contiguous().requires_grad_() for part in gate_up.chunk(2, 1))

    def liger() -> object:
        return torch.autograd.grad(LigerSiLUMulFunction.apply(gate, up), (gate, up), d_out)

    return {**steps, "liger": liger}


def attention_steps(lengths: list[int], heads: int, kv_heads: int, size: int) -> tuple[dict[str, Step], float]:
    """Packed causal sequences; also the largest relative difference of the outputs."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    total, half = sum(lengths), torch.bfloat16
    q = torch.randn(total, heads, size, device="cuda", dtype=half)
    k, v = torch.randn(2, total, kv_heads, size, device="cuda", dtype=half)
    d_out, scale = torch.randn_like(q), size**-0.5
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    longest = (max(lengths), max(lengths))

    def ours() -> object:
        out, stats = attention.forward(q, k, v, bounds, bounds, None, longest, scale)
        return attention.backward(d_out, q, k, v, out, stats, bounds, bounds, None, longest, scale)

    document = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), torch.tensor(lengths, device="cuda"))

    def same_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (i >= j)

    compiled, make_mask = torch.compile(flex_attention), torch.compile(create_block_mask)
    parts = [t.transpose(0, 1)[None].contiguous().requires_grad_() for t in (q, k, v)]
    grad = d_out.transpose(0, 1)[None].contiguous()
    kept_mask = make_mask(same_document, None, None, total, total, device="cuda")

    def flex(mask: object) -> object:
        out = compiled(*parts, block_mask=mask, scale=scale, enable_gqa=heads != kv_heads)
        return torch.autograd.grad(out, parts, grad)

    with torch.no_grad():
        expected = compiled(*parts, block_mask=kept_mask, scale=scale, enable_gqa=heads != kv_heads)[0].transpose(0, 1)
        actual = attention.forward(q, k, v, bounds, bounds, None, longest, scale)[0]
        difference = float((actual.float() - expected.float()).norm() / expected.float().norm())
    steps: dict[str, Step] = {
        "turnwise": ours,
        "flex attention, mask kept": lambda: flex(kept_mask),
        "flex attention, mask of each batch": lambda: flex(
            make_mask(same_document, None, None, total, total, device="cuda")
        ),
    }
    return steps, difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 16384), ("width", 2048), ("mlp", 8192), ("sequences", 64), ("repeats", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(
        64, 2 * options.rows // options.sequences - 64, (options.sequences,), generator=generator
    ).tolist()
    show = lambda name, row: print(json.dumps({name: row}), flush=True)  # noqa: E731
    show("machine", {"device": torch.cuda.get_device_name(), "torch": torch.__version__})
    rows, repeats = options.rows, options.repeats
    show(f"add and RMSNorm, {rows} x {options.width}", median_us(norm_steps(rows, options.width), repeats))
    show(f"SwiGLU, {rows} x {options.mlp}", median_us(swiglu_steps(rows, options.mlp), repeats))
    for heads, kv_heads, size in ((9, 3, 64), (32, 8, 64), (32, 8, 128)):
        steps, difference = attention_steps(lengths, heads, kv_heads, size)
        name = f"ragged attention, {sum(lengths)} positions in {len(lengths)} sequences, {heads}/{kv_heads} heads of {size}"
        show(name, {**median_us(steps, repeats), "relative difference": round(difference, 5)})


if __name__ == "__main__":
    main()
