"""Triton's interpreter as a Triton backend for CPUs, for a trial of vLLM: its sampler that returns masks needs Triton, and no
package of Triton for CPUs is published. Loaded by the entry points that ``install`` writes; slow, and meant for tiny models.
"""

from __future__ import annotations

import os
from pathlib import Path

ENTRY_POINTS = """[triton.backends]
cpu = trials.interpreted_triton

[vllm.general_plugins]
interpreted_triton = trials.interpreted_triton.vllm_plugin:register
"""
ENVIRONMENT = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_BACKEND": "cpu", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def install(folder: Path) -> dict[str, str]:
    """Write the entry points to a folder; returns the environment in which vLLM finds them."""
    info = folder / "interpreted_triton-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: interpreted-triton\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    paths = [str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
