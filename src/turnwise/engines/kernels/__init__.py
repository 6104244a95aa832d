"""Kernels that both engines share: PyTorch references, Triton kernels for GPUs and C kernels for CPUs. Knows no model.

``add_norm`` (residual add and RMSNorm) and ``swiglu`` exist in five modules:

- ``reference``: plain PyTorch, returns new tensors. Defines what all the others compute, and runs where no kernel does.
- ``decode_reference``: the same arithmetic (it calls ``reference``) with the in-place signatures of a decode step.
- ``triton.decode``: one Triton kernel each, with the signatures of ``decode_reference``.
- ``triton.layers``: the kernels of ``triton.decode`` with the signatures of ``reference``, plus their backward passes.
- ``cpu.layers``: one C kernel each, float32, with the signatures of ``reference``.

``dispatch.ops_for`` chooses among the modules with the signatures of ``reference``; the generator's ``kernels_for`` chooses the
module for CUDA graphs.
"""
