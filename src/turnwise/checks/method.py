"""The contract of a method, checked in seconds, without a model:

    report = check_method(my_recipe)       a Recipe, or a name: "grpo", "sapo+hgpo", "mine:robust"
    print(report.text())

A gradient with the wrong sign trains, reports numbers and reinforces failures; nothing else in a run would notice. The tests of
the built-in methods call the same functions. Does not know any method.
"""

from __future__ import annotations

import json
import math
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from turnwise.algebra.piece import MicroBatchView, text
from turnwise.checks.synthetic import (
    GradedBatch,
    Leaves,
    LossGradient,
    graded_batch,
    gradient,
    numbered,
    planned,
    policy_of,
    push,
    random_groups,
    random_policy,
)
from turnwise.core.batch import Batch, pack
from turnwise.core.columns import Column
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, Field
from turnwise.core.records import Group
from turnwise.core.signals import Signal
from turnwise.recipes import catalogue
from turnwise.recipes.recipe import Recipe

SHAPE = [[[2, 3], [4], [1, 2]], [[2], [0, 3], [5, 1]]]
SEED = 3
DISTANCES = {"on policy": 0.0, "near it": 0.01}
NEGLIGIBLE = 1e-9  # of the largest push
REWARDS = {
    "all equal": lambda i: 0.5,
    "all zero": lambda i: 0.0,
    "one in a million": lambda i: 1e6 * (i == 0),
    "tiny": lambda i: 1e-12 * (i % 3),
    "huge": lambda i: 1e12 * (-1) ** i,
}
SHAPES = {
    "a group of one": [[[2, 3]], [[4], [1, 2]]],
    "empty turns": [[[0, 2], [0]], [[3], [0, 0, 1]]],
    "one token": [[[1], [1]]],
}
FAR = 20.0  # log-ratio of a policy that has left the sampler
QUADRATIC = 3.0  # growth of the largest tensor per growth of the batch above which it is not linear


@dataclass(frozen=True)
class MethodReport:
    """What was checked, what is wrong, and what the method requires."""

    name: str
    checked: dict[str, str]  # by check: what was found, in words
    problems: tuple[str, ...]
    notes: tuple[str, ...]  # what could not be checked, and why
    requires: tuple[str, ...]  # of environment, data or settings
    signals: tuple[str, ...]  # that the learner measures

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        lists = {name: list(getattr(self, name)) for name in ("problems", "notes", "requires", "signals")}
        return {"name": self.name, "ok": self.ok, "checked": self.checked, **lists}

    def text(self) -> str:
        verdict = "ok" if self.ok else f"{len(self.problems)} problem{'s' * (len(self.problems) > 1)}"
        rows = [*self.checked.items()]
        rows += [("requires", ", ".join(self.requires) or "nothing of environment and settings")]
        rows += [("signals", ", ".join(self.signals))]
        lines = [f"  {name + ':':<15}{value}" for name, value in rows]
        lines += [f"  note: {text}" for text in self.notes] + [f"  problem: {text}" for text in self.problems]
        wrapped = (textwrap.fill(line, 118, subsequent_indent=" " * 6, break_on_hyphens=False) for line in lines)
        return "\n".join([f"{self.name}: {verdict}", *wrapped])


def check_method(method: Recipe | str) -> MethodReport:
    """Check a recipe, or the one of this name."""
    recipe = catalogue.parse_method(method) if isinstance(method, str) else method
    check = MethodCheck(recipe)
    check.run()
    signals = tuple(sorted(map(str, recipe.objective.signals)))
    name = method if isinstance(method, str) else "recipe"
    return MethodReport(
        name, check.checked, tuple(check.problems), tuple(check.notes), tuple(sorted(recipe.requirements)), signals
    )


