"""The rules of the doctor that need a whole run: trends, shares, evaluations. Rules of single steps are the conditions of
``observe.run_health``, which a running run tells; ``diagnosis`` joins both.

A rule is a row of ``RULES``: a number, a bound, the words. NaN means that the run does not have the metric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from turnwise.inspector.doctor.facts import RunFacts
from turnwise.observe.run_health import TOO_OLD

ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclass(frozen=True)
class RunRule:
    """Applies where ``measure`` is above ``bound``. ``metrics`` are shown as evidence, ``setting`` is what to change."""

    name: str
    severity: str
    measure: Callable[[RunFacts], float]
    bound: float
    text: Callable[[RunFacts, float], str]
    setting: str
    metrics: tuple[str, ...]


# ------------------------------------------------------------------ measures


def _fall(facts: RunFacts, name: str) -> float:
    """How far a metric fell from its best quarter to its last, as a share of that best."""
    best, last = facts.best(name), facts.last(name)
    return (best - last) / best if best > 0.1 else math.nan


def _entropy_left(facts: RunFacts) -> float:
    """1 over the share of the entropy that is left; only where the policy once had some."""
    first, last = facts.first("entropy"), facts.last("entropy")
    return first / max(last, 1e-9) if first > 0.1 else math.nan


def _gap(facts: RunFacts) -> float:
    """Success in training minus success on held-out tasks, at the end."""
    held_out = facts.after.get("success")
    return facts.last("success") - held_out if held_out is not None else math.nan


def _regression(facts: RunFacts) -> float:
    """The distance of the two intervals of held-out success where it fell; negative where they overlap."""
    before, after = facts.before.get("interval"), facts.after.get("interval")
    return float(before[0]) - float(after[1]) if before and after else math.nan


def _paid_without_success(facts: RunFacts) -> float:
    """Rise of the reward in a run whose success did not rise."""
    rise = facts.last("reward") - facts.first("reward")
    success = facts.last("success") - facts.first("success")
    scale = max(abs(facts.first("reward")), 0.2)
    return rise / scale if success <= 0.02 else math.nan


def _longer_without_gain(facts: RunFacts) -> float:
    growth = facts.last("tokens_per_turn") / max(facts.first("tokens_per_turn"), 1.0)
    outcome = "success" if facts.series("success") else "reward"
    return growth if facts.last(outcome) - facts.first(outcome) <= 0.05 else math.nan


def _tool_errors(facts: RunFacts) -> float:
    calls, errors = facts.last("tool_calls"), facts.last("tool_errors")
    return errors / max(calls, errors) if max(calls, errors) > 0.2 else math.nan


def _tools_given_up(facts: RunFacts) -> float:
    return (
        facts.first("tool_calls") / max(facts.last("tool_calls"), 1e-9) if facts.first("tool_calls") > 0.2 else math.nan
    )


def _drops(facts: RunFacts, too_old: bool) -> dict[str, int]:
    """Dropped groups by reason: those that were too old, or those that admission or failures dropped; never a resume's own."""
    drops = {reason: n for reason, n in facts.drops.items() if reason not in ("rolled back", "interrupted")}
    return {reason: n for reason, n in drops.items() if reason.startswith(TOO_OLD) == too_old}


def _dropped_share(facts: RunFacts, too_old: bool = False) -> float:
    """Share of the groups that were dropped, of those and the ones that were trained on."""
    dropped = sum(_drops(facts, too_old).values())
    total = dropped + facts.trained_groups
    return dropped / total if total >= 8 else math.nan


def _repeated_tasks(facts: RunFacts) -> float:
    return facts.trained_groups / facts.tasks if facts.tasks and facts.trained_groups >= 40 else math.nan


def _slower(facts: RunFacts) -> float:
    """Growth of the seconds per token from the first to the last quarter."""
    first, last = (f("seconds") / max(f("tokens"), 1.0) for f in (facts.first, facts.last))
    return last / first if first > 0 and facts.last("seconds") > 1.0 else math.nan


def _part_of_step(facts: RunFacts, name: str) -> float:
    whole = facts.mean("seconds")
    return facts.mean(name) / whole if whole > 1.0 else math.nan


