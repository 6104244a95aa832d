"""The model on paper: its page is what the script says, and published figures are not far from it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def paper():
    spec = importlib.util.spec_from_file_location("scaling_on_paper", ROOT / "benchmarks" / "scaling_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(paper):
    text = (ROOT / "docs" / "scaling.md").read_text()
    for made in (paper.projections(), paper.checked()):
        assert made in text, "run `python benchmarks/scaling_model.py --write docs/scaling.md`"


def test_published_figures_are_not_far(paper):
    for what, _, published, reckoned, note in paper.checks():
        if "too small" not in note:
            assert 0.7 <= reckoned / published <= 1.2, what


def test_what_must_hold(paper):
    p = paper
    rates = [p.generation(p.B7, p.H200, 1, 512, 1024, most) for most in (1, 16, 256)]
    assert rates == sorted(rates)  # more lanes, more tokens
    assert p.generation(p.B70, p.H200, 1, 512, 1024) == 0.0  # 141 GB of weights leave no cache
    assert p.learner_bytes(p.B7, 64) < p.learner_bytes(p.B7, 8) < p.learner_bytes(p.B7, 1)
    fast = p.whole(p.B7, p.H200, 64, 1, 4096, 512, 1024, 1024)
    slow = p.whole(p.B7, p.H200, 64, 1, 4096, 512, 1024, 4096)
    assert slow[0] > fast[0] and slow[1:] == fast[1:]  # a longer tail delays generation alone
    assert p.sync(p.B1) < p.sync(p.B70) < 5
