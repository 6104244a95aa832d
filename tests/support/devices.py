"""Where kernels are tested: on a GPU where there is one; elsewhere under Triton's interpreter, if TRITON_INTERPRET=1 says so."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
FOUND = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KINDS = [torch.float32, torch.bfloat16] if GPU else [torch.float32]  # NumPy, which interprets, has no bfloat16
needs_triton = pytest.mark.skipif(
    not FOUND or not (GPU or INTERPRETED), reason="no Triton" if not FOUND else "no GPU, and TRITON_INTERPRET is not 1"
)
