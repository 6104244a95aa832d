"""Every test that takes ``tool`` or ``session`` runs on each isolation this machine can offer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.tool_pools import ISOLATING, NAMES, use

from turnwise.tools import PythonTool, SandboxSession


@pytest.fixture(params=NAMES)
def tool(request: pytest.FixtureRequest) -> PythonTool:
    return use(request.param)


@pytest.fixture
def session(tool: PythonTool) -> Iterator[SandboxSession]:
    with tool.open() as opened:
        yield opened


@pytest.fixture(params=ISOLATING)
def jail(request: pytest.FixtureRequest) -> Iterator[SandboxSession]:
    """A session on a mechanism that claims to isolate: everything but ``limits``."""
    with use(request.param).open() as opened:
        yield opened
