"""Reward shaping: terms added to or replacing a trajectory's return, from tools, verdicts, questions and hidden
states."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turnwise.algebra.piece import State, StepView
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.credit.fact import Fact
from turnwise.credit.segments import rank_by_value
from turnwise.credit.tracker import Solved, task_keys
from turnwise.maths.lazy_torch import torch

# ------------------------------------------------------------------------ tools


@dataclass(frozen=True)
class UsedAction(Term):
    """1 for a trajectory that used the auxiliary action: the fact ``action`` where recorded, else whether it called a
    tool."""

    requires = frozenset({"tools"})

    def __call__(self, batch: Batch) -> Field:
        called = where(batch.tool_calls.max(TRAJECTORY) > 0, 1.0, 0.0)
        if "action" not in batch.facts:
            return called
        recorded = Fact("action")(batch)
        return where(recorded.map(torch.isnan), called, where(recorded > 0, 1.0, 0.0))


@dataclass(frozen=True)
class GroupContrast(Term):
    """±1 for trajectories that ``used`` the action, 0 for the others: + where the users' mean return in the group
    exceeds that of the others by more than ``threshold``, − where it falls short by more. 0 where all or none used
    it."""

    compares_peers = True

    used: Term
    threshold: float = number(0.0, least=0)

    def __call__(self, batch: Batch) -> Field:
        outcome = batch.reward.sum(TRAJECTORY).to(torch.float64)
        used = where(self.used(batch) > 0, 1.0, 0.0)
        mean = lambda who: (who * outcome).sum(GROUP) / who.sum(GROUP).clamp(low=1.0)  # noqa: E731
        gap = mean(used) - mean(1 - used)
        both = (used.sum(GROUP) > 0) & ((1 - used).sum(GROUP) > 0)
        return used * where(both & (gap.abs() > self.threshold), gap.map(torch.sign), 0.0)


@dataclass(frozen=True)
class NormalisedLength(Term):
    """min(1, n / longest), n the sampled tokens of a trajectory."""

    longest: int = number(1024, least=1)

    def __call__(self, batch: Batch) -> Field:
        return (batch.tree.size(TOKEN, TRAJECTORY).to(torch.float64) / self.longest).clamp(high=1.0)


@dataclass(frozen=True)
class ToolEfficiencyReward(Term):
    """scale · f for solved trajectories, 0 for others, from m tool calls and n, the fewest that ever solved the task.

    f = sin(π m / (m + n)), which is 1 at m = n; where n = 0, cos(π m / (2m + slack)). ``cosine_only``: always the
    cosine."""

    requires = frozenset({"tools"})

    scale: float = 1.0
    slack: float = number(4.0, above=0)
    cosine_only: bool = False

    def initial_state(self) -> State:
        return {"tasks": {}}

    def next_state(self, state: State, view: StepView) -> State:
        batch = view.batch
        least_calls = where(Solved()(batch) > 0, _calls(batch), torch.inf).min(GROUP)
        fewest = dict(state["tasks"])
        for task, n in zip(task_keys(batch), least_calls.x.tolist()):
            if math.isfinite(n):
                fewest[task] = min(n, fewest.get(task, n))
        return {"tasks": fewest}

    def memory_columns(self, state: State, batch: Batch) -> dict[object, Field]:
        fewest = [state["tasks"].get(task, 0.0) for task in task_keys(batch)]
        return {(self, "fewest"): batch.tree.field(GROUP, fewest, torch.float64)}

    def __call__(self, batch: Batch) -> Field:
        m, n = _calls(batch), batch[self, "fewest"]
        cosine = (math.pi * m / (2 * m + self.slack)).map(torch.cos)
        sine = (math.pi * m / (m + n).clamp(low=1.0)).map(torch.sin)
        factor = cosine if self.cosine_only else where(n > 0, sine, cosine)
        return self.scale * factor * Solved()(batch)


def _calls(batch: Batch) -> Field:
    return batch.tool_calls.to(torch.float64).sum(TRAJECTORY)


# ---------------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class FlawPenalisedOutcome(Term):
    """+1 for a solved trajectory, −1 for a failed one; a solved one with an error in its reasoning loses ``penalty``.

    The fact ``error`` is the position of the error, −1 for none; failed trajectories need not be checked."""

    requires = frozenset({"fact error"})

    penalty: float = number(1.0, least=0)

    def __call__(self, batch: Batch) -> Field:
        solved = Solved()(batch)
        deduction = where(Fact("error", missing=-1.0)(batch) >= 0, self.penalty, 0.0)
        return 2 * solved - 1 - solved * deduction


@dataclass(frozen=True)
class TokenEntropyReward(Term):
    """helpful · H / max H − stable · |H − mean H| in the group, H the entropy of the token frequencies of a
    trajectory."""

    compares_peers = True

    helpful: float = 1.0
    stable: float = 1.0

    def __call__(self, batch: Batch) -> Field:
        tree = batch.tree
        one = tree.full(TOKEN, 1.0, torch.float64)
        same = Partition.by(tree, TOKEN, tree.ancestor(TOKEN, TRAJECTORY), batch.token)
        h = -(one.sum(same) / one.sum(TRAJECTORY)).log().mean(TRAJECTORY)
        top = h.max(GROUP)
        richness = where(top > 0, h / where(top > 0, top, 1.0), 0.0)
        return self.helpful * richness - self.stable * (h - h.mean(GROUP)).abs()


# ------------------------------------------------------------------ questions


@dataclass(frozen=True)
class ShapleyInformationGain(Term):
    """G = Σ ω over the pieces of information in the answer to a question; 0 for turns that ask nothing. At TURN.

    ω = softmax(φ / temperature), φₖ the Shapley value of piece k, the fact ``worth k`` of the trajectory, k = 0, 1 …;
    the turn fact ``uncovered`` has bit k set for each piece k in the answer. ``first_time_only``: pieces from earlier
    turns do not count."""

    requires = frozenset({"turn fact question", "turn fact uncovered", "fact worth 0"})

    temperature: float = number(2.0, above=0)
    first_time_only: bool = False

    def __call__(self, batch: Batch) -> Field:
        count = sum(name.startswith("worth ") for name in batch.facts)
        values = [Fact(f"worth {k}", missing=-torch.inf)(batch) for k in range(count)] or [Fact("worth 0")(batch)]
        weight = torch.softmax(torch.stack([w.x for w in values]) / self.temperature, 0).nan_to_num(0.0)
        asked = where(Fact("question", TURN, missing=0.0)(batch) > 0, 1.0, 0.0)
        bits = Fact("uncovered", TURN, missing=0.0)(batch).to(torch.int64)
        gain = batch.tree.full(TURN, 0.0, torch.float64)
        for k in range(count):  # over pieces of information; turns are vectorised
            answered = asked * bits.map(lambda b: (b >> k) & 1)  # noqa: B023
            if self.first_time_only:
                answered = where(answered.running_sum(TRAJECTORY) - answered > 0, 0.0, answered)
            gain = gain + answered * Field(batch.tree, TRAJECTORY, weight[k])
        return gain


@dataclass(frozen=True)
class QuestionReward(Term):
    """Reward of each token of a turn: α G + β G · solved for a question, γ · solved for the answer, both plus ``form``
    times the turn fact ``format``; 0 for other turns. At TURN."""

    requires = frozenset({"turn fact question", "turn fact answer"})

    gain: Term
    alpha: float = 2.0
    beta: float = 1.0
    gamma: float = 3.0
    form: float = 1.0

    def __call__(self, batch: Batch) -> Field:
        fact = lambda name: Fact(name, TURN, missing=0.0)(batch)  # noqa: E731
        gain, solved, form = self.gain(batch), Solved()(batch), self.form * fact("format")
        question_reward = self.alpha * gain + self.beta * gain * solved + form
        return where(fact("question") > 0, question_reward, where(fact("answer") > 0, self.gamma * solved + form, 0.0))


# ----------------------------------------------------------------- hidden states


@dataclass(frozen=True)
class FlowOutlierScore(Term):
    """Distance of a token's hidden states from the flow of good ones, rescaled to [0, 1] within its trajectory; kept
    only above ``threshold`` and for the ``top`` highest (earlier ones first), else 0. At TOKEN."""

    reads = frozenset({Signal.FLOW_DEVIATION})

    threshold: float = number(0.6, least=0, most=1)
    top: int = number(15, least=0)

    def __call__(self, batch: Batch) -> Field:
        tree, raw = batch.tree, batch[Signal.FLOW_DEVIATION].to(torch.float64)
        low, high = raw.min(TRAJECTORY), raw.max(TRAJECTORY)
        score = where(high > low, (raw - low) / where(high > low, high - low, 1.0), 0.0)
        rank = rank_by_value(-score.x, tree.ancestor(TOKEN, TRAJECTORY), tree.count(TRAJECTORY))
        return where((score > self.threshold) & Field(tree, TOKEN, rank < self.top), score, 0.0)


__all__ = [
    "FlawPenalisedOutcome", "FlowOutlierScore", "GroupContrast", "NormalisedLength", "QuestionReward",
    "ShapleyInformationGain", "TokenEntropyReward", "ToolEfficiencyReward", "UsedAction",
]  # fmt: skip
