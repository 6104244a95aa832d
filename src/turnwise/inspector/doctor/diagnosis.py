"""``turnwise doctor RUN``: the findings of all rules, causes before what they cause.

The rules are the conditions that a running run tells (``observe.run_health``), each judged over all steps, and the rules of
whole runs (``rules``). ``CAUSES_FIRST`` orders them: an environment that fails explains missing rewards, not the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import SettingError
from turnwise.inspector.doctor.facts import RunFacts
from turnwise.inspector.doctor.rules import ERROR, NOTE, RULES, WARNING
from turnwise.observe.run_health import CONDITIONS, Condition, HealthView

HELD_SHARE = 0.2  # share of the steps in which a condition must hold, unless it holds at the end
SEVERITIES = (ERROR, WARNING, NOTE)
ERRORS_OF_STEPS = {
    "no group to train on",
    "zero gradient",
    "no spread of rewards",
    "identical answers",
    "failed episodes",
}
CAUSES_FIRST = (
    "loss not finite", "skipped optimiser steps", "rewards out of scale", "failed episodes", "unread tool calls",
    "turns cut by max_tokens", "episodes cut by context", "episodes cut by max_turns", "groups of one", "learning rate zero",
    "ratio not 1 at the first step", "growing mismatch", "sampler and learner differ", "stale data", "groups too old",
    "nothing is ever rewarded",
    "identical answers", "no spread of rewards", "zero gradient", "most groups dropped", "no group to train on",
    "entropy collapse", "entropy grows", "most tokens clipped", "large policy steps", "gradient clipped hard",
    "reward collapsed", "reward rises, success does not", "tools given up", "tool calls fail", "answers grow longer without gain",
    "tasks too easy", "tasks too hard", "few distinct answers", "few tasks repeated", "held-out success lower than in training",
    "held-out success fell", "history rewritten", "only pushed down", "slow environment", "steps become slower",
    "learner takes the time", "publishing takes the time", "not finished", "no measurable learning",
)  # fmt: skip
STEP_EVIDENCE: Mapping[str, tuple[str, ...]] = {
    "turns cut by max_tokens": ("truncated/turns_by_max_tokens", "tokens_per_turn"),
    "episodes cut by context": ("truncated/episodes_by_context",),
    "episodes cut by max_turns": ("truncated/episodes_by_max_turns", "turns"),
    "identical answers": ("answers/distinct", "entropy"),
    "no spread of rewards": ("groups/zero_variance", "reward"),
    "zero gradient": ("grad_norm", "clip_share"),
    "no group to train on": ("groups",),
    "unread tool calls": ("tool_calls/unread", "tool_calls"),
    "skipped optimiser steps": ("skipped", "reward_max_abs"),
    "growing mismatch": ("policy_check",),
    "slow environment": ("seconds/turn_answered", "seconds/turn_sampled"),
}


@dataclass(frozen=True)
class Finding:
    """One rule that applies. ``evidence``: first and last value of the metrics it read."""

    rule: str
    severity: str
    text: str
    value: float
    setting: str
    evidence: Mapping[str, tuple[float, float]]

    def lines(self) -> list[str]:
        shown = ", ".join(f"{name} {a:.3g} → {b:.3g}" for name, (a, b) in self.evidence.items())
        lines = [f"{self.severity}: {self.rule}: {self.text}"]
        lines += [f"    evidence: {shown}"] if shown else []
        return lines + ([f"    change: {self.setting}"] if self.setting else [])


@dataclass(frozen=True)
class Diagnosis:
    """All findings of a run, the most probable cause first."""

    run: str
    steps: int
    findings: tuple[Finding, ...]

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """Findings that are more than notes."""
        return tuple(f for f in self.findings if f.severity != NOTE)

    def text(self) -> str:
        head = f"{self.run}: {self.steps} steps, {len(CAUSES_FIRST)} rules"
        if not self.alarms:
            head += "; nothing is wrong that they know"
        return "\n".join([head, *(line for finding in self.findings for line in finding.lines())])

    def as_dict(self) -> dict[str, Any]:
        findings = [{**asdict(f), "evidence": {k: list(v) for k, v in f.evidence.items()}} for f in self.findings]
        return {"run": self.run, "steps": self.steps, "ok": not self.alarms, "findings": findings}


def diagnose(path: str | Path) -> Diagnosis:
    """Read a run and apply every rule."""
    facts = RunFacts.read(path)
    if not facts.rows:
        raise SettingError(f"{path} has not taken a step yet; there is nothing to judge")
    return diagnose_facts(facts)


def diagnose_facts(facts: RunFacts) -> Diagnosis:
    found = [*_of_steps(facts), *_of_the_run(facts)]
    found.sort(key=lambda f: (f.severity == NOTE, CAUSES_FIRST.index(f.rule)))
    return Diagnosis(facts.name, len(facts.rows), tuple(found))


def _of_the_run(facts: RunFacts) -> Iterator[Finding]:
    for rule in RULES:
        value = rule.measure(facts)
        if value > rule.bound:  # False for NaN: the run does not have the metric
            text = rule.text(facts, value)
            yield Finding(rule.name, rule.severity, text, value, rule.setting, facts.evidence(rule.metrics))


def _of_steps(facts: RunFacts) -> Iterator[Finding]:
    for condition in CONDITIONS:
        held = _held(condition, facts.views)
        if held is None:
            continue
        view, value = held
        severity = ERROR if condition.name in ERRORS_OF_STEPS else WARNING
        evidence = facts.evidence(STEP_EVIDENCE.get(condition.name, ()))
        yield Finding(condition.name, severity, condition.text(view, value), value, "", evidence)


def _held(condition: Condition, views: list[HealthView]) -> tuple[HealthView, float] | None:
    """The last step in which a condition held long enough, if it held in many steps or at the end; and its number."""
    streak, holds, last = 0, 0, None
    for n, view in enumerate(views):
        value = condition.measure(view)
        streak = streak + 1 if value > condition.threshold else 0
        holds += bool(streak)
        if streak >= condition.patience:
            last = (n, view, value)
    if last is None:
        return None
    recent = last[0] >= len(views) - max(2, len(views) // 4)
    return (last[1], last[2]) if recent or holds >= HELD_SHARE * len(views) else None
