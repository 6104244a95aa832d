"""Runs as processes of one thread each, and the rows they leave."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
Row = dict[str, Any]


def surroundings() -> dict[str, str]:
    """One thread for each process; the project and the environments of bench/ can be imported."""
    paths = (str(ROOT / "src"), str(ROOT / "bench"), os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}


def call(line: list[str], seconds: float | None = None) -> Row:
    """What a run prints, or its error; nothing at all of one that takes longer than ``seconds``."""
    try:
        done = subprocess.run(line, capture_output=True, text=True, env=surroundings(), timeout=seconds)
    except subprocess.TimeoutExpired:
        return {}
    if done.returncode:
        return {"error": done.stderr.strip()[-400:]}
    return dict(json.loads(done.stdout))


def read(paths: list[Path]) -> list[Row]:
    return [json.loads(line) for path in paths if path.is_file() for line in path.read_text().splitlines()]