def _gradient_clipped(facts: RunFacts) -> float:
    """Median norm of the gradient in units of the norm it is clipped to."""
    norms = sorted(facts.series("grad_norm"))
    return norms[len(norms) // 2] / facts.settings.clip_norm if norms and facts.settings.clip_norm else math.nan


def _not_finite(facts: RunFacts) -> float:
    rows = [row for row in facts.rows if "loss" in row]
    return sum(row["loss"] is None for row in rows) / len(rows) if rows else math.nan


def _ratio_at_start(facts: RunFacts) -> float:
    """Distance of the ratio from 1 in the first step, before the policy has moved far."""
    ratios = facts.series("ratio")
    return abs(ratios[0] - 1.0) if ratios and facts.settings.staleness.synchronous else math.nan


def _lr(facts: RunFacts) -> float:
    """Share of steps after the warm-up with a learning rate so small that float32 weights do not move."""
    values = facts.series("lr")[facts.settings.warmup :]
    values = values[: max(1, len(values) * 3 // 4)]  # a schedule ends at zero
    return sum(value < 1e-9 for value in values) / len(values) if values else math.nan


def _always_zero(facts: RunFacts) -> float:
    values = facts.series("reward_max_abs")
    return float(max(values) == 0) if len(values) >= 3 else math.nan


def _unmoved(facts: RunFacts) -> float:
    """1 if held-out success after training lies inside the interval from before."""
    interval, after = facts.before.get("interval"), facts.after.get("success")
    return float(interval[0] <= after <= interval[1]) if interval and after is not None else math.nan


# --------------------------------------------------------------------- rules

RULES = (
    RunRule("loss not finite", ERROR, _not_finite, 0.1,
        lambda f, x: f"the loss was not a finite number in {x:.0%} of the steps; the largest reward is "
        f"{max(f.series('reward_max_abs'), default=0):.3g}", "scale rewards to about 1, or lower --lr",
        ("reward_max_abs", "grad_norm")),
    RunRule("learning rate zero", ERROR, _lr, 0.5,
        lambda f, x: f"the learning rate was below 1e-9 in {x:.0%} of the steps, so the weights did not move",
        "--lr, --warmup", ("lr", "grad_norm")),
    RunRule("nothing is ever rewarded", ERROR, _always_zero, 0.5,
        lambda f, x: f"every reward of all {len(f.rows)} steps was 0", "--difficulty, --reward, or a model that can do the task",
        ("reward_max_abs", "groups/zero_variance")),
    RunRule("groups of one", ERROR,
        lambda f: float(f.group_size == 1 and f.mean("advantage/size") < 1e-9), 0.5,
        lambda f, x: "each group has one trajectory, and its advantage relative to itself is 0", "--group-size",
        ("trajectories", "groups", "advantage/size")),
    RunRule("ratio not 1 at the first step", ERROR, _ratio_at_start, 0.1,
        lambda f, x: f"the importance ratio was {f.series('ratio')[0]:.3g} in the first step, where sampler and learner hold the "
        "same weights", "--rollout-dtype, --temperature (the one that samples must be recorded), or fewer --epochs",
        ("ratio", "mismatch/mean_abs", "policy_check")),
    RunRule("sampler and learner differ", WARNING, lambda f: f.mean("mismatch/mean_abs"), 0.02,
        lambda f, x: f"log-probabilities at sampling and in the learner differ by {x:.2g} per token on average",
        "--rollout-dtype as --dtype, or a method that corrects the mismatch", ("mismatch/mean_abs", "ratio/ess/token")),
    RunRule("stale data", WARNING,
        lambda f: f.last("staleness") if f.last("ratio/ess/token") < 0.9 else math.nan, 0.9,
        lambda f, x: f"tokens were {x:.1f} steps old when they were trained on, and the effective share of the tokens is "
        f"{f.last('ratio/ess/token'):.0%}", "--staleness, or a method that corrects for age",
        ("staleness", "staleness/oldest", "ratio/ess/token")),
    RunRule("most tokens clipped", WARNING, lambda f: f.last("clip_share"), 0.4,
        lambda f, x: f"{x:.0%} of the tokens have no gradient, because their ratio is outside the method's bounds",
        "--lr, --epochs, --minibatches, or the method's clip", ("clip_share", "ratio", "kl/behaviour")),
    RunRule("large policy steps", WARNING, lambda f: f.mean("kl/behaviour"), 0.2,
        lambda f, x: f"the policy moves by a KL divergence of {x:.2g} per token within a step", "--lr, --epochs",
        ("kl/behaviour", "ratio", "lr")),
    RunRule("gradient clipped hard", WARNING, _gradient_clipped, 20.0,
        lambda f, x: f"the median gradient norm is {x:.0f} times --clip-norm {f.settings.clip_norm:g}: its size never counts",
        "--clip-norm, or scale rewards to about 1", ("grad_norm", "advantage/size", "reward_max_abs")),
    RunRule("reward collapsed", ERROR, lambda f: _fall(f, "reward"), 0.5,
        lambda f, x: f"the reward fell from {f.best('reward'):.3g} to {f.last('reward'):.3g}",
        "--lr, or a KL penalty of the method", ("reward", "entropy", "kl/behaviour", "lr")),
    RunRule("entropy collapse", WARNING, _entropy_left, 10.0,
        lambda f, x: f"the entropy fell from {f.first('entropy'):.3g} to {f.last('entropy'):.3g}; answers stop differing",
        "--temperature, --lr, or a method with an entropy term or a higher upper clip", ("entropy", "answers/distinct")),
    RunRule("entropy grows", WARNING, lambda f: f.last("entropy") / max(f.first("entropy"), 1e-2), 2.5,
        lambda f, x: f"the entropy grew from {f.first('entropy'):.3g} to {f.last('entropy'):.3g}: the policy becomes noise",
        "--lr, or the weight of the method's entropy term", ("entropy", "reward")),
    RunRule("reward rises, success does not", WARNING, _paid_without_success, 0.3,
        lambda f, x: f"the reward rose from {f.first('reward'):.3g} to {f.last('reward'):.3g} and success went from "
        f"{f.first('success'):.0%} to {f.last('success'):.0%}: the reward pays for something else", "--reward; see probe-reward",
        ("reward", "success", "tokens_per_turn")),
    RunRule("answers grow longer without gain", WARNING, _longer_without_gain, 1.8,
        lambda f, x: f"turns became {x:.1f} times longer ({f.first('tokens_per_turn'):.0f} to {f.last('tokens_per_turn'):.0f} "
        "tokens) and the outcome did not improve", "--max-tokens, or a method without length bias in its average",
        ("tokens_per_turn", "success", "reward")),
    RunRule("tasks too easy", WARNING,
        lambda f: f.mean("groups/all_succeed") if f.first("success") > 0.9 else math.nan, 0.7,
        lambda f, x: f"{x:.0%} of the groups succeed entirely, so they have no gradient", "--difficulty",
        ("groups/all_succeed", "success", "groups/zero_variance")),
    RunRule("tasks too hard", WARNING, lambda f: f.mean("groups/all_fail"), 0.8,
        lambda f, x: f"{x:.0%} of the groups fail entirely, so they have no gradient", "--difficulty, --group-size, --demos",
        ("groups/all_fail", "success", "groups/zero_variance")),
    RunRule("most groups dropped", WARNING, _dropped_share, 0.6,
        lambda f, x: f"{x:.0%} of the sampled groups were dropped: {_most(_drops(f, False))}",
        "--difficulty, or another sampler of tasks", ("groups", "tasks_drawn")),
    RunRule("groups too old", WARNING, lambda f: _dropped_share(f, too_old=True), 0.2,
        lambda f, x: f"{x:.0%} of the groups were thrown away because later ones overtook them: "
        f"{_most(_drops(f, True))}; what was sampled for them is lost",
        "--staleness N,wait (training waits for them) or a higher N; shorter episodes (--max-turns, --max-tokens), a faster "
        "environment, or fewer --groups at once", ("staleness", "staleness/oldest", "seconds/rollout", "seconds/learn")),
    RunRule("few distinct answers", WARNING, lambda f: 1.0 - f.mean("answers/distinct"), 0.7,
        lambda f, x: f"only {1 - x:.0%} of the answers to a task differ", "--temperature, --top-p, --top-k",
        ("answers/distinct", "entropy")),
    RunRule("few tasks repeated", WARNING,
        lambda f: _repeated_tasks(f) if _gap(f) > 0.2 else math.nan, 4.0,
        lambda f, x: f"{f.trained_groups} groups came from {f.tasks} tasks, and held-out success is {_gap(f):.0%} lower than in "
        "training", "more tasks (--data), or fewer --steps", ("success", "eval/success")),
    RunRule("held-out success lower than in training", WARNING, _gap, 0.3,
        lambda f, x: f"success is {f.last('success'):.0%} in training and {f.after.get('success', 0):.0%} on held-out tasks",
        "more tasks, --difficulty as in the evaluation, --eval-temperature", ("success", "eval/success")),
    RunRule("held-out success fell", ERROR, _regression, 0.0,
        lambda f, x: f"held-out success was {f.before.get('success', 0):.0%} before training and "
        f"{f.after.get('success', 0):.0%} after it", "--lr, --steps; keep an earlier checkpoint", ("reward", "eval/success")),
    RunRule("tool calls fail", WARNING, _tool_errors, 0.6,
        lambda f, x: f"{x:.0%} of the tool calls end in an error", "--tool-syntax, --describe-tools, --cold-steps",
        ("tool_errors", "tool_calls")),
    RunRule("tools given up", WARNING, _tools_given_up, 5.0,
        lambda f, x: f"tool calls fell from {f.first('tool_calls'):.2g} to {f.last('tool_calls'):.2g} per episode",
        "--lr, or a reward that needs the tool", ("tool_calls", "success", "reward")),
    RunRule("history rewritten", WARNING, lambda f: f.mean("restarts"), 0.5,
        lambda f, x: f"the chat template rewrites history {x:.2g} times per episode, so prompts are read again each time",
        "--template, --template-options, --history", ("restarts", "turns")),
    RunRule("only pushed down", WARNING,
        lambda f: 1 - f.mean("gradient_share/positive_advantage"), 0.95,
        lambda f, x: f"{x:.0%} of the gradient lowers probabilities; hardly anything is made more likely",
        "--difficulty, --group-size, or a method that weighs signs", ("gradient_share/positive_advantage", "success")),
    RunRule("rewards out of scale", WARNING, lambda f: max(f.series("reward_max_abs"), default=math.nan), 100.0,
        lambda f, x: f"the largest reward is {x:.3g}", "scale rewards to about 1", ("reward_max_abs", "grad_norm")),
    RunRule("steps become slower", WARNING, _slower, 3.0,
        lambda f, x: f"a token takes {x:.1f} times as long as in the beginning", "--isolate-env; look for leaks in its code",
        ("seconds", "tokens", "seconds/turn_answered")),
    RunRule("learner takes the time", WARNING, lambda f: _part_of_step(f, "seconds/learn"), 0.85,
        lambda f, x: f"{x:.0%} of a step is the update", "--micro-batch-tokens, --dtype, fewer --epochs",
        ("seconds/learn", "seconds/rollout")),
    RunRule("publishing takes the time", WARNING, lambda f: _part_of_step(f, "seconds/publish"), 0.3,
        lambda f, x: f"{x:.0%} of a step is the transfer of weights to the sampler", "--staleness 1, or more --groups per step",
        ("seconds/publish", "seconds")),
    RunRule("not finished", NOTE, lambda f: float(not f.finished), 0.5,
        lambda f, x: f"the run has no summary; it recorded {len(f.rows)} of {f.settings.steps} steps", "turnwise resume", ()),
    RunRule("no measurable learning", NOTE, _unmoved, 0.5,
        lambda f, x: f"held-out success after training ({f.after.get('success', 0):.0%}) lies in the interval from before "
        f"({_interval(f)})", "--steps, --eval-tasks", ("reward", "success")),
)  # fmt: skip


def _most(reasons: Mapping[str, int]) -> str:
    return "; ".join(f"{n} × {reason}" for reason, n in sorted(reasons.items(), key=lambda item: -item[1])[:3])


def _interval(facts: RunFacts) -> str:
    low, high = facts.before.get("interval") or (math.nan, math.nan)
    return f"{low:.0%} to {high:.0%}"
