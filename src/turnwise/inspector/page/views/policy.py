"""Same policy?: the sampler's log-probabilities against the learner's, versions and staleness, restarts of the history."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from turnwise.inspector.page.blocks import BarChart, Choice, DataTable, Note, ViewPage
from turnwise.inspector.page.step_cache import updates_of
from turnwise.inspector.page.token_text import token_texts
from turnwise.inspector.page.view_query import ViewQuery
from turnwise.inspector.queries import RunReader
from turnwise.inspector.stored_trajectories import ledger_trajectories
from turnwise.observe.charts import LineChart, Link, Series

ABOUT = "Whether the policy that is trained is the one that sampled, and how old the samples are."
CURVES = (
    (
        "policy_check",
        "Mean |log-probability difference| on current tokens",
        "sampler and learner have the same weights",
    ),
    (
        "mismatch/mean_abs",
        "Mean |log-probability difference| on all tokens",
        "includes steps between sampling and training",
    ),
    ("kl/behaviour", "KL of the sampler from the learner", "k3 estimator"),
    ("ratio/ess/token", "Effective sample size, by token", "1: no token dominates"),
    ("ratio/ess/trajectory", "Effective sample size, by trajectory", ""),
    ("staleness", "Staleness", "updates between sampling and training, mean"),
    ("restarts", "Restarts per trajectory", "history rewritten, compacted, another agent"),
)
EDGES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
TOP = 15


def policy(run: RunReader, query: ViewQuery) -> ViewPage:
    """Curves of the run, and the differences of one step."""
    metrics, blocks = run.metrics(), list[Any]()
    for name, title, about in CURVES:
        points = [(row.step, value) for row in metrics if (value := row[name]) is not None]
        if len(points) > 1:
            blocks.append(
                LineChart(title, (Series(title, [float(s) for s, _ in points], [y for _, y in points]),), about)
            )
    kept = run.kept_steps() if run.has_ledger else []
    if kept:
        step = query.step if query.step > 0 else kept[-1]
        blocks = [Choice("step", "step", str(step), [str(s) for s in kept]), *_step(run, step), *blocks]
    else:
        blocks.insert(0, Note("No token numbers are stored, so single steps cannot be compared (--keep-tokens)."))
    return ViewPage("policy", "Same policy?", ABOUT, blocks)


def _step(run: RunReader, step: int) -> list[Any]:
    gaps: list[tuple[float, str, int, int, float, float]] = []
    versions, causes = Counter[str](), Counter[str]()
    for update in updates_of(run, step):
        for name, trajectory in ledger_trajectories(run, update.trajectories).items():
            learner = update.of(name)["logp"]
            index = 0
            for number, turn in enumerate(trajectory.turns):
                if turn.restart:
                    causes[str(turn.facts.get("restart", "history rewritten")) if number else "first turn"] += 1
                versions.update(f"version {v}" for v in turn.version)
                for token, sampled in zip(turn.tokens, turn.logp):
                    gap = float(learner[index]) - float(sampled)
                    gaps.append((gap, name, index, token, float(sampled), float(learner[index])))
                    index += 1
    if not updates_of(run, step):
        return [Note(f"The tokens of step {step} are not stored.", "warning")]
    if not gaps:
        return [Note("The tokens of this step have no sampler log-probabilities.", "warning")]
    size = np.abs([g[0] for g in gaps])
    counts, _ = np.histogram(size, [*EDGES, np.inf])
    labels = [f"below {high:g}" for high in EDGES[1:]] + ["1 and more"]
    shares = (counts / counts.sum()).tolist()
    worst = sorted(gaps, key=lambda g: -abs(g[0]))[:TOP]
    rows = [
        (
            Link(f"{name} #{index}", "why", {"trajectory": name, "step": step, "token": index}),
            token_texts(run.path, [token])[0],
            sampled,
            learned,
            gap,
        )
        for gap, name, index, token, sampled, learned in worst
    ]
    ages = BarChart("Tokens by policy version", [*versions], [float(n) for n in versions.values()])
    blocks: list[Any] = [
        BarChart(f"Step {step}: |learner − sampler| of log-probabilities", labels, shares, "share of tokens", True),
        DataTable("Largest differences", ("token", "text", "sampler", "learner", "difference"), rows),
        ages,
    ]
    if causes:
        blocks.append(BarChart("Restarts by cause", [*causes], [float(n) for n in causes.values()]))
    return blocks
