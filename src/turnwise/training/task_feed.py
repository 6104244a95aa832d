"""The task feed: which tasks are issued next, with how many rollouts and turns, and which help their episodes get.

One object holds the live sampler, budget and guidance of a run, so that a checkpoint holds their state together with what was
promised to the groups in flight. Knows no loss.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from turnwise.core.records import Group, Task
from turnwise.core.seeds import stable_seed
from turnwise.errors import SettingError
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.guidance import LiveGuidance, NoGuidance
from turnwise.rollout.strategies import GroupRequest, Strategy, close, park
from turnwise.tasks.budgets import Fixed, LiveBudget
from turnwise.tasks.samplers import LiveSampler
from turnwise.tasks.task_source import TaskStream
from turnwise.training.meter import RolloutMeter

if TYPE_CHECKING:
    from turnwise.rollout.renderer import Renderer
    from turnwise.training.plan import EnvSpec

MORE = 100_000  # index of the first session of a later round; no strategy opens so many

Rest = Callable[[Group], Awaitable[int]]
"""How many further trajectories a group gets, once the groups of its wave are known."""


def draw_order(key: str) -> tuple[int, str]:
    """Sorts groups as they were drawn. Training in order of completion would let timing change results."""
    return int(key.split("~")[0]), key


@dataclass(frozen=True)
class GroupOrder:
    """One group to issue. ``max_turns`` as in ``LiveBudget``. ``rest``: asked after its first trajectories."""

    key: str
    task: Task
    size: int
    max_turns: int | list[int] = 0
    largest: int = 0
    rest: Rest | None = None

    @property
    def number(self) -> str:
        """The number of the draw; a group that is issued again keeps it."""
        return self.key.split("~")[0]


class BudgetWave:
    """The groups of one wave, which share a budget: the rest of it is divided once all first trajectories are known."""

    def __init__(self, budget: LiveBudget, tasks: Sequence[Task]) -> None:
        self.budget, self.tasks = budget, tasks
        self.groups: dict[int, Group] = {}
        self.given: asyncio.Future[list[int]] | None = None

    async def rest(self, i: int, group: Group) -> int:
        if self.given is None:
            self.given = asyncio.get_running_loop().create_future()
        self.groups[i] = group
        if len(self.groups) == len(self.tasks) and not self.given.done():  # else it is a group that was played again
            self.given.set_result(self.budget.rest(self.tasks, [self.groups[k] for k in range(len(self.tasks))]))
        return (await self.given)[i]


@dataclass
class TaskFeed:
    """Sampler, budget and guidance of a run. ``promised``: sizes and turn limits of the groups in flight, by draw number."""

    sampler: LiveSampler
    budget: LiveBudget = field(default_factory=lambda: Fixed().open())
    guidance: LiveGuidance = field(default_factory=lambda: NoGuidance().open(0))
    largest: int = 0
    promised: dict[str, list[Any]] = field(default_factory=dict)
    meter: RolloutMeter = field(default_factory=RolloutMeter)
    spent: dict[str, int] = field(default_factory=dict)  # rollouts of the latest step by difficulty

    @classmethod
    def open(cls, recipe: Recipe, tasks: TaskStream) -> TaskFeed:
        """The live pieces of a recipe."""
        guidance = recipe.guidance.open(stable_seed(tasks.seed, "guidance"))
        meter = RolloutMeter.of(recipe, tasks)
        return cls(recipe.sampler.open(tasks), recipe.budget.open(), guidance, recipe.budget.largest, meter=meter)

    def orders(self, count: int, again: deque[tuple[str, Task]]) -> list[GroupOrder]:
        """The next ``count`` groups: first those to issue ``again``, with what they were promised, then new ones."""
        repeated = [again.popleft() for _ in range(min(count, len(again)))]
        if count > len(repeated):
            self.sampler.begin_wave(count - len(repeated))
        drawn = [self.sampler.next() for _ in range(count - len(repeated))]
        self.meter.drawn(drawn)
        fresh = [(str(number), task) for number, task in drawn]
        sizes = self.budget.sizes([task for _, task in fresh]) if fresh else []
        for (key, task), size in zip(fresh, sizes):
            self.promised[key] = [size, self.budget.max_turns(task)]
        orders = []
        for key, task in [*repeated, *fresh]:
            number = key.split("~")[0]
            # a finished group has no promise any more; a resumed run that stays on-policy plays it again all the same
            if number not in self.promised:
                self.promised[number] = [self.budget.sizes([task])[0], self.budget.max_turns(task)]
            size, max_turns = self.promised[number]
            orders.append(GroupOrder(key, task, size, max_turns, largest=self.largest))
            if not self.budget.rounds:
                self.meter.note("budget", size != self.budget.rule.size or bool(max_turns))
        if self.budget.rounds:
            wave = BudgetWave(self.budget, [order.task for order in orders])
            orders = [replace(order, rest=partial(wave.rest, i)) for i, order in enumerate(orders)]
        return orders

    def grow(self, order: GroupOrder, request: GroupRequest, strategy: Strategy) -> Coroutine[Any, Any, Group]:
        """Begin to grow a group: the strategy under the guidance, then the later rounds of the budget."""
        if order.max_turns:
            request = replace(request, play=partial(request.play, max_turns=order.max_turns))
        request = replace(request, play=self.meter.noting(order.key, request.play))
        first, rest = self.guidance.begin(request, strategy), order.rest
        if rest is None:
            return first
        # opened now, in draw order: what a session samples depends on when it was opened
        spare = request.sessions(max(0, order.largest - order.size), MORE)
        park(spare)

        async def continued() -> Group:
            group = await first
            count = min(await rest(group), len(spare))
            self.meter.note("budget", order.size + count != self.budget.rule.size)
            close(spare[count:])
            more = await request.play_all(spare[:count], MORE)
            return replace(group, trajectories=(*group.trajectories, *more))

        return continued()

    def observe(self, group: Group) -> None:
        """Learn from a finished group, whether it is trained on or not."""
        self.promised.pop(group.id.split("~")[0], None)
        self.meter.finished(group)
        level = str(group.task.difficulty)
        self.spent[level] = self.spent.get(level, 0) + len(group.trajectories)
        for part in (self.sampler, self.budget, self.guidance):
            part.observe(group)

    def forget(self, key: str) -> None:
        """A group ended without a usable trajectory."""
        self.promised.pop(key.split("~")[0], None)
        self.meter.plays.pop(key, None)

    def state_dict(self) -> dict[str, Any]:
        return {
            "sampler": self.sampler.state_dict(),
            "budget": self.budget.state_dict(),
            "guidance": self.guidance.state_dict(),
            "promised": self.promised,
            "meter": self.meter.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self.budget.load_state_dict(state["budget"])
        self.guidance.load_state_dict(state["guidance"])
        self.promised = {number: list(values) for number, values in state["promised"].items()}

        self.meter.load_state_dict(state.get("meter", {}))

    def metrics(self) -> dict[str, float]:
        spent = {f"rollouts/difficulty_{level}": float(n) for level, n in sorted(self.spent.items())}
        self.spent = {}
        parts = (self.sampler.metrics(), self.budget.metrics(), self.guidance.metrics(), self.meter.metrics())
        return {**{name: value for part in parts for name, value in part.items()}, **spent}


# ------------------------------------------------------- tasks ranked before the first step


def score_tasks(collector: Any, learner: Any, env_spec: EnvSpec, renderer: Renderer) -> None:
    """Give a sampler that ``measures`` angles the scores of its pool: the first prompts of its tasks are rendered and read once.
    Called before the first step only: the ranking is part of the sampler's state."""
    sampler: Any = getattr(getattr(collector, "sampler", None), "sampler", None)
    if getattr(getattr(sampler, "rule", None), "measures", "") != "angles":
        return
    if env_spec.agent is not None:
        raise SettingError(
            "this sampler ranks tasks by their prompts, and an agent writes its own; write another --sampler"
        )
    if not hasattr(learner, "model"):
        raise SettingError(
            "this sampler reads hidden states in the learner's process; write --ranks 1 or another --sampler"
        )
    from turnwise.engines.learner.signals.hidden import prompt_angles

    async def first_messages() -> list[Any]:
        messages = []
        for task in sampler.members:
            environment = env_spec.make(task)
            first = environment.reset(task.seed)
            messages.append(await first if inspect.isawaitable(first) else first)
            if (close := getattr(environment, "close", None)) is not None and inspect.isawaitable(closing := close()):
                await closing
        return messages

    with ThreadPoolExecutor(1) as thread:  # a loop of its own: the caller may run inside one
        opened = thread.submit(lambda: asyncio.run(first_messages())).result()
    prompts = [renderer.open(list(messages), env_spec.tools).ids for messages in opened]
    angles = prompt_angles(learner.model, prompts)
    sampler.set_scores([intra + sampler.rule.inter * inter for intra, inter in angles])
