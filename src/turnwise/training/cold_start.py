"""The supervised cold start: demonstrations of mixed quality, imitated for a short while.

Imitation is the same algebra: no gain, and the negative log-likelihood as the only cost.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from turnwise.algebra.aggregate import Mean
from turnwise.algebra.diagnostics import finish
from turnwise.algebra.gate import NoGate
from turnwise.algebra.objective import Objective
from turnwise.algebra.penalty import NegativeLogLikelihood, WeightedPenalty
from turnwise.algebra.ratio import OnPolicy
from turnwise.algebra.value import Constant
from turnwise.config.settings import Settings
from turnwise.core.batch import pack
from turnwise.core.levels import TOKEN
from turnwise.core.protocols import Learner
from turnwise.core.records import Group, Status, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.errors import EnvironmentFault, SettingError
from turnwise.rollout.episode import EpisodeLimits
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import play_scripted
from turnwise.training import build, engines
from turnwise.training.agents import agent_demonstrator, play_demonstration
from turnwise.training.env_spec import EnvSpec
from turnwise.training.events import RunEvents
from turnwise.training.interrupt import run_async

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMITATION = Objective(
    Constant(0.0), OnPolicy(), NoGate(), Mean(TOKEN), (WeightedPenalty(1.0, NegativeLogLikelihood()),)
)


def cold_start(
    settings: Settings, env_spec: EnvSpec, tokenizer: Any, model: PreTrainedModel, steps: int, events: RunEvents
) -> None:
    """Train ``model`` in place to imitate the environment's demonstrator. A killed one begins again, alike."""
    if not env_spec.can_demonstrate:
        raise SettingError(f"{settings.env} has no `demonstrate`, so there is nothing to imitate; write --cold-steps 0")
    tasks = env_spec.tasks("train", "cold start")
    count = min(settings.cold_demos, steps * settings.cold_batch)
    with events.stage("demonstrations", count, "episodes"):
        demo_tasks = [tasks.draw(n) for n in range(count)]
        renderer, wording = build.make_renderer(settings, tokenizer), agent_demonstrator(env_spec.agent)
        agent = env_spec.agent
        by_agent = partial(play_demonstration, agent, wording) if agent is not None and wording else None
        demos = demonstrations(demo_tasks, env_spec.make, renderer, env_spec.limits, play_one=by_agent)
    events.message(f"{len(demos)} demonstrations of mixed quality: {quality(demos)}")
    learner = engines.make_cold_start_learner(settings, model, steps)
    with events.stage("cold start", steps):
        start = time.perf_counter()

        def report(step: int, metrics: dict[str, float]) -> None:
            rate = metrics["tokens"] * step / (time.perf_counter() - start)
            events.step("cold start", step, steps, {**metrics, "tokens_per_second": rate})

        imitate(learner, demos, steps, settings.cold_batch, stable_seed(settings.seed, "cold start"), report)


def quality(demos: Sequence[Trajectory]) -> str:
    """The share that succeeds, or the mean reward where no success is reported."""
    if all(t.success is None for t in demos):
        return f"their mean reward is {sum(t.reward for t in demos) / len(demos):.3g}"
    return f"{sum(bool(t.success) for t in demos) / len(demos):.0%} of them succeed"


def demonstrations(
    tasks: Sequence[Task],
    open_environment: Callable[[Task], object],
    renderer: Renderer,
    limits: EpisodeLimits,
    player: str = "demonstrator",
    play_one: Callable[..., Coroutine[Any, Any, Trajectory]] | None = None,
) -> list[Trajectory]:
    """One episode of each task: of a scripted policy, or by ``play_one``."""
    play_one = play_one or partial(play_scripted, player)

    async def play() -> list[Trajectory]:
        played: list[Trajectory] = []
        for i in range(0, len(tasks), 64):  # enough at once to hide the tools' latency, few enough to fit in memory
            some = enumerate(tasks[i : i + 64], start=i)
            played += await asyncio.gather(
                *(play_one(open_environment(task), f"demo.{n}", task, renderer, limits) for n, task in some)
            )
        return played

    played = run_async(play())
    good = [t for t in played if t.status != Status.FAILED]
    if not good:
        raise EnvironmentFault(f"no demonstration could be played: {played[0].reason if played else 'no tasks'}")
    return good


def imitate(
    learner: Learner,
    demos: Sequence[Trajectory],
    steps: int,
    size: int,
    seed: int,
    report: Callable[[int, dict[str, float]], None],
) -> None:
    """``steps`` supervised steps of ``size`` demonstrations each, every pass in a new seeded order."""
    order: list[int] = []
    epoch = 0
    for step in range(steps):
        while len(order) < size:
            fresh = list(range(len(demos)))
            random.Random(f"{seed}/{epoch}").shuffle(fresh)
            order, epoch = order + fresh, epoch + 1
        chosen, order = [demos[i] for i in order[:size]], order[size:]
        batch = pack([Group(str(i), t.task, (t,)) for i, t in enumerate(chosen)])
        metrics = learner.update(IMITATION.credit(batch), IMITATION)
        sampled = float(sum(t.sampled for t in chosen))
        metrics = finish(metrics)
        report(step + 1, {**metrics, "loss": metrics["penalty/NegativeLogLikelihood"], "tokens": sampled})