@dataclass
class MethodCheck:
    """One check per method; each returns what it found in words, and adds to ``problems``."""

    recipe: Recipe
    checked: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self) -> None:
        checks = {
            "record": self.record, "levels": self.levels, "gradient": self.sign, "micro-batches": self.micro_batches,
            "order": self.order, "finite": self.finite, "memory": self.memory, "size": self.size,
        }  # fmt: skip
        for name, check in checks.items():
            count = len(self.problems)
            words = ""
            try:
                words = check()
            except Exception as fault:  # a method that raises has failed this check; the others still tell something
                self.problems.append(f"{name}: {describe_fault(fault)}")
            self.checked[name] = "failed" if len(self.problems) > count else words

    def groups(self, shape: list[list[list[int]]] = SHAPE) -> list[Group]:
        return random_groups(shape, SEED, requirements=self.recipe.requirements)

    def batch(self, shape: list[list[list[int]]] = SHAPE) -> tuple[Batch, Leaves]:
        return random_policy(pack(self.groups(shape)), SEED)

    # --------------------------------------------------------------- checks
    def record(self) -> str:
        """A recipe is a value: the memory of its pieces and the command ``diff`` depend on that."""
        # a piece with a list inside fails here, not in the middle of a run
        hash(self.recipe)
        for piece in (self.recipe.advantage, self.recipe.ratio, self.recipe.gate, *self.recipe.penalties):
            tuple(piece.parts), text(piece)
        if self.recipe != replace(self.recipe):
            self.problems.append("record: two equal recipes compare as different; write pieces as frozen dataclasses")
        return "a frozen value"

    def levels(self) -> str:
        batch, _ = self.batch()
        credited = self.recipe.objective.credit(batch)[Column.ADVANTAGE]
        if credited.level > GROUP:
            self.problems.append(f"levels: the advantage is at {credited.level.name}; it must differ within a batch")
        if not bool(torch.isfinite(credited.x).all()):
            self.problems.append("levels: the advantage of ordinary rewards is not finite")
        return f"an advantage for each {credited.level.name.lower()}"

    def sign(self) -> str:
        """Successes must become more likely, failures less."""
        if not self._reads_outcomes():
            self.notes.append(
                "neither the advantage nor the gradient depends on who succeeded, so the sign of the gradient was not checked"
            )
            return "does not depend on outcomes"
        for where, distance in DISTANCES.items():
            graded = graded_batch(self.recipe.requirements, distance)
            pushes = push(graded.batch, gradient(self.recipe.objective, graded.batch, graded.leaves))
            fault = sign_fault(pushes, graded.succeeded)
            if fault:
                self.problems.append(f"gradient, {where}: {fault}{self._cause(graded)}")
        return "successes rise, failures fall, on policy and near it"

    def _reads_outcomes(self) -> bool:
        """Whether anything changes when successes and failures are exchanged."""

        def result(flipped: bool) -> tuple[Tensor, Tensor]:
            graded, objective = graded_batch(self.recipe.requirements, 0.0, flipped=flipped), self.recipe.objective
            credit = planned(objective, graded.batch)[Column.ADVANTAGE].at(TOKEN).x
            return credit, push(graded.batch, gradient(self.recipe.objective, graded.batch, graded.leaves))

        one, other = result(False), result(True)
        return any(a.shape != b.shape or not torch.allclose(a.double(), b.double()) for a, b in zip(one, other))

    def _cause(self, graded: GradedBatch) -> str:
        """What explains a wrong sign, if it can be seen."""
        objective = self.recipe.objective
        batch = planned(objective, graded.batch)
        adv = batch[Column.ADVANTAGE]
        mean = adv.at(TOKEN).mean(TRAJECTORY).x.double()
        if bool(mean[graded.succeeded].mean() < mean[~graded.succeeded].mean()):
            return "; the advantage of successes is below that of failures"
        if self.recipe.ratio.couples_trajectories:
            return ""
        view = MicroBatchView(batch, policy_of(batch, {Signal.LOGP: graded.leaves[Signal.LOGP]}))
        weight = self.recipe.gate(self.recipe.ratio(view), adv.to(torch.float64), view).at(TOKEN).x
        credit = adv.at(TOKEN).x
        if bool((weight * credit >= 0).all()) and bool((weight < 0).any()):
            return (
                "; the gate returns a gain, which has the sign of the advantage, and it is multiplied by the advantage "
                "again: return the weight alone (ρ where nothing is limited)"
            )
        return ""

    def micro_batches(self) -> str:
        batch, leaves = self.batch()
        expected = gradient(self.recipe.objective, batch, leaves)
        # one trajectory at a time, then a few together
        for positions in (1, 9):
            split = gradient(self.recipe.objective, batch, leaves, partial(Batch.split, positions=positions))
            difference = largest_difference(expected, split)
            if difference > 1e-10:
                self.problems.append(
                    f"micro-batches: the gradient changes by {difference:.2g} when the batch is cut; compute what depends on "
                    "the whole step in `plan`"
                )
                break
        return "any cut gives the same gradient"

    def order(self) -> str:
        batch, leaves = self.batch()
        expected = gradient(self.recipe.objective, batch, leaves)
        shuffled = numbered(batch).select(list(reversed(range(len(batch)))))
        moved = {s: f.x.detach().requires_grad_() for s, f in policy_of(shuffled, leaves).items()}
        reordered = gradient(self.recipe.objective, shuffled, moved)
        back = {s: policy_of(shuffled, {s: g})[s].x for s, g in expected.of.items()}
        difference = largest_difference(LossGradient(expected.loss, back, {}), reordered)
        if difference > 1e-4:
            self.problems.append(f"order: the gradient changes by {difference:.2g} with the order of the trajectories")
        return "trajectories in any order give the same gradient"

    def finite(self) -> str:
        """Rewards without spread and of any size, groups of one, empty turns, a policy that has moved far."""
        for label, batch, leaves in self._adversarial_batches():
            taken = gradient(self.recipe.objective, batch, leaves)
            if not taken.is_finite:
                self.problems.append(f"finite: loss or gradient is not finite for {label}")
            odd = sorted(name for name, value in taken.stats.items() if not math.isfinite(float(value)))
            if odd:
                self.problems.append(f"finite: the statistics {', '.join(odd)} are not finite for {label}")
        return f"{', '.join([*(f'rewards {name}' for name in REWARDS), *SHAPES])}, a policy far away"

    def _adversarial_batches(self) -> Iterator[tuple[str, Batch, Leaves]]:
        for label, reward in REWARDS.items():
            groups = []
            for group in self.groups():  # all that a trajectory is paid comes with its last turn
                rows = [[replace(u, reward=0.0) for u in t.turns] for t in group.trajectories]
                for i, turns in enumerate(rows):
                    turns[-1] = replace(turns[-1], reward=reward(i))
                members = (replace(t, turns=tuple(turns)) for t, turns in zip(group.trajectories, rows))
                groups.append(replace(group, trajectories=tuple(members)))
            yield (f"rewards {label}", *random_policy(pack(groups), SEED))
        for label, shape in SHAPES.items():
            yield (label, *self.batch(shape))
        batch, leaves = self.batch()
        sign = torch.where(torch.arange(leaves[Signal.LOGP].numel()) % 2 == 0, FAR, -FAR)
        leaves[Signal.LOGP] = (leaves[Signal.LOGP].detach() + sign).requires_grad_()
        logp = Field(batch.tree, TOKEN, leaves[Signal.LOGP].detach())
        yield "a policy far away", batch.put({Signal.LOGP: logp}), leaves

    def memory(self) -> str:
        """A method resumed from its memory continues as if nothing had happened."""
        batch, leaves = self.batch()
        run = lambda objective: gradient(objective, batch, leaves)  # noqa: E731
        straight, first, second = (self.recipe.objective for _ in range(3))
        run(straight), run(first)
        expected = run(straight)
        # through JSON: that is how a checkpoint writes it
        second.memory.load_state_dict(json.loads(json.dumps(first.memory.state_dict())))
        if largest_difference(expected, run(second)) > 0:
            self.problems.append(
                "memory: a method restored from its state continues differently; keep it in `next_state`"
            )
        states = first.memory.state_dict()["states"]
        return f"{len(states)} piece{'s' * (len(states) != 1)} with a state, restored exactly" if states else "none"

    def size(self) -> str:
        """The largest tensor must grow with the number of tokens, not with its square."""
        sizes = []
        for repeats in (4, 16):
            batch, leaves = self.batch(SHAPE * repeats)
            with _LargestTensor() as largest:
                gradient(self.recipe.objective, batch, leaves)
            sizes.append(largest.numel)
        small, large = sizes
        if large > QUADRATIC * 4 * small:
            self.problems.append(f"size: four times the trajectories need a tensor {large / small:.0f} times as large")
        return "memory grows with the number of tokens"


