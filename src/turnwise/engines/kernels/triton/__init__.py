"""Triton kernels for NVIDIA GPUs. Each computes what a function in kernels.reference or kernels.decode_reference defines."""
