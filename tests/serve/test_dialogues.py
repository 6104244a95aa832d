"""Random dialogues, played white-box and over HTTP by stock clients: equal ids, log-probabilities, advantages and loss."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("openai")
pytest.importorskip("anthropic")

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def dialogues():
    spec = importlib.util.spec_from_file_location("agent_dialogues", ROOT / "benchmarks" / "agent_dialogues.py")
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_random_dialogues_are_recorded_alike_white_box_and_over_http(dialogues):
    found = asyncio.run(dialogues.compare(30, calls=6))
    assert found["calls"] == 180 and set(found["protocols"]) == set(dialogues.PROTOCOLS)
    assert {"continue", "branch", "sub-agent", "compaction", "rewritten"} <= set(found["kinds"])


def test_a_difference_is_seen(dialogues, monkeypatch):
    """The comparison fails where the endpoint renders what it should point at."""
    from turnwise.rollout.lineage import Lineage

    monkeypatch.setattr(Lineage, "_continue", lambda self, keys, known, tail: 1 / 0)
    with pytest.raises(Exception):  # noqa: B017
        asyncio.run(dialogues.compare(4, calls=6))
