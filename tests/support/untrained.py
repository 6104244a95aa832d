"""An untrained tiny model in a built-in environment, for tests of how groups grow."""

from __future__ import annotations

import asyncio
import copy

import torch

from turnwise.config.settings import Settings
from turnwise.core.batch import pack
from turnwise.core.records import Task
from turnwise.core.signals import Signal
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.strategies import GroupRequest
from turnwise.training import build, engines
from turnwise.training.plan import EnvSpec


class Untrained:
    """An untrained model in an environment: grows groups and measures log-probabilities."""

    def __init__(self, env: str, **more):
        torch.manual_seed(0)
        chosen = Settings.of({"env": env, "hidden": 32, "max_tokens": 6, "max_turns": 4, "context": 600, **more})
        self.env_spec = EnvSpec.from_settings(chosen)
        tokenizer = build.load_tokenizer(chosen, self.env_spec)
        self.model = build.load_model(chosen, len(tokenizer))
        self.stock = copy.deepcopy(self.model)
        self.renderer = Renderer(tokenizer)
        self.generator = engines.make_local_generator(chosen, self.model, self.renderer)
        self.play = build.make_play(self.env_spec, self.renderer, build.sampling_settings(chosen))
        self.env = env

    def request(self, seed=1, size=6):
        open_session = lambda i, draft=False: self.generator.open(1000 * seed + i)  # noqa: E731
        return GroupRequest(str(seed), Task(self.env, seed), size, open_session, self.play, {}, 100)

    def grow(self, strategy, seed=1, size=6):
        async def run():
            return await strategy.begin(self.request(seed, size))

        return asyncio.run(run())

    def logp(self, group):
        batch = pack([group])
        learner = LocalLearner(self.model, LearnerSettings())
        return learner.measure(batch, frozenset({Signal.PROXIMAL}))[Signal.PROXIMAL].x.float(), batch.behaviour.x
