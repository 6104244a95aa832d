"""vLLM with interpreted kernels: top-k and top-p by its own PyTorch code, since the interpreter cannot run that kernel."""

from __future__ import annotations


def register() -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
