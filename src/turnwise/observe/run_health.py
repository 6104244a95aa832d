"""Watches the metrics of a run and says what prevents it from learning, with the number seen and the setting to change.

Each condition is a row of ``CONDITIONS``. It is told once, and again only when its number has grown much. Does not know how
a metric is computed, nor who shows the messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from turnwise.observe.metric_names import finite_number

REASONS = 3  # different reasons of dropped episodes in one message
MISMATCH_GROWTH = 4.0  # times the mismatch of the first steps
FIRST_STEPS = 3  # steps over which the first mismatch is averaged
TOO_OLD = "older than staleness"  # begins the reason of a group that was dropped for its age


@dataclass(frozen=True)
class RunLimits:
    """The settings that messages quote."""

    max_tokens: int
    context: int
    group_size: int
    temperature: float
    lr: float
    mismatch_tolerance: float


@dataclass(frozen=True)
class HealthView:
    """What a condition may read: the metrics of this step, totals since the start, and the run's settings."""

    metrics: Mapping[str, float]
    limits: RunLimits
    episodes: float  # trained on so far
    skipped: float  # optimiser steps not taken so far
    dropped: Mapping[str, int]  # groups and trajectories that were not trained on, by reason
    first_mismatch: float

    def value(self, name: str, default: float = math.nan) -> float:
        number = finite_number(self.metrics.get(name))
        return default if number is None else number

    @property
    def grouped(self) -> bool:
        """Whether the step had groups of several trajectories."""
        return self.value("trajectories", 0.0) > self.value("groups", 0.0) > 0

    @property
    def identical(self) -> bool:
        answers = self.value("answers/distinct") * self.value("trajectories", 0.0)
        return self.grouped and answers <= self.value("groups") + 0.5

    @property
    def failures(self) -> dict[str, int]:
        """Failed trajectories by reason."""
        head = "trajectory: "
        return {reason.removeprefix(head): n for reason, n in self.dropped.items() if reason.startswith(head)}


@dataclass(frozen=True)
class Condition:
    """``measure`` returns the number seen; the condition holds while it is above ``threshold``, and is told once it has held
    for ``patience`` steps in a row. It is told again when the number is ``growth`` times the one told last."""

    name: str
    measure: Callable[[HealthView], float]
    threshold: float
    text: Callable[[HealthView, float], str]
    patience: int = 1
    growth: float = math.inf


@dataclass(frozen=True)
class HealthMessage:
    """One message: which condition, its number, and what to tell the user."""

    name: str
    value: float
    text: str


# ------------------------------------------------------------------- conditions


def _no_spread(view: HealthView) -> float:
    """1 if no group had two different rewards and no token an advantage. Other data than rewards may give advantages."""
    flat = view.grouped and view.value("groups/zero_variance", 0.0) == 1 and view.value("advantage/size") < 1e-12
    return float(flat and not view.identical)


def _zero_gradient(view: HealthView) -> float:
    """1 if the gradient is zero and neither equal rewards nor a skipped step explain it."""
    explained = view.value("groups/zero_variance", 0.0) == 1 or view.value("skipped", 0.0) > 0
    return float(view.value("grad_norm") == 0 and not explained)


def _mismatch(view: HealthView) -> float:
    """The mismatch of generator and learner as a share of the tolerance, where it has grown since the run began."""
    now = view.value("policy_check", 0.0)
    return now / view.limits.mismatch_tolerance if now > MISMATCH_GROWTH * view.first_mismatch else 0.0


def _slow_environment(view: HealthView) -> float:
    """How many times longer than sampling the environment takes per turn, if it is a noticeable time at all."""
    answered, sampled = view.value("seconds/turn_answered", 0.0), view.value("seconds/turn_sampled", 0.0)
    return answered / max(sampled, 1e-6) if answered > 0.5 else 0.0


def _count_reasons(reasons: Mapping[str, int]) -> str:
    most = Counter(reasons).most_common()
    named = "; ".join(f"{n} × {reason}" for reason, n in most[:REASONS])
    return named + (f"; {len(most) - REASONS} other reasons" if len(most) > REASONS else "")


def _against_drops(reasons: Mapping[str, int]) -> str:
    """What to change, by the most frequent reason."""
    most = Counter(reasons).most_common(1)
    if most and most[0][0].startswith(TOO_OLD):
        return "let training wait for slow groups (--staleness N,wait), or raise N"
    return "choose tasks that the model solves sometimes (--difficulty), or raise --group-size or --max-draws"


