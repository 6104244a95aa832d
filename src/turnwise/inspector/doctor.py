"""``turnwise doctor RUN``: what is wrong with a run by the rules of ``observe.rules``, with evidence and what to change.

Rules of whole runs are applied as they are. A rule of steps, which the running run may have told already, counts where it
applied in many steps or at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings
from turnwise.errors import SettingError
from turnwise.inspector.queries import RunReader
from turnwise.observe.rules import NOTE, RULES, SOLVED, Rule, RunFacts

HELD_SHARE = 0.2  # share of the steps in which a rule must apply, unless it applies at the end


@dataclass(frozen=True)
class Finding:
    """One rule that applies. ``setting``: what to change. ``evidence``: first and last value of the metrics it read."""

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
        head = f"{self.run}: {self.steps} steps, {len(RULES)} rules"
        if not self.alarms:
            solved = any(finding.rule == SOLVED for finding in self.findings)
            head += "; the run is solved" if solved else "; nothing is wrong that they know"
        return "\n".join([head, *(line for finding in self.findings for line in finding.lines())])

    def as_dict(self) -> dict[str, Any]:
        findings = [{**asdict(f), "evidence": {k: list(v) for k, v in f.evidence.items()}} for f in self.findings]
        return {"run": self.run, "steps": self.steps, "ok": not self.alarms, "findings": findings}


def diagnose(path: str | Path) -> Diagnosis:
    """Read a run and apply every rule."""
    facts = read_facts(path)
    if not facts.rows:
        raise SettingError(f"{path} has not taken a step yet; there is nothing to judge")
    findings = []
    for rule in RULES:
        view, value = _where_it_applies(rule, facts)
        if view is not None:
            evidence = facts.evidence(rule.evidence)
            findings.append(Finding(rule.name, rule.severity, rule.says(view, value), value, rule.cure(view), evidence))
    findings.sort(key=lambda finding: finding.severity == NOTE)  # stable: the table holds causes before what they cause
    return Diagnosis(facts.name, len(facts.rows), tuple(findings))


def _where_it_applies(rule: Rule, facts: RunFacts) -> tuple[Any, float]:
    """The run, or the last step in which a rule of steps applied long enough, and the number there; None where it does not."""
    if rule.whole_run:
        value = rule.measure(facts)
        return (facts if value > rule.bound else None), value  # False for NaN: the run does not have the metric
    streak, applied = 0, 0
    last: tuple[int, Any, float] = (0, None, 0.0)  # step, what it held, the number
    for n, view in enumerate(facts.views):
        value = rule.measure(view)
        streak = streak + 1 if value > rule.bound else 0
        applied += bool(streak)
        if streak >= rule.patience:
            last = (n, view, value)
    steps = len(facts.views)
    # the last quarter: what was mended earlier is not what is wrong
    recent = last[0] >= steps - max(2, steps // 4)
    return last[1:] if recent or applied >= HELD_SHARE * steps else (None, 0.0)


def read_facts(path: str | Path) -> RunFacts:
    """What the rules read of a run: its settings, the metrics of its steps, what became of its groups, its evaluations."""
    from turnwise.engines.learner.policy_check import TOLERANCE, TOLERANCE_BF16

    with RunReader(path) as reader:
        merged: dict[int, dict[str, float | None]] = {}
        for row in reader.metrics():
            merged.setdefault(row.step, {}).update(row.values)
        counts = reader.database.group_counts() if reader.has_ledger else None
        trained = reader.groups(state="trained") if reader.has_ledger else []
        before, after = ((reader.evaluation(when) or {}).get("summary", {}) for when in ("before", "after"))
        s, summary = Settings.of(dict(reader.settings)), reader.summary
    on_gpu = str((summary or {}).get("device", "cpu")).startswith("cuda")
    reduced = on_gpu or {s.dtype, s.rollout_dtype} & {"bfloat16", "float16", "fp8"}
    return RunFacts(
        name=str(path),
        settings=s,
        rows=[merged[step] for step in sorted(merged) if "groups" in merged[step]],
        drops=dict(counts.reasons) if counts else {},
        trained_groups=len(trained),
        tasks=len({row.task.key for row in trained}),
        before=before,
        after=after,
        finished=summary is not None,
        mismatch_tolerance=s.mismatch_tolerance or (TOLERANCE_BF16 if reduced else TOLERANCE),
    )
