"""How often a method's mechanism acts: each slot that differs from the base method's, against the base's slot on the same batch.

Every number ``acted/SLOT`` is a share between 0 and 1: of tokens whose credit, gradient or weight is another (advantage, ratio,
gate, aggregate, keep, penalties, precision), of trajectories (reward, strategy, guidance, replay), of groups (admission, budget),
of draws (sampler) or of optimiser steps (control, gradient, smoothing). A slot whose number is 0 in every step did nothing. Slots
that equal the base's have none. Nothing here changes what is trained on, and nothing knows a method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from turnwise.algebra.objective import Objective, gradient
from turnwise.algebra.penalty import Weight
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.ratio import behaviour
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.records import Group, Task, Trajectory
from turnwise.core.signals import Signal
from turnwise.core.stateful import remember
from turnwise.observe.mechanism import ACTED
from turnwise.recipes.catalogue import base_recipe, changed_slots
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.strategies import EpisodeRunner
from turnwise.tasks.samplers import LiveSampler
from turnwise.tasks.task_source import TaskStream

DIFFERENT = 0.01  # of the larger of two numbers: below that, two credits, gradients or weights are the same
NOTICED = 1e-3  # of the signal: below that, noise, or a penalty's gradient, is numerically nothing


def _different(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs() > DIFFERENT * torch.maximum(a.abs(), b.abs())


@dataclass
class SlotMeter:
    """One batch of one recipe: ``watch`` its objective, ``credit`` once, ``update`` after each optimiser step."""

    recipe: Recipe
    objective: Objective
    sums: dict[str, Any] = field(default_factory=dict)  # of the present optimiser step
    pulls: list[tuple[Tensor, ...]] = field(default_factory=list)  # of penalties on its tokens, by micro-batch

    def __post_init__(self) -> None:
        self.slots, self.base = changed_slots(self.recipe), base_recipe()

    def watch(self, objective: Objective) -> Objective:
        """``objective``, whose optimiser steps are measured; itself if there is nothing to measure in them."""
        of_tokens = {"ratio", "gate", "aggregate", "keep", "penalties", "precision"}
        return replace(objective, listeners=(*objective.listeners, self)) if self.slots & of_tokens else objective

    @torch.no_grad()
    def credit(self, given: Batch, credited: Batch) -> dict[str, float]:
        """Of a batch before and after it was credited. Nothing about the advantage where no credit says anything."""
        acted: dict[str, float] = {}
        if not credited.tree.count(TOKEN):
            return acted
        if "reward" in self.slots:
            level = TURN if given.reward.level <= TURN >= credited.reward.level else TRAJECTORY
            gap = (credited.reward.sum(level) - given.reward.sum(level)).abs() > 1e-6
            acted["reward"] = float(
                gap.to(torch.float64).max(TRAJECTORY).x.mean() if level == TURN else gap.x.double().mean()
            )
        if "advantage" in self.slots:
            credit, base = (
                f.at(TOKEN).x.double() for f in (credited[Column.ADVANTAGE], self.base.advantage(credited).detach())
            )
            sizes = credit.norm(), base.norm()
            if max(sizes) > 0:  # both brought to one norm: a factor on all credit is the learning rate's
                credit, base = (x / size if size > 0 else x for x, size in zip((credit, base), sizes))
                acted["advantage"] = float(_different(credit, base).double().mean())
                acted["advantage/turned"] = 1.0 - float(credit @ base)  # 1 − cosine
        return {ACTED + name: value for name, value in acted.items()}

    def planned(self, batch: Batch) -> None:
        """The averaging weights of a planned step."""
        weight = batch[Column.WEIGHT].at(TOKEN).x
        trained = (weight != 0).double()
        self.sums, self.pulls = {}, []
        if "aggregate" in self.slots:
            even = self.base.aggregate(Field(batch.tree, TOKEN, trained)).at(TOKEN).x
            weights = weight / weight.abs().sum().clamp(min=1e-30)
            self.sums["aggregate"] = _different(weights, even / even.sum().clamp(min=1e-30)).double().mean()
        if "keep" in self.slots:
            turns = batch.columns.get(Column.UPDATED_TURNS)
            offered = trained.new_ones(trained.shape) if turns is None else turns.at(TOKEN).x.double()
            self.sums["keep"] = ((1 - trained) * offered).sum() / offered.sum().clamp(min=1.0)

    def micro_batch(self, batch: Batch, policy: Mapping[Signal, Field], slope: Tensor) -> None:
        """Gradients of the tokens with the slot's piece and with the base's."""
        if Column.FREEZE_POLICY in batch.columns:  # a step of the critics
            return
        objective, share = self.objective, batch[Column.TOKEN_SHARE].at(TOKEN).x.double()
        ratio, gate, gain_slope = objective.ratio, objective.gate, self._slope(batch, policy)
        if "ratio" in self.slots:
            base_slope = self._slope(
                batch, policy, ratio=self.base.ratio, gate=self.base.gate if gain_slope is None else gate
            )
            self._compare("ratio", share, self._known(batch, gain_slope), self._known(batch, base_slope))
        if "gate" in self.slots and gain_slope is not None:
            base_slope = self._slope(batch, policy, ratio=ratio, gate=self.base.gate)
            self._compare("gate", share, gain_slope, self._known(batch, base_slope))
        if "precision" in self.slots:
            gap = (policy[Signal.LOGP].detach() - behaviour(batch)).at(TOKEN).x
            self._add("precision", share * (gap.abs() > DIFFERENT))
        if "penalties" in self.slots:
            self._penalties(batch, policy, self._known(batch, gain_slope), share)

    def _add(self, name: str, values: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + values.double().sum()

    def _compare(self, name: str, share: Tensor, slope: Tensor, base_slope: Tensor) -> None:
        self._add(name, share * _different(slope, base_slope))
        self._add("_pulled", slope.abs() + base_slope.abs())

    def _known(self, batch: Batch, slope: Tensor | None) -> Tensor:
        """A ratio that couples trajectories has its gradient planned over the whole step."""
        return batch[Column.GAIN_GRADIENT].at(TOKEN).x if slope is None else slope

    def _slope(self, batch: Batch, policy: Mapping[Signal, Field], **pieces: Any) -> Tensor | None:
        """∂ gain / ∂ log π of each token with these pieces instead of the objective's; None: the ratio couples trajectories."""
        objective = replace(self.objective, **pieces)
        if objective.ratio.couples_trajectories:
            return None
        view = leaves(batch, policy)
        dtype = view.logp.x.dtype
        with torch.enable_grad():
            adv, weight = batch[Column.ADVANTAGE].to(dtype), batch[Column.WEIGHT].to(dtype)
            gain = (weight * (objective.gate(objective.ratio(view), adv, view) * adv)).at(TOKEN).x.sum()
            return gradient(gain, view.logp.x)

    def _penalties(self, batch: Batch, policy: Mapping[Signal, Field], gain_slope: Tensor, share: Tensor) -> None:
        """How penalties that the base method does not have pull on tokens. What is noticeable is known when the step is over."""
        self._add("_slope", gain_slope.abs())
        pull, elsewhere = torch.zeros_like(share), torch.zeros_like(share, dtype=torch.bool)
        for i, weighted in enumerate(self.objective.penalties):
            if weighted in self.base.penalties:
                continue
            size = float(batch[weighted.weight].item) if isinstance(weighted.weight, Weight) else float(weighted.weight)
            if weighted.penalty.couples_trajectories:
                slopes = {Signal.LOGP: size * batch[Column.PENALTY_GRADIENT, i].at(TOKEN).x}
            else:
                view = leaves(batch, policy)
                with torch.enable_grad():
                    cost = size * self.objective._cost(view, i, weighted.penalty)
                    live = {s: f.x for s, f in view.policy.items() if f.x.requires_grad and f.level == TOKEN}
                    slopes = {s: gradient(cost, x) for s, x in live.items()}
            for signal, slope in slopes.items():
                if signal == Signal.LOGP:
                    pull = torch.maximum(pull, slope.abs().to(pull))
                else:
                    elsewhere |= slope != 0
                self._add("_penalty", slope.abs())
        self.pulls.append((share, pull, elsewhere))

    def update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """``acted/SLOT`` of the optimiser step that has these metrics."""
        if self.pulls:
            share, pulls, elsewhere = (torch.cat(parts) for parts in zip(*self.pulls))
            noticeable = NOTICED * self.sums["_slope"] / max(1, share.numel())
            self._add("penalties", share * ((pulls > noticeable) | elsewhere))
        names = list(self.sums)
        values = torch.stack([torch.as_tensor(self.sums[n]).double().cpu() for n in names]).tolist() if names else []
        acted = dict(zip(names, values))
        gain, pull, compared = (acted.pop(name, 0.0) for name in ("_slope", "_penalty", "_pulled"))
        if not compared:  # no token has credit, so no piece could bend its gradient
            acted = {name: share for name, share in acted.items() if name not in ("ratio", "gate")}
        if "penalties" in acted:
            acted["penalties/gradient"] = pull / (gain + pull) if gain + pull else 0.0
        if "gradient" in self.slots:
            factors = (metrics.get("scale/gradient", 1.0), metrics.get("scale/lr", 1.0))
            acted["gradient"] = float(any(abs(x - 1.0) > DIFFERENT for x in factors))
        if "smoothing" in self.slots:
            acted["smoothing"] = float(metrics.get("noise/relative", 0.0) > NOTICED)
        self.sums, self.pulls = {}, []
        return {ACTED + name: value for name, value in acted.items()}

    def steps(self, updates: int) -> dict[str, float]:
        """The share of a batch's optimiser steps that the base method would not have taken."""
        return {f"{ACTED}control": 1.0 - 1.0 / updates} if "control" in self.slots and updates else {}


