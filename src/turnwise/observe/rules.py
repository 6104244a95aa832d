"""One table of rules: when something keeps a run from learning, what to say about it, and what to change.

A rule measures one step (``StepFacts``) or a whole run (``RunFacts``) and applies above its bound; NaN means that the run does
not have the metric. The live run tells the rules of steps as it goes (``RunHealth``), once and again when it has grown much;
``turnwise doctor`` judges all of them over a run's directory. The order of ``RULES`` is that of the findings, causes first: an
environment that fails explains missing rewards, not the reverse. Does not know how a metric is computed, nor who shows the words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from turnwise.core.protocols import OVERRULED, REFUSED
from turnwise.observe.mechanism import IDLE_STEPS, SILENT_STEPS, SLOTS, shares
from turnwise.observe.numbers import finite_number

if TYPE_CHECKING:
    from turnwise.config.settings import Settings

ERROR, WARNING, NOTE = "error", "warning", "note"
SOLVED = "solved"
REASONS = 3  # different reasons of dropped episodes in one message
MISMATCH_GROWTH = 4.0  # times the mismatch of the first steps
FIRST_STEPS = 3  # steps over which the first mismatch is averaged
TREND_STEPS = 8  # steps below which first and last quarter are no trend
SOLVED_STEPS = 3  # in a row at the end: one lucky step is not yet a solved run
SOLVED_LEAST = 0.9  # success at the lower end of its 95 % interval: 4 of 4 held-out tasks prove little
TOO_OLD = "older than staleness"  # begins the reason of a group that was dropped for its age
LOST = "lost by a fault of the machine"  # the same, of a group that was played and dropped for that
DROPPED, FAILED = "dropped/", "trajectory: "  # begin the metric of a reason, and the reason of a failed trajectory


# ------------------------------------------------------------------ what a rule reads


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
class StepFacts:
    """One step: its metrics, totals since the start, and the run's settings."""

    metrics: Mapping[str, float]
    limits: RunLimits
    episodes: float  # trained on so far
    skipped: float  # optimiser steps not taken so far
    dropped: Mapping[str, int]  # groups and trajectories that were not trained on, by reason
    first_mismatch: float
    solved: bool = False  # every trajectory of this step got the highest reward of the run so far
    idle: tuple[str, ...] = ()  # slots of the method that never acted, in more than a few steps
    measured: bool = True  # whether any step had credit to measure the method by

    def value(self, name: str, default: float = math.nan) -> float:
        number = finite_number(self.metrics.get(name))
        return default if number is None else number

    def named(self, kind: str) -> dict[str, float]:
        """The metrics whose names begin with ``kind``, by the rest of the name."""
        return {name.removeprefix(kind): n for name, n in self.metrics.items() if name.startswith(kind)}

    @property
    def identical(self) -> bool:
        """Whether groups of several trajectories had one answer each."""
        answers = self.value("answers/distinct") * self.value("trajectories", 0.0)
        return self.grouped and answers <= self.value("groups") + 0.5

    @property
    def grouped(self) -> bool:
        """Whether the step had groups of several trajectories."""
        return self.value("trajectories", 0.0) > self.value("groups", 0.0) > 0

    @property
    def failures(self) -> dict[str, int]:
        """Failed trajectories by reason."""
        return {r.removeprefix(FAILED): n for r, n in self.dropped.items() if r.startswith(FAILED)}


