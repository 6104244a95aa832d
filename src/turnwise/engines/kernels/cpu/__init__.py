"""Kernels in C for a CPU: compiled when first needed, kept, and done without where there is no compiler."""
