"""Fixtures of the engine tests; what they hand out is made in support/small_models.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.small_models import VOCABULARY, Linear, make_batch, make_model, weighted

from turnwise.core.batch import Batch


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers of support/small_models.py in one argument."""
    return SimpleNamespace(
        vocabulary=VOCABULARY, make_model=make_model, make_batch=make_batch, weighted=weighted, Linear=Linear
    )


@pytest.fixture
def batch() -> Batch:
    return weighted(make_batch())
