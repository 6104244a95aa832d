"""Shaped outcomes: what a trajectory is worth besides what it earned, and where it went."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from turnwise.algebra.peers import Kin
from turnwise.algebra.piece import State, Whole, check
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.signals import Signal
from turnwise.credit.fact import Fact
from turnwise.credit.segments import order_within
from turnwise.credit.tracker import Solved, tasks_of

# ------------------------------------------------------------------------ tools


@dataclass(frozen=True)
class Acted(Term):
    """1 for a trajectory that used the action in question: the fact ``action`` where told, else whether it called a tool."""

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"tools"})

    def __call__(self, batch: Batch) -> Field:
        called = where(batch.tool_calls.max(TRAJECTORY) > 0, 1.0, 0.0)
        if "action" not in batch.facts:
            return called
        told = Fact("action")(batch)
        return where(told.map(torch.isnan), called, where(told > 0, 1.0, 0.0))


@dataclass(frozen=True)
class Contrast(Term):
    """±1 for those who ``acted``, 0 for the others: + where they earned more than those who did not, by over ``least`` on
    average in the group, − where less. 0 where all or none did."""

    acted: Term
    least: float = 0.0

    def __post_init__(self) -> None:
        check(self.least >= 0, f"the threshold is {self.least}; write a number >= 0")

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        outcome = batch.reward.sum(TRAJECTORY).to(torch.float64)
        acted = where(self.acted(batch) > 0, 1.0, 0.0)
        mean = lambda who: (who * outcome).sum(GROUP) / who.sum(GROUP).clamp(low=1.0)  # noqa: E731
        gap = mean(acted) - mean(1 - acted)
        both = (acted.sum(GROUP) > 0) & ((1 - acted).sum(GROUP) > 0)
        return acted * where(both & (gap.abs() > self.least), gap.map(torch.sign), 0.0)


@dataclass(frozen=True)
class Length(Term):
    """min(1, n / longest) of the n sampled tokens of a trajectory."""

    longest: int = 1024

    def __post_init__(self) -> None:
        check(self.longest >= 1, f"longest is {self.longest}; write at least 1 token")

    def __call__(self, batch: Batch) -> Field:
        return (batch.tree.size(TOKEN, TRAJECTORY).to(torch.float64) / self.longest).clamp(high=1.0)


@dataclass(frozen=True)
class Thrift(Term):
    """r · f for solved trajectories, 0 for others: m tool calls against n, the fewest that ever solved the task.

    f = sin(π m / (m + n)), which is 1 at m = n; where n = 0, cos(π m / (2m + slack)). ``alone``: always the cosine."""

    scale: float = 1.0
    slack: float = 4.0
    alone: bool = False

    def __post_init__(self) -> None:
        check(self.slack > 0, f"slack is {self.slack}; write a positive number of calls")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"tools"})

    def start(self) -> State:
        return {"tasks": {}}

    def advance(self, state: State, whole: Whole) -> State:
        batch = whole.batch
        least = where(Solved()(batch) > 0, _calls(batch), torch.inf).min(GROUP)
        known = dict(state["tasks"])
        for task, n in zip(tasks_of(batch), least.x.tolist()):
            if math.isfinite(n):
                known[task] = min(n, known.get(task, n))
        return {"tasks": known}

    def recall(self, state: State, batch: Batch) -> dict[object, Field]:
        fewest = [state["tasks"].get(task, 0.0) for task in tasks_of(batch)]
        return {(self, "fewest"): batch.tree.field(GROUP, fewest, torch.float64)}

    def __call__(self, batch: Batch) -> Field:
        m, n = _calls(batch), batch[self, "fewest"]
        alone = (math.pi * m / (2 * m + self.slack)).map(torch.cos)
        beside = (math.pi * m / (m + n).clamp(low=1.0)).map(torch.sin)
        factor = alone if self.alone else where(n > 0, beside, alone)
        return self.scale * factor * Solved()(batch)


def _calls(batch: Batch) -> Field:
    return batch.tool_calls.to(torch.float64).sum(TRAJECTORY)


# ---------------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Flawed(Term):
    """+1 for a solved trajectory, −1 for a failed one; a solved one in which somebody found an error loses ``penalty``.

    The fact ``error`` is where it was found, −1 for nowhere; nobody has to look at failed ones."""

    penalty: float = 1.0

    def __post_init__(self) -> None:
        check(self.penalty >= 0, f"the penalty is {self.penalty}; write a number >= 0")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"fact error"})

    def __call__(self, batch: Batch) -> Field:
        solved = Solved()(batch)
        flaw = where(Fact("error", missing=-1.0)(batch) >= 0, self.penalty, 0.0)
        return 2 * solved - 1 - solved * flaw


@dataclass(frozen=True)
class Information(Term):
    """helpful · H / max H − stable · |H − mean H| in the group, H the entropy of how often a trajectory uses each token."""

    helpful: float = 1.0
    stable: float = 1.0

    @property
    def judges(self) -> bool:
        return True

    def __call__(self, batch: Batch) -> Field:
        tree = batch.tree
        one = tree.full(TOKEN, 1.0, torch.float64)
        same = Partition.by(tree, TOKEN, tree.ancestor(TOKEN, TRAJECTORY), batch.token)
        h = -(one.sum(same) / one.sum(TRAJECTORY)).log().mean(TRAJECTORY)
        top = h.max(GROUP)
        richness = where(top > 0, h / where(top > 0, top, 1.0), 0.0)
        return self.helpful * richness - self.stable * (h - h.mean(GROUP)).abs()


# ----------------------------------------------------------------- what was asked


@dataclass(frozen=True)
class Uncovered(Term):
    """G = Σ ω over the pieces of information in the answer to a question; 0 for turns that ask nothing. At TURN.

    ω = softmax(φ / temperature), φₖ the fact ``worth k`` of the trajectory, k = 0, 1 …; the turn fact ``uncovered`` is the
    number with bit k set for each piece k that came. ``fresh``: what an earlier turn uncovered counts no more."""

    temperature: float = 2.0
    fresh: bool = False

    def __post_init__(self) -> None:
        check(self.temperature > 0, f"the temperature is {self.temperature}; write a positive number")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"turn fact question", "turn fact uncovered", "fact worth 0"})

    def __call__(self, batch: Batch) -> Field:
        count = sum(name.startswith("worth ") for name in batch.facts)
        told = [Fact(f"worth {k}", missing=-torch.inf)(batch) for k in range(count)] or [Fact("worth 0")(batch)]
        weight = torch.softmax(torch.stack([w.x for w in told]) / self.temperature, 0).nan_to_num(0.0)
        asked = where(Fact("question", TURN, missing=0.0)(batch) > 0, 1.0, 0.0)
        bits = Fact("uncovered", TURN, missing=0.0)(batch).to(torch.int64)
        gain = batch.tree.full(TURN, 0.0, torch.float64)
        for k in range(count):  # over pieces of information, not over turns
            came = asked * bits.map(lambda b: (b >> k) & 1)  # noqa: B023
            if self.fresh:
                came = where(came.running_sum(TRAJECTORY) - came > 0, 0.0, came)
            gain = gain + came * Field(batch.tree, TRAJECTORY, weight[k])
        return gain


@dataclass(frozen=True)
class Asking(Term):
    """What each token of a turn is paid: a question α G + β G · solved, the answer γ · solved, both ``form`` times the turn fact
    ``format``; other turns nothing. At TURN."""

    gain: Term
    alpha: float = 2.0
    beta: float = 1.0
    gamma: float = 3.0
    form: float = 1.0

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"turn fact question", "turn fact answer"})

    def __call__(self, batch: Batch) -> Field:
        told = lambda name: Fact(name, TURN, missing=0.0)(batch)  # noqa: E731
        gain, solved, form = self.gain(batch), Solved()(batch), self.form * told("format")
        asking = self.alpha * gain + self.beta * gain * solved + form
        return where(told("question") > 0, asking, where(told("answer") > 0, self.gamma * solved + form, 0.0))


@dataclass(frozen=True)
class Places(Kin):
    """Tokens of one group, each among those at its place in their trajectories; ``apart`` False: all of them together."""

    apart: bool = True

    def __call__(self, batch: Batch) -> Partition:
        place = batch.tree.index(TOKEN, TRAJECTORY)
        return Partition.by(batch.tree, TOKEN, batch.group, place if self.apart else place * 0)


# ----------------------------------------------------------------- hidden states


@dataclass(frozen=True)
class Outlying(Term):
    """How far the hidden states of a token lie from good ones, between 0 and 1 of its trajectory; only above ``threshold``, and
    of those only the ``top`` highest (of equal ones the earlier), else 0. At TOKEN."""

    threshold: float = 0.6
    top: int = 15

    def __post_init__(self) -> None:
        check(0 <= self.threshold <= 1, f"the threshold is {self.threshold}; write a number in [0, 1]")
        check(self.top >= 0, f"top is {self.top}; write a number of tokens")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.DEVIATION})

    def __call__(self, batch: Batch) -> Field:
        tree, raw = batch.tree, batch[Signal.DEVIATION].to(torch.float64)
        low, high = raw.min(TRAJECTORY), raw.max(TRAJECTORY)
        score = where(high > low, (raw - low) / where(high > low, high - low, 1.0), 0.0)
        place = order_within(-score.x, tree.ancestor(TOKEN, TRAJECTORY), tree.count(TRAJECTORY))
        return where((score > self.threshold) & Field(tree, TOKEN, place < self.top), score, 0.0)


__all__ = [
    "Acted", "Asking", "Contrast", "Flawed", "Information", "Length", "Outlying", "Places", "Thrift", "Uncovered",
]  # fmt: skip
