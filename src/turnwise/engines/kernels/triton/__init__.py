"""Triton kernels for NVIDIA GPUs: ``layers`` for a learner, ``decode`` for a decoder in CUDA graphs, ``attention`` for both."""
