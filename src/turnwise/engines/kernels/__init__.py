"""Kernels that both engines share: plain PyTorch references, Triton and C versions. Knows no model."""