@dataclass(frozen=True)
class RunFacts:
    """A whole run. ``rows``: the metrics of each step of training, evaluations merged into them."""

    name: str
    settings: Settings
    rows: Sequence[Mapping[str, float | None]]
    drops: Mapping[str, int] = field(default_factory=dict)  # dropped groups by reason
    trained_groups: int = 0
    tasks: int = 0  # distinct tasks that were trained on
    before: Mapping[str, Any] = field(default_factory=dict)  # summaries of the evaluations
    after: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = True
    mismatch_tolerance: float = 1e-3

    def series(self, name: str) -> list[float]:
        """The finite values of a metric, in order."""
        return [value for row in self.rows if (value := finite_number(row.get(name))) is not None]

    def mean(self, name: str) -> float:
        return _mean(self.series(name))

    def first(self, name: str) -> float:
        """The mean over the first quarter of the run; NaN for a run that is too short or has no such metric."""
        return self._quarter(name, self.rows[: max(2, len(self.rows) // 4)])

    def last(self, name: str) -> float:
        """The mean over the last quarter."""
        return self._quarter(name, self.rows[-max(2, len(self.rows) // 4) :])

    def _quarter(self, name: str, rows: Sequence[Mapping[str, float | None]]) -> float:
        numbers = [finite_number(row.get(name)) for row in rows] if len(self.rows) >= TREND_STEPS else []
        return _mean([number for number in numbers if number is not None])

    def best(self, name: str) -> float:
        """The highest mean over a quarter of the run."""
        values, width = self.series(name), max(2, len(self.rows) // 4)
        if len(values) < TREND_STEPS:
            return math.nan
        return max(_mean(values[n : n + width]) for n in range(len(values) - width + 1))

    def evidence(self, names: Sequence[str]) -> dict[str, tuple[float, float]]:
        """First and last value of each metric that was measured."""
        return {name: (values[0], values[-1]) for name in names if (values := self.series(name))}

    @cached_property
    def solved(self) -> str:
        """What shows that the run is solved: its last steps, or its held-out tasks; empty if it is not."""
        first = solved_since(self.rows)
        if first is not None:
            steps = len(self.rows) - first
            return f"every trajectory of the last {steps} steps got the highest reward, so they had no gradient"
        return f"{self.after['success']:.1%} of the held-out tasks succeed" if solves_held_out(self.after) else ""

    @property
    def group_size(self) -> int:
        pairs = [(finite_number(r.get("trajectories")), finite_number(r.get("groups"))) for r in self.rows]
        sizes = [t / g for t, g in pairs if t and g]
        return self.settings.group_size or round(_mean(sizes) if sizes else 0)

    @cached_property
    def views(self) -> list[StepFacts]:
        """What the rules of steps read, step by step."""
        s, views = self.settings, list[StepFacts]()
        numbers = (s.max_tokens, s.context, self.group_size, s.temperature, s.lr)
        health = RunHealth(RunLimits(*numbers, self.mismatch_tolerance))
        for row in self.rows:
            health.dropped = {k.removeprefix(DROPPED): round(n) for k, n in row.items() if k.startswith(DROPPED) and n}
            views.append(health.view({name: math.nan if v is None else v for name, v in row.items()}))
        return views


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


@dataclass(frozen=True)
class Rule:
    """Applies where ``measure`` is above ``bound``. ``says`` is what to tell, ``change`` what to do about it, ``evidence`` the
    metrics to show. Of a step: told once it has applied for ``patience`` steps in a row, and again when the number is ``growth``
    times the one told last."""

    name: str
    severity: str
    measure: Callable[[Any], float]
    bound: float
    says: Callable[[Any, float], str]
    change: str | Callable[[Any], str] = ""
    evidence: tuple[str, ...] = ()
    patience: int = 1
    growth: float = math.inf
    whole_run: bool = False  # measured on RunFacts; otherwise on each StepFacts

    def cure(self, view: Any) -> str:
        return self.change if isinstance(self.change, str) else self.change(view)


of_run = partial(Rule, whole_run=True)


# -------------------------------------------------- what several rules measure or say


@dataclass
class SolvedStreak:
    """Counts the newest steps in a row in which every trajectory got the highest reward.

    By success where it is reported. By reward otherwise: all equal and the highest of the run, of which an earlier step had
    less; a reward that never differs says nothing."""

    steps: int = 0
    low: float = math.inf
    high: float = -math.inf

    def observe(self, metrics: Mapping[str, float | None]) -> bool:
        """Whether the run is solved after this step: one lucky step is not enough."""
        reward, success, flat = (finite_number(metrics.get(n)) for n in ("reward", "success", "groups/zero_variance"))
        if reward is not None:
            self.steps = 0 if reward > self.high and success is None else self.steps  # what was the highest is not
            self.low, self.high = min(self.low, reward), max(self.high, reward)
        highest = success == 1 if success is not None else reward is not None and reward >= self.high > self.low
        self.steps = self.steps + 1 if flat == 1 and highest else 0
        return self.steps >= SOLVED_STEPS


def solved_since(rows: Sequence[Mapping[str, float | None]]) -> int | None:
    """The index of the first row of the streak that a run ends with; None if the run is not solved at its end."""
    streak, solved = SolvedStreak(), False
    for row in rows:
        solved = streak.observe(row)
    return len(rows) - streak.steps if solved else None


def solves_held_out(summary: Mapping[str, Any]) -> bool:
    """Whether an evaluation's tasks are solved but for a few: also the lower end of the interval of its success is high."""
    return bool(summary.get("interval")) and summary["interval"][0] >= SOLVED_LEAST


def _most(reasons: Mapping[str, int]) -> str:
    """The most frequent reasons with their numbers."""
    most = Counter(reasons).most_common()
    named = "; ".join(f"{n} × {reason}" for reason, n in most[:REASONS])
    return named + (f"; {len(most) - REASONS} other reasons" if len(most) > REASONS else "")


def _gap(facts: RunFacts) -> float:
    """Success in training minus success on held-out tasks, at the end."""
    held_out = facts.after.get("success")
    return facts.last("success") - held_out if held_out is not None else math.nan


def _drops(facts: RunFacts, too_old: bool) -> dict[str, int]:
    """Dropped groups by reason: those that were too old, or those that admission or failures dropped; never a resume's own."""
    drops = {reason: n for reason, n in facts.drops.items() if reason not in ("rolled back", "interrupted")}
    return {reason: n for reason, n in drops.items() if reason.startswith(TOO_OLD) == too_old}


def _dropped_share(facts: RunFacts, too_old: bool = False) -> float:
    """Share of the groups that were dropped, of those and the ones that were trained on."""
    dropped = sum(_drops(facts, too_old).values())
    total = dropped + facts.trained_groups
    return dropped / total if total >= 8 else math.nan


def _part_of_step(facts: RunFacts, name: str) -> float:
    whole = facts.mean("seconds")
    return facts.mean(name) / whole if whole > 1.0 else math.nan


# ------------------------------------------------------------------------ the table

RULES = (
    of_run(SOLVED, NOTE, lambda f: float(bool(f.solved)), 0.5, lambda f, x: f.solved,
        "nothing, or harder tasks (--difficulty, --data)", ("success", "reward", "groups/zero_variance", "grad_norm")),
    # a step's loss that is not finite is written as null, and a step without an update writes none
    of_run("loss not finite", ERROR,
        lambda f: _mean([float(row["loss"] is None) for row in f.rows if "loss" in row]), 0.1,
        lambda f, x: f"the loss was not a finite number in {x:.0%} of the steps; the largest reward is "
        f"{max(f.series('reward_max_abs'), default=0):.3g}", "scale rewards to about 1, or lower --lr",
        ("reward_max_abs", "grad_norm")),
    Rule("skipped optimiser steps", WARNING, lambda v: v.skipped, 0.5,
        lambda v, x: f"{x:.0f} optimiser steps were not taken, because the loss or the gradient was not finite (the largest "
        f"reward is {v.value('reward_max_abs', 0.0):.3g})",
        lambda v: f"scale rewards to about 1, or lower --lr (now {v.limits.lr:g})", ("skipped", "reward_max_abs"), growth=4.0),
    of_run("rewards out of scale", WARNING, lambda f: max(f.series("reward_max_abs"), default=math.nan), 100.0,
        lambda f, x: f"the largest reward is {x:.3g}", "scale rewards to about 1", ("reward_max_abs", "grad_norm")),
    Rule("failed episodes", ERROR, lambda v: float(sum(v.failures.values())), 0.5,
        lambda v, x: f"{x:.0f} episodes failed and were not trained on, {v.episodes:.0f} were: {_most(v.failures)}", growth=10.0),
    Rule("refused calls", WARNING, lambda v: sum(v.named(REFUSED).values()), 0.0,
        lambda v, x: f"{x:.2g} calls of the agent per episode were refused ({', '.join(v.named(REFUSED))}), and it went on "
        "without an answer", "see docs/agents.md, Limits: leave the field out, or raise --max-turns or --context", growth=4.0),
    Rule("overruled fields", NOTE, lambda v: float(len(v.named(OVERRULED))), 0.5,
        lambda v, x: f"the agent's calls set {', '.join(v.named(OVERRULED))}, which the run overrules: its own settings say how "
        "the policy is sampled", growth=1.01),
    Rule("unread tool calls", WARNING, lambda v: v.value("tool_calls/unread", 0.0), 0.05,
        lambda v, x: f"{x:.2g} tool calls per episode were written in a syntax that is not read, so no tool was called",
        "set the syntax with --tool-syntax, or give a chat template that shows the right one with --template",
        ("tool_calls/unread", "tool_calls"), growth=2.0),
    Rule("turns cut by max_tokens", WARNING, lambda v: v.value("truncated/turns_by_max_tokens", 0.0), 0.5,
        lambda v, x: f"{x:.0%} of the turns were cut at {v.limits.max_tokens} tokens", "write a larger --max-tokens",
        ("truncated/turns_by_max_tokens", "tokens_per_turn"), growth=1.5),
    Rule("episodes cut by context", WARNING, lambda v: v.value("truncated/episodes_by_context", 0.0), 0.25,
        lambda v, x: f"{x:.0%} of the episodes filled the context window of {v.limits.context} tokens",
        "write a larger --context, or a smaller --max-tokens or --history", ("truncated/episodes_by_context",), growth=1.5),
    Rule("episodes cut by max_turns", WARNING, lambda v: v.value("truncated/episodes_by_max_turns", 0.0), 0.5,
        lambda v, x: f"{x:.0%} of the episodes ended at the limit of turns", "write a larger --max-turns",
        ("truncated/episodes_by_max_turns", "turns"), growth=1.5),
    of_run("groups of one", ERROR,
        lambda f: float(f.group_size == 1 and f.mean("advantage/size") < 1e-9), 0.5,
        lambda f, x: "each group has one trajectory, and its advantage relative to itself is 0", "--group-size",
        ("trajectories", "groups", "advantage/size")),
    # so small that float32 weights do not move, in three quarters of the steps: a schedule ends at zero
    of_run("learning rate zero", ERROR,
        lambda f: _mean([float(lr < 1e-9) for n, lr in enumerate(rates) if not n or n < len(rates) * 3 // 4])
        if (rates := f.series("lr")[f.settings.warmup :]) else math.nan, 0.5,
        lambda f, x: f"the learning rate was below 1e-9 in {x:.0%} of the steps, so the weights did not move",
        "--lr, --warmup", ("lr", "grad_norm")),
    # in the first step the policy has not moved far, unless data of older weights is allowed
    of_run("ratio not 1 at the first step", ERROR,
        lambda f: abs(f.series("ratio")[0] - 1.0) if f.series("ratio") and f.settings.staleness.synchronous else math.nan, 0.1,
        lambda f, x: f"the importance ratio was {f.series('ratio')[0]:.3g} in the first step, where sampler and learner hold the "
        "same weights", "--rollout-dtype, --temperature (the one that samples must be recorded), or fewer --epochs",
        ("ratio", "mismatch/mean_abs", "policy_check")),
    # as a share of the tolerance; a mismatch that was there from the start is a matter of precision
    Rule("growing mismatch", WARNING, lambda v: v.value("policy_check") / v.limits.mismatch_tolerance
        if v.value("policy_check") > MISMATCH_GROWTH * v.first_mismatch else 0.0, 0.3,
        lambda v, x: f"log-probabilities of generator and learner differ by {v.value('policy_check'):.2g} on average, "
        f"{v.first_mismatch:.2g} at the start; the run stops at {v.limits.mismatch_tolerance:.2g}",
        "compute rollouts in the precision of the learner (--rollout-dtype, --dtype)", ("policy_check",), growth=2.0),
    of_run("sampler and learner differ", WARNING, lambda f: f.mean("mismatch/mean_abs"), 0.02,
        lambda f, x: f"log-probabilities at sampling and in the learner differ by {x:.2g} per token on average",
        "--rollout-dtype as --dtype, or a method that corrects the mismatch", ("mismatch/mean_abs", "ratio/ess/token")),
    of_run("stale data", WARNING,
        lambda f: f.last("staleness") if f.last("ratio/ess/token") < 0.9 else math.nan, 0.9,
        lambda f, x: f"tokens were {x:.1f} steps old when they were trained on, and the effective share of the tokens is "
        f"{f.last('ratio/ess/token'):.0%}", "--staleness, or a method that corrects for age",
        ("staleness", "staleness/oldest", "ratio/ess/token")),
    of_run("groups too old", WARNING, lambda f: _dropped_share(f, too_old=True), 0.2,
        lambda f, x: f"{x:.0%} of the groups were thrown away because later ones overtook them: "
        f"{_most(_drops(f, True))}; what was sampled for them is lost",
        "--staleness N,wait (training waits for them) or a higher N; shorter episodes (--max-turns, --max-tokens), a faster "
        "environment, or fewer --groups at once", ("staleness", "staleness/oldest", "seconds/rollout", "seconds/learn")),
    of_run("nothing is ever rewarded", ERROR,
        lambda f: float(max(values) == 0) if len(values := f.series("reward_max_abs")) >= 3 else math.nan, 0.5,
        lambda f, x: f"every reward of all {len(f.rows)} steps was 0", "--difficulty, --reward, or a model that can do the task",
        ("reward_max_abs", "groups/zero_variance")),
    Rule("identical answers", ERROR, lambda v: float(v.identical and not v.solved), 0.5,
        lambda v, x: "all answers to the same task were identical in two steps",
        lambda v: f"raise --temperature (now {v.limits.temperature:g}), or lower --lr (now {v.limits.lr:g}) if they once "
        "differed",
        ("answers/distinct", "entropy"), patience=2),
    # advantages are looked at, too: other data than rewards may give them
    Rule("no spread of rewards", ERROR, lambda v: float(v.grouped and not v.identical and v.value("advantage/size") < 1e-12
        and v.value("groups/zero_variance", 0.0) == 1 and not v.solved), 0.5,
        lambda v, x: f"no group had two different rewards in three steps (mean reward {v.value('reward', 0.0):.3g}), so there "
        "was nothing to learn from",
        lambda v: "choose tasks that the model solves sometimes (--difficulty, or a method whose sampler does), or raise "
        f"--group-size (now {v.limits.group_size}) or --temperature (now {v.limits.temperature:g})",
        ("groups/zero_variance", "reward"), patience=3),
    # neither equal rewards nor a skipped step explain it
    Rule("zero gradient", ERROR, lambda v: float(v.value("grad_norm") == 0 and v.value("groups/zero_variance", 0.0) != 1
        and not v.value("skipped", 0.0) > 0), 0.5,
        lambda v, x: "the gradient was exactly zero in three steps, although rewards differ (the largest is "
        f"{v.value('reward_max_abs', 0.0):.3g})",
        lambda v: f"scale rewards to about 1, and see clip_share (now {v.value('clip_share', 0.0):.0%}) and the method's clip "
        "and mask settings (`turnwise explain METHOD`)", ("grad_norm", "clip_share"), patience=3),
    of_run("most groups dropped", WARNING, _dropped_share, 0.6,
        lambda f, x: f"{x:.0%} of the sampled groups were dropped: {_most(_drops(f, False))}",
        "--difficulty, or another sampler of tasks", ("groups", "tasks_drawn")),
    Rule("mechanism never acted", WARNING, lambda v: float(len(v.idle)), 0.5,
        lambda v, x: f"the method's {', '.join(v.idle)} did nothing yet that the base method would not have done"
        + ": no trajectory had credit, so nothing could be measured" * (not v.measured),
        lambda v: "; ".join(f"{slot} needs {SLOTS[slot][1]}" for slot in v.idle), ("advantage/size", "groups/zero_variance"),
        growth=1.01),
    Rule("no group to train on", ERROR, lambda v: float(v.value("groups") == 0), 0.5,
        lambda v, x: "a step had no group that could be trained on; dropped since the start: "
        f"{_most(v.dropped) or 'none'}",
        lambda v: "let training wait for slow groups (--staleness N,wait), or raise N"
        if max(v.dropped, key=v.dropped.get, default="").startswith(TOO_OLD)
        else "choose tasks that the model solves sometimes (--difficulty), or raise --group-size or --max-draws", ("groups",)),
    # only where the policy once had some entropy
    of_run("entropy collapse", WARNING,
        lambda f: f.first("entropy") / max(f.last("entropy"), 1e-9) if f.first("entropy") > 0.1 and not f.solved
        else math.nan, 10.0,
        lambda f, x: f"the entropy fell from {f.first('entropy'):.3g} to {f.last('entropy'):.3g}; answers stop differing",
        "--temperature, --lr, or a method with an entropy term or a higher upper clip", ("entropy", "answers/distinct")),
    of_run("entropy grows", WARNING, lambda f: f.last("entropy") / max(f.first("entropy"), 1e-2), 2.5,
        lambda f, x: f"the entropy grew from {f.first('entropy'):.3g} to {f.last('entropy'):.3g}: the policy becomes noise",
        "--lr, or the weight of the method's entropy term", ("entropy", "reward")),
    of_run("most tokens clipped", WARNING, lambda f: f.last("clip_share"), 0.4,
        lambda f, x: f"{x:.0%} of the tokens have no gradient, because their ratio is outside the method's bounds",
        "--lr, --epochs, --minibatches, or the method's clip", ("clip_share", "ratio", "kl/behaviour")),
    of_run("large policy steps", WARNING, lambda f: f.mean("kl/behaviour"), 0.2,
        lambda f, x: f"the policy moves by a KL divergence of {x:.2g} per token within a step", "--lr, --epochs",
        ("kl/behaviour", "ratio", "lr")),
    of_run("gradient clipped hard", WARNING, lambda f: sorted(norms)[len(norms) // 2] / f.settings.clip_norm
        if (norms := f.series("grad_norm")) and f.settings.clip_norm else math.nan, 20.0,
        lambda f, x: f"the median gradient norm is {x:.0f} times --clip-norm {f.settings.clip_norm:g}: its size never counts",
        "--clip-norm, or scale rewards to about 1", ("grad_norm", "advantage/size", "reward_max_abs")),
    of_run("reward collapsed", ERROR,
        lambda f: (best - f.last("reward")) / best if (best := f.best("reward")) > 0.1 else math.nan, 0.5,
        lambda f, x: f"the reward fell from {f.best('reward'):.3g} to {f.last('reward'):.3g}",
        "--lr, or a KL penalty of the method", ("reward", "entropy", "kl/behaviour", "lr")),
    of_run("reward rises, success does not", WARNING,
        lambda f: (f.last("reward") - f.first("reward")) / max(abs(f.first("reward")), 0.2)
        if f.last("success") - f.first("success") <= 0.02 else math.nan, 0.3,
        lambda f, x: f"the reward rose from {f.first('reward'):.3g} to {f.last('reward'):.3g} and success went from "
        f"{f.first('success'):.0%} to {f.last('success'):.0%}: the reward pays for something else", "--reward; see probe-reward",
        ("reward", "success", "tokens_per_turn")),
    of_run("tools given up", WARNING,
        lambda f: f.first("tool_calls") / max(f.last("tool_calls"), 1e-9) if f.first("tool_calls") > 0.2 else math.nan, 5.0,
        lambda f, x: f"tool calls fell from {f.first('tool_calls'):.2g} to {f.last('tool_calls'):.2g} per episode",
        "--lr, or a reward that needs the tool", ("tool_calls", "success", "reward")),
    # a call that cannot be read is an error and no call, so there may be more errors than calls
    of_run("tool calls fail", WARNING,
        lambda f: f.last("tool_errors") / tries
        if (tries := max(f.last("tool_calls"), f.last("tool_errors"))) > 0.2 else math.nan, 0.6,
        lambda f, x: f"{x:.0%} of the tool calls end in an error", "--tool-syntax, --describe-tools, --cold-steps",
        ("tool_errors", "tool_calls")),
    of_run("answers grow longer without gain", WARNING,
        lambda f: f.last("tokens_per_turn") / max(f.first("tokens_per_turn"), 1.0)
        if f.last(outcome := "success" if f.series("success") else "reward") - f.first(outcome) <= 0.05 else math.nan, 1.8,
        lambda f, x: f"turns became {x:.1f} times longer ({f.first('tokens_per_turn'):.0f} to {f.last('tokens_per_turn'):.0f} "
        "tokens) and the outcome did not improve", "--max-tokens, or a method without length bias in its average",
        ("tokens_per_turn", "success", "reward")),
    of_run("tasks too easy", WARNING,
        lambda f: f.mean("groups/all_succeed") if f.first("success") > 0.9 else math.nan, 0.7,
        lambda f, x: f"{x:.0%} of the groups succeed entirely, so they have no gradient", "--difficulty",
        ("groups/all_succeed", "success", "groups/zero_variance")),
    of_run("tasks too hard", WARNING, lambda f: f.mean("groups/all_fail"), 0.8,
        lambda f, x: f"{x:.0%} of the groups fail entirely, so they have no gradient", "--difficulty, --group-size, --demos",
        ("groups/all_fail", "success", "groups/zero_variance")),
    of_run("few distinct answers", WARNING, lambda f: 1.0 - f.mean("answers/distinct") if not f.solved else math.nan, 0.7,
        lambda f, x: f"only {1 - x:.0%} of the answers to a task differ", "--temperature, --top-p, --top-k",
        ("answers/distinct", "entropy")),
    of_run("few tasks repeated", WARNING,
        lambda f: f.trained_groups / f.tasks if _gap(f) > 0.2 and f.tasks and f.trained_groups >= 40 else math.nan, 4.0,
        lambda f, x: f"{f.trained_groups} groups came from {f.tasks} tasks, and held-out success is {_gap(f):.0%} lower than in "
        "training", "more tasks (--data), or fewer --steps", ("success", "eval/success")),
    of_run("held-out success lower than in training", WARNING, _gap, 0.3,
        lambda f, x: f"success is {f.last('success'):.0%} in training and {f.after.get('success', 0):.0%} on held-out tasks",
        "more tasks, --difficulty as in the evaluation, --eval-temperature", ("success", "eval/success")),
    # the distance of the two intervals: negative where they overlap
    of_run("held-out success fell", ERROR, lambda f: float(f.before["interval"][0]) - float(f.after["interval"][1])
        if f.before.get("interval") and f.after.get("interval") else math.nan, 0.0,
        lambda f, x: f"held-out success was {f.before.get('success', 0):.0%} before training and "
        f"{f.after.get('success', 0):.0%} after it", "--lr, --steps; keep an earlier checkpoint", ("reward", "eval/success")),
    of_run("history rewritten", WARNING, lambda f: f.mean("restarts"), 0.5,
        lambda f, x: f"the chat template rewrites history {x:.2g} times per episode, so prompts are read again each time",
        "--template, --template-options, --history", ("restarts", "turns")),
    # a step without advantages has no gradient to share
    of_run("only pushed down", WARNING, lambda f: 1 - _mean([share for row in f.rows
        if (share := finite_number(row.get("gradient_share/positive_advantage"))) is not None
        and (finite_number(row.get("advantage/size", 1.0)) or 0.0) > 1e-12]), 0.95,
        lambda f, x: f"{x:.0%} of the gradient lowers probabilities; hardly anything is made more likely",
        "--difficulty, --group-size, or a method that weighs signs", ("gradient_share/positive_advantage", "success")),
    # in units of the time to sample a turn, if it is a noticeable time at all
    Rule("slow environment", WARNING, lambda v: v.value("seconds/turn_answered") / max(v.value("seconds/turn_sampled", 0.0), 1e-6)
        if v.value("seconds/turn_answered", 0.0) > 0.5 else 0.0, 4.0,
        lambda v, x: f"the environment takes {v.value('seconds/turn_answered'):.2g} s per turn, sampling "
        f"{v.value('seconds/turn_sampled'):.2g} s", "make `step` faster or async, do not let dialogues wait for each other's "
        "tools (--staleness 0,continuous), or let rollouts run ahead (--staleness 1)",
        ("seconds/turn_answered", "seconds/turn_sampled"), patience=2, growth=4.0),
    # seconds per token: a step with more tokens may take longer
    of_run("steps become slower", WARNING,
        lambda f: f.last("seconds") / max(f.last("tokens"), 1.0) / (f.first("seconds") / max(f.first("tokens"), 1.0))
        if f.first("seconds") > 0 and f.last("seconds") > 1.0 else math.nan, 3.0,
        lambda f, x: f"a token takes {x:.1f} times as long as in the beginning", "--isolate-env; look for leaks in its code",
        ("seconds", "tokens", "seconds/turn_answered")),
    of_run("learner takes the time", WARNING, lambda f: _part_of_step(f, "seconds/learn"), 0.85,
        lambda f, x: f"{x:.0%} of a step is the update", "--micro-batch-tokens, --dtype, fewer --epochs",
        ("seconds/learn", "seconds/rollout")),
    of_run("publishing takes the time", WARNING, lambda f: _part_of_step(f, "seconds/publish"), 0.3,
        lambda f, x: f"{x:.0%} of a step is the transfer of weights to the sampler", "--staleness 1, or more --groups per step",
        ("seconds/publish", "seconds")),
    of_run("not finished", NOTE, lambda f: float(not f.finished), 0.5,
        lambda f, x: f"the run has no summary; it recorded {len(f.rows)} of {f.settings.steps} steps", "turnwise resume", ()),
    of_run("no measurable learning", NOTE,
        lambda f: float(f.before["interval"][0] <= f.after["success"] <= f.before["interval"][1])
        if f.before.get("interval") and f.after.get("success") is not None else math.nan, 0.5,
        lambda f, x: f"held-out success after training ({f.after.get('success', 0):.0%}) lies in the interval from before "
        f"({f.before['interval'][0]:.0%} to {f.before['interval'][1]:.0%})", "--steps, --eval-tasks", ("reward", "success")),
)  # fmt: skip
STEP_RULES = tuple(rule for rule in RULES if not rule.whole_run)


# ------------------------------------------------------------------------ live runs


@dataclass(frozen=True)
class HealthMessage:
    """One message: which rule, its number, and what to tell the user."""

    name: str
    value: float
    text: str


@dataclass
class RunHealth:
    """Observes one step after the other."""

    limits: RunLimits
    dropped: Mapping[str, int] = field(default_factory=dict)  # the collector's live counts
    last_values: dict[str, float] = field(default_factory=dict)  # of the rules that were told, also before a resume
    slots: frozenset[str] = frozenset()  # that the method changes: one without a share could not be measured
    _held: Counter[str] = field(default_factory=Counter)  # steps in a row
    _episodes: float = 0.0
    _skipped: float = 0.0
    _mismatches: list[float] = field(default_factory=list)  # of the first steps
    _streak: SolvedStreak = field(default_factory=SolvedStreak)
    _steps: int = 0
    _acted: dict[str, list[float]] = field(default_factory=dict)  # by slot: steps, the largest share

    def view(self, metrics: Mapping[str, float]) -> StepFacts:
        """What the rules read of one step; call it once for each step, in order."""
        self._episodes += finite_number(metrics.get("trajectories")) or 0.0
        self._skipped += finite_number(metrics.get("skipped")) or 0.0
        mismatch = finite_number(metrics.get("policy_check"))
        if mismatch is not None and len(self._mismatches) < FIRST_STEPS:
            self._mismatches.append(mismatch)
        first = sum(self._mismatches) / len(self._mismatches) if self._mismatches else math.inf
        self._streak.observe(metrics)
        solved = self._streak.steps > 0
        for slot, share in shares([metrics]).items():
            steps, most = self._acted.get(slot, (0, 0.0))
            self._acted[slot] = [steps + 1, max(most, share)]
        self._steps += 1  # those without credit to measure count, too, where nothing acted
        acted, late = self._acted or {s: [0, 0.0] for s in SLOTS if s in self.slots}, self._steps >= SILENT_STEPS
        acts = any(most for _, most in acted.values())
        idle = tuple(s for s, (n, most) in acted.items() if most == 0 and (n >= IDLE_STEPS if acts else late))
        dropped, episodes, skipped = self.dropped, self._episodes, self._skipped
        return StepFacts(metrics, self.limits, episodes, skipped, dropped, first, solved, idle, bool(self._acted))

    def observe(self, metrics: Mapping[str, float]) -> list[HealthMessage]:
        """The messages that the metrics of one step give rise to."""
        view, messages = self.view(metrics), list[HealthMessage]()
        for rule in STEP_RULES:
            value = rule.measure(view)
            if not value > rule.bound:  # also for NaN: the metric is absent
                self._held[rule.name] = 0
                continue
            self._held[rule.name] += 1
            before = self.last_values.get(rule.name)
            if self._held[rule.name] >= rule.patience and (before is None or value >= rule.growth * before):
                self.last_values[rule.name] = value
                text = "; ".join(filter(None, (rule.says(view, value), rule.cure(view))))
                messages.append(HealthMessage(rule.name, value, text))
        return messages
