"""The private interfaces of PyTorch exist, take the arguments that ``compat`` passes and compute what it says."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch

import turnwise.engines
from turnwise.engines import compat

GPU = torch.cuda.is_available()
FP8 = GPU and torch.cuda.get_device_capability() >= (8, 9)


def arguments(schema: torch._C.FunctionSchema) -> list[str]:
    return [a.name for a in schema.arguments]


def pairs(seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    shapes = [(3, 4), (5,), ()]
    return ([torch.randn(s, generator=g) for s in shapes], [torch.randn(s, generator=g) for s in shapes])


def test_flash_attention_takes_these_arguments():
    names = arguments(torch.ops.aten._flash_attention_forward.default._schema)
    assert names[:10] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
    ]  # fmt: skip
    assert {"scale", "window_size_left", "window_size_right"} <= set(names)


def test_scaled_mm_takes_these_arguments():
    assert callable(torch._scaled_mm)
    assert {"self", "mat2", "scale_a", "scale_b", "out_dtype"} <= set(
        arguments(torch.ops.aten._scaled_mm.default._schema)
    )


def test_foreach_functions_work_in_place():
    targets, others = pairs()
    before = [t.clone() for t in targets]
    compat.foreach_add_(targets, others)
    assert all(torch.equal(t, b + o) for t, b, o in zip(targets, before, others))
    compat.foreach_copy_(targets, before)
    assert all(torch.equal(t, b) for t, b in zip(targets, before))
    compat.foreach_mul_(targets, 0.5)
    assert all(torch.equal(t, b * 0.5) for t, b in zip(targets, before))
    compat.foreach_copy_(targets, before)
    compat.foreach_lerp_(targets, others, 0.25)
    assert all(torch.equal(t, b.lerp(o, 0.25)) for t, b, o in zip(targets, before, others))
    compat.foreach_zero_(targets)
    assert not any(t.any() for t in targets)


def test_foreach_copy_converts_dtypes():
    targets, sources = pairs()
    halves = [t.bfloat16() for t in targets]
    compat.foreach_copy_(halves, sources)
    assert all(torch.equal(h, s.bfloat16()) for h, s in zip(halves, sources))


@pytest.mark.skipif(not FP8, reason="needs a GPU with fp8 units")
def test_scaled_mm_multiplies():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 32, generator=g).cuda().to(torch.float8_e4m3fn) for _ in range(2))
    sa, sb = torch.rand(16, 1, generator=g).cuda(), torch.rand(16, 1, generator=g).cuda()
    out = compat.scaled_mm(a, b.t(), sa, sb.t(), torch.bfloat16)
    expected = (a.float() * sa) @ (b.float() * sb).t()
    torch.testing.assert_close(out.float(), expected, atol=5e-2, rtol=2e-2)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 3])
def test_flash_attention_is_causal_attention(window: int | None):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, 2, 16, generator=g).cuda().bfloat16() for _ in range(3))
    starts = torch.tensor([0, 5, 12], dtype=torch.int32, device="cuda")
    out = compat.flash_attention_varlen(q, k, v, starts, starts, (7, 7), 0.25, window)
    for a, b in ((0, 5), (5, 12)):
        score = torch.einsum("qhd,khd->hqk", q[a:b].float(), k[a:b].float()) * 0.25
        age = torch.arange(b - a, device="cuda")[:, None] - torch.arange(b - a, device="cuda")
        hidden = (age < 0) if window is None else (age < 0) | (age >= window)
        p = score.masked_fill(hidden, -torch.inf).softmax(-1)
        torch.testing.assert_close(
            out[a:b].float(), torch.einsum("hqk,khd->qhd", p, v[a:b].float()), atol=2e-2, rtol=2e-2
        )


def test_the_engines_use_private_interfaces_only_here():
    private = re.compile(r"torch\._(?!_)\w+|torch\.ops\.aten\._\w+|torch\._C\b")
    root = pathlib.Path(turnwise.engines.__file__).parent
    users = {p.name for p in root.rglob("*.py") if private.search(p.read_text(encoding="utf-8"))}
    assert users == {"compat.py"}