CONDITIONS = (
    Condition(
        "turns cut by max_tokens",
        lambda v: v.value("truncated/turns_by_max_tokens", 0.0),
        0.5,
        lambda v, x: f"{x:.0%} of the turns were cut at {v.limits.max_tokens} tokens; write a larger --max-tokens",
        growth=1.5,
    ),
    Condition(
        "episodes cut by context",
        lambda v: v.value("truncated/episodes_by_context", 0.0),
        0.25,
        lambda v, x: f"{x:.0%} of the episodes filled the context window of {v.limits.context} tokens; write a larger "
        "--context, or a smaller --max-tokens or --history",
        growth=1.5,
    ),
    Condition(
        "episodes cut by max_turns",
        lambda v: v.value("truncated/episodes_by_max_turns", 0.0),
        0.5,
        lambda v, x: f"{x:.0%} of the episodes ended at the limit of turns; write a larger --max-turns",
        growth=1.5,
    ),
    Condition(
        "identical answers",
        lambda v: float(v.identical),
        0.5,
        lambda v, x: "all answers to the same task were identical in two steps; raise --temperature "
        f"(now {v.limits.temperature:g}), or lower --lr (now {v.limits.lr:g}) if they once differed",
        patience=2,
    ),
    Condition(
        "no spread of rewards",
        _no_spread,
        0.5,
        lambda v, x: f"no group had two different rewards in three steps (mean reward {v.value('reward', 0.0):.3g}), so there "
        "was nothing to learn from; choose tasks that the model solves sometimes (--difficulty, or a method whose sampler "
        f"does), or raise --group-size (now {v.limits.group_size}) or --temperature (now {v.limits.temperature:g})",
        patience=3,
    ),
    Condition(
        "zero gradient",
        _zero_gradient,
        0.5,
        lambda v, x: "the gradient was exactly zero in three steps, although rewards differ (the largest is "
        f"{v.value('reward_max_abs', 0.0):.3g}); scale rewards to about 1, and see clip_share (now "
        f"{v.value('clip_share', 0.0):.0%}) and the method's clip and mask settings (`turnwise explain METHOD`)",
        patience=3,
    ),
    Condition(
        "failed episodes",
        lambda v: float(sum(v.failures.values())),
        0.5,
        lambda v, x: f"{x:.0f} episodes failed and were not trained on, {v.episodes:.0f} were: {_count_reasons(v.failures)}",
        growth=10.0,
    ),
    Condition(
        "no group to train on",
        lambda v: float(v.value("groups") == 0),
        0.5,
        lambda v, x: "a step had no group that could be trained on; dropped since the start: "
        f"{_count_reasons(v.dropped) or 'none'}; {_against_drops(v.dropped)}",
    ),
    Condition(
        "unread tool calls",
        lambda v: v.value("tool_calls/unread", 0.0),
        0.05,
        lambda v, x: f"{x:.2g} tool calls per episode were written in a syntax that is not read, so no tool was called; "
        "set the syntax with --tool-syntax, or give a chat template that shows the right one with --template",
        growth=2.0,
    ),
    Condition(
        "skipped optimiser steps",
        lambda v: v.skipped,
        0.5,
        lambda v, x: f"{x:.0f} optimiser steps were not taken, because the loss or the gradient was not finite (the largest "
        f"reward is {v.value('reward_max_abs', 0.0):.3g}); scale rewards to about 1, or lower --lr (now {v.limits.lr:g})",
        growth=4.0,
    ),
    Condition(
        "growing mismatch",
        _mismatch,
        0.3,
        lambda v, x: f"log-probabilities of generator and learner differ by {v.value('policy_check'):.2g} on average, "
        f"{v.first_mismatch:.2g} at the start; the run stops at {v.limits.mismatch_tolerance:.2g}. Compute rollouts in the "
        "precision of the learner (--rollout-dtype, --dtype)",
        growth=2.0,
    ),
    Condition(
        "slow environment",
        _slow_environment,
        4.0,
        lambda v, x: f"the environment takes {v.value('seconds/turn_answered'):.2g} s per turn, sampling "
        f"{v.value('seconds/turn_sampled'):.2g} s; make `step` faster or async, do not let dialogues wait for each other's tools "
        "(--staleness 0,continuous), or let rollouts run ahead (--staleness 1)",
        patience=2,
        growth=4.0,
    ),
)  # fmt: skip


# --------------------------------------------------------------------- observer


@dataclass
class RunHealth:
    """Observes one step after the other. ``told``: conditions told before a resume, with their numbers."""

    limits: RunLimits
    dropped: Mapping[str, int] = field(default_factory=dict)  # the collector's live counts
    told: dict[str, float] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = CONDITIONS
    _held: Counter[str] = field(default_factory=Counter)  # steps in a row
    _episodes: float = 0.0
    _skipped: float = 0.0
    _mismatches: list[float] = field(default_factory=list)  # of the first steps

    def observe(self, metrics: Mapping[str, float]) -> list[HealthMessage]:
        """The messages that the metrics of one step give rise to."""
        view = self.view(metrics)
        return [message for condition in self.conditions if (message := self._check(condition, view)) is not None]

    def view(self, metrics: Mapping[str, float]) -> HealthView:
        """What the conditions read of one step; call it once for each step, in order."""
        self._episodes += finite_number(metrics.get("trajectories")) or 0.0
        self._skipped += finite_number(metrics.get("skipped")) or 0.0
        mismatch = finite_number(metrics.get("policy_check"))
        if mismatch is not None and len(self._mismatches) < FIRST_STEPS:
            self._mismatches.append(mismatch)
        first = sum(self._mismatches) / len(self._mismatches) if self._mismatches else math.inf
        return HealthView(metrics, self.limits, self._episodes, self._skipped, self.dropped, first)

    def _check(self, condition: Condition, view: HealthView) -> HealthMessage | None:
        value = condition.measure(view)
        if not value > condition.threshold:  # NaN: the metric is absent
            self._held[condition.name] = 0
            return None
        self._held[condition.name] += 1
        told = self.told.get(condition.name)
        if self._held[condition.name] < condition.patience or (told is not None and value < condition.growth * told):
            return None
        self.told[condition.name] = value
        return HealthMessage(condition.name, value, condition.text(view, value))
