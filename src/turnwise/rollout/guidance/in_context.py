"""Help in the prompt of a part of every group, whether it failed or not, which the policy is trained to do without."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from turnwise.core.protocols import Session
from turnwise.core.records import Group
from turnwise.errors import RecipeError
from turnwise.rollout.guidance.base import LiveGuidance, PlainGroups
from turnwise.rollout.guidance.support import Support
from turnwise.rollout.guidance.when_stuck import GUIDED
from turnwise.rollout.strategies.base import GroupRequest, Strategy


@dataclass(frozen=True)
class HalfInContext:
    """``share`` of each group reads a document in its prompt: the text of a file, or hints 1 to ``tier`` of the environment. The
    record does not contain it, so what is trained is the policy without the document. The strategy grows the other part."""

    share: float = 0.5
    tier: int = 1
    document: str = ""  # path of a text file; empty: the environment's hints

    reads_rewards = False

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1 or self.tier < 1:
            raise RecipeError(f"need 0 <= share < 1 and tier >= 1, got {self}")
        if self.document and not Path(self.document).is_file():
            raise RecipeError(f"there is no file {self.document}; write the path of a text, or leave document out")

    @property
    def requirements(self) -> frozenset[str]:
        return frozenset({"help" if self.document else "hints"})

    def open(self, seed: int) -> LiveGuidance:
        text = Path(self.document).read_text(encoding="utf-8").strip() if self.document else ""
        return _HalfInContext(rule=self, text=text)


@dataclass
class _HalfInContext(PlainGroups):
    rule: HalfInContext = field(default_factory=HalfInContext)
    text: str = ""

    def begin(self, request: GroupRequest, strategy: Strategy) -> Coroutine[Any, Any, Group]:
        guided = int(self.rule.share * request.size)
        plain = strategy.begin(replace(request, size=request.size - guided))
        return self._grow(request, plain, request.sessions(guided, GUIDED))

    async def _grow(self, request: GroupRequest, plain: Coroutine[Any, Any, Group], sessions: list[Session]) -> Group:
        tier = 0 if self.text else self.rule.tier
        support = Support(tier=tier, text=self.text, recorded=False)
        group, played = await asyncio.gather(plain, request.play_all(sessions, GUIDED, support=support))
        group = replace(group, trajectories=(*group.trajectories, *played))
        self.count_results(group.trajectories)
        return group
