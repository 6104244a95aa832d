"""Fixtures of the golden tests."""

from __future__ import annotations

import pytest
from support.golden import ORACLE, RECIPE, Side


@pytest.fixture(params=[ORACLE, RECIPE], ids=["oracle", "recipe"])
def side(request: pytest.FixtureRequest) -> Side:
    """Every test that takes it runs twice: on the oracle, and on the recipe of the same name."""
    return request.param