class _LargestTensor(TorchDispatchMode):
    numel = 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def sign_fault(pushes: Tensor, succeeded: Tensor) -> str:
    """What is wrong with the direction in which trajectories are pushed; empty if nothing is."""
    scale = float(pushes.abs().max())
    if scale == 0 or not math.isfinite(scale):
        return "no trajectory gets a gradient" if scale == 0 else "the gradient is not finite"
    good, bad = pushes[succeeded] / scale, pushes[~succeeded] / scale
    if bool((bad > NEGLIGIBLE).any()):
        return f"it reinforces failures ({int((bad > NEGLIGIBLE).sum())} of {bad.numel()} become more likely)"
    if bool((good < -NEGLIGIBLE).any()):
        return f"it discourages successes ({int((good < -NEGLIGIBLE).sum())} of {good.numel()} become less likely)"
    return ""


def largest_difference(one: LossGradient, other: LossGradient) -> float:
    """The largest difference of losses and gradients, relative where they are above 1."""
    pairs = [(one.loss, other.loss), *((g, other.of.get(s, torch.zeros_like(g))) for s, g in one.of.items())]
    return max(float(((a - b).abs() / a.abs().clamp(min=1)).max()) if a.numel() else 0.0 for a, b in pairs)


def describe_fault(fault: Exception) -> str:
    """An exception with the innermost line that raised it."""
    last = traceback.extract_tb(fault.__traceback__)[-1]
    message = " ".join(str(fault).split())[:300]
    return f"{type(fault).__name__}: {message} (in {last.name}, {last.filename.rsplit('/', 1)[-1]}, line {last.lineno})"