def leaves(batch: Batch, policy: Mapping[Signal, Field]) -> MicroBatchView:
    """A view of the same numbers whose gradients nobody else uses."""
    copy = lambda x: x.detach().requires_grad_(x.is_floating_point())  # noqa: E731
    return MicroBatchView(batch, {signal: f.map(copy) for signal, f in policy.items()})


# ------------------------------------------------------------ of rollouts


LISTENING = ("fork_points", "entropies")  # options of a rollout that change nothing about it


@dataclass
class RolloutMeter:
    """How groups are drawn, sized, grown and admitted, against what the base method would have done. ``metrics`` empties it."""

    slots: frozenset[str] = frozenset()  # those that are measured
    tasks: TaskStream | None = None
    uninformed: LiveSampler | None = None  # the recipe's sampler, which nobody tells a result
    issued: dict[str, int] = field(default_factory=dict)  # by key: the draw of each of the latest tasks
    plays: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # by group: trajectory, what changed it
    acted: dict[str, list[float]] = field(default_factory=dict)  # by slot

    @classmethod
    def of(cls, recipe: Recipe, tasks: TaskStream) -> RolloutMeter:
        slots = changed_slots(recipe)
        return cls(slots, tasks, recipe.sampler.open(tasks) if "sampler" in slots else None)

    def note(self, slot: str, acted: bool) -> None:
        """Whether ``slot`` did something of its own for one group, draw or rollout."""
        if slot in self.slots:
            self.acted.setdefault(slot, []).append(float(acted))

    def drawn(self, draws: Sequence[tuple[int, Task]]) -> None:
        """One wave of draws. A draw acts if it repeats a task, if it has another difficulty than an even draw, or if the same
        sampler with the same random numbers takes another task as long as nobody tells it a result."""
        if self.uninformed is None or self.tasks is None or not draws:
            return
        self.uninformed.begin_wave(len(draws))
        for n, task in draws:
            other, even = self.uninformed.next()[1], self.tasks.draw(n)
            repeated = task.key in self.issued
            self.note("sampler", repeated or task.difficulty != even.difficulty or task.key != other.key)
            remember(self.issued, task.key, n)

    def noting(self, key: str, play: EpisodeRunner) -> EpisodeRunner:
        """``play``, which notes for each rollout of a group which slot had it played otherwise than an independent one."""
        if not self.slots & {"strategy", "guidance"}:
            return play
        plays = self.plays[key] = []  # anew where a fault of the machine has the group played again

        async def noted(*args: Any, **more: Any) -> Trajectory:
            name, _, session, *_ = args
            options = {o for o, value in more.items() if not (value is None or value is False)} - {*LISTENING}
            helped = "guidance" in self.slots and "support" in options
            changed = bool(options) or getattr(session, "shift", None) is not None
            plays.append((name, "guidance" if helped else "strategy" if changed else ""))
            return await play(*args, **more)

        return noted

    def finished(self, group: Group) -> None:
        """A rollout that is not kept, such as a draft or a baseline, served the others."""
        members = {t.id for t in group.trajectories}
        for name, slot in self.plays.pop(group.id, ()):
            self.note("strategy", slot == "strategy" or (name not in members and slot != "guidance"))
            self.note("guidance", slot == "guidance")

    def metrics(self) -> dict[str, float]:
        """``acted/SLOT`` since it was asked last."""
        acted, self.acted = self.acted, {}
        return {ACTED + slot: sum(values) / len(values) for slot, values in sorted(acted.items())}

    def state_dict(self) -> dict[str, Any]:
        sampler = self.uninformed
        return {} if sampler is None else {"issued": self.issued, "uninformed": sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.uninformed is not None and state:
            self.issued = dict(state["issued"])
            self.uninformed.load_state_dict(state["uninformed"])
