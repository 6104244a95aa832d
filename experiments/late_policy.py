"""Training on data of an exact age: every batch is sampled by the policy of ``lag`` optimiser steps ago.

``--staleness k`` of a run is a limit: how old tokens are depends on the speed of generator and learner and on the rows of the
KV cache. Here the age does not depend on the machine: the generator of a synchronous run gets each publication ``lag`` steps
late, so every token of step t was sampled by the policy of step max(0, t − lag). Evaluations use the newest policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar


def train(lag: int, **settings: Any) -> None:
    """Train with a generator whose weights are ``lag`` steps old."""
    from turnwise.engines.generator.generator import LocalGenerator
    from turnwise.evaluation.evaluator import Evaluation, Evaluator
    from turnwise.training import api, build, engines

    class LateGenerator(LocalGenerator):
        """Loads the weights of ``lag`` publications ago."""

        kept: ClassVar[deque[tuple[Mapping[str, Any], int]]] = deque(maxlen=lag + 1)

        async def publish(self, weights: Mapping[str, Any], version: int) -> None:
            self.kept.append(({name: tensor.clone() for name, tensor in weights.items()}, version))
            await super().publish(*self.kept[0])

        async def load(self, which: int) -> None:
            await super().publish(*self.kept[which])

    class NewestPolicy(Evaluator):
        """Evaluates the newest weights, then returns to the old ones."""

        async def run(self, split: str = "held_out") -> Evaluation:
            assert isinstance(self.generator, LateGenerator)
            await self.generator.load(-1)
            try:
                return await super().run(split)
            finally:
                await self.generator.load(0)

    make_evaluator = build.make_evaluator
    if lag:
        make_local = engines.make_local_generator
        engines.make_local_generator = partial(make_local, kind=LateGenerator, share_weights=False)  # type: ignore[assignment]
        build.make_evaluator = lambda *given: NewestPolicy(**vars(make_evaluator(*given)))  # type: ignore[assignment]
    api.train(**settings)
