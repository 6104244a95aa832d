"""Views of sampled tokens: why one has its gradient, another method's, siblings, who eats the gradient, same policy?"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.core.records import Group, Trajectory
from turnwise.errors import TurnwiseError
from turnwise.inspector.factors.explain import cosine, explain_token
from turnwise.inspector.page.blocks import (
    BarChart,
    Choice,
    DataTable,
    FactList,
    Note,
    Transcript,
    ViewQuery,
    curves,
    step_choice,
    token_link,
)
from turnwise.inspector.page.step_cache import factors_of, update_of, updates_of
from turnwise.inspector.page.views.transcripts import token_texts, transcript
from turnwise.inspector.queries import RunReader
from turnwise.observe.charts import Cell, ForkDiagram, Link, TreeNode
from turnwise.recipes.registry import METHODS

HINTS = ("advantage", "logp", "entropy", "gate", "weight", "slope")  # columns that a pointer over a token shows
NOT_KEPT = "This run keeps no token numbers (--keep-tokens)."
DIFFERENCES, TRANSCRIPTS, DIVERGENCE_TEXT = 20, 8, 40
LENGTHS = (16, 64, 256, 1024, 4096)
TOP_TOKENS, TOP_GAPS = 25, 15
PARTS = re.compile(r"(?P<thinking><think>.*?(?:</think>|$))|(?P<call><tool_call>.*?(?:</tool_call>|$))", re.DOTALL)
GAP_EDGES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
SAME_WEIGHTS, STEPS_BETWEEN = (
    "sampler and learner have the same weights",
    "includes steps between sampling and training",
)
POLICY_CURVES = (
    ("policy_check", "Mean |log-probability difference| on current tokens", SAME_WEIGHTS),
    ("mismatch/mean_abs", "Mean |log-probability difference| on all tokens", STEPS_BETWEEN),
    ("kl/behaviour", "KL of the sampler from the learner", "k3 estimator"),
    ("ratio/ess/token", "Effective sample size, by token", "1: no token dominates"),
    ("ratio/ess/trajectory", "Effective sample size, by trajectory", ""),
    ("staleness", "Staleness", "updates between sampling and training, mean"),
    ("restarts", "Restarts per trajectory", "history rewritten, compacted, another agent"),
)


# ------------------------------------------------------------------------ why


def why(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """Click a token: each factor of its gradient, the piece that computed it, and its peers."""
    step, name = opened_transcript(run, query)
    if not name:
        yield Note("No trajectory is stored yet.")
        return
    group, trajectory, update = run.trajectory_row(name).group, run.trajectory(name), update_of(run, step, name)
    yield FactList(
        "Trajectory",
        [
            ("trajectory", trajectory.id),
            ("group", Link(group, "siblings", {"group": group})),
            ("task", trajectory.task.key),
            ("step", Link(str(step), "step", {"step": step})),
            ("reward", trajectory.reward),
            ("success", {None: "not judged", True: "yes", False: "no"}[trajectory.success]),
            ("status", f"{trajectory.status}{': ' + trajectory.reason if trajectory.reason else ''}"),
            ("tokens", trajectory.sampled),
            *((f"reward: {part}", value) for part, value in trajectory.rewards.items()),
        ],
    )
    columns: dict[str, Any] = {} if update is None else update.of(name)
    if update is None:
        steps = run.kept_steps()
        which = f"stored are steps {steps[0]} to {steps[-1]}" if steps else "this run kept none (--keep-tokens)"
        missing = "The numbers of this trajectory's tokens are not stored: it was not trained on, or too long ago"
        yield Note(f"{missing}; {which}.", "warning")
    elif query.token >= 0:
        yield from _factors(run, step, name, query)
    slopes = [-float(x) for x in columns.get("slope", ())]  # of the objective, which rises where the loss falls
    # 1 where every gradient is 0: nothing is coloured, and nothing divided by 0
    top = max((abs(x) for x in slopes), default=0.0) or 1.0

    def hint(i: int) -> str:
        values = {n: float(columns[n][i]) for n in HINTS if n in columns and i < len(columns[n])}
        return ", ".join(f"{n} {value:.4g}" for n, value in values.items())

    link = lambda i: token_link("", name, step, i)  # noqa: E731
    about = "Green: the step made the token more likely, red: less; stronger colour: larger gradient."
    yield transcript(run, trajectory, [x / top for x in slopes], hint, link, query.token, query.offset, about=about)


def opened_transcript(run: RunReader, query: ViewQuery) -> tuple[int, str]:
    """The step and the trajectory that ``why`` shows: without one, that with the largest gradient of a token in the step, or in
    the newest that is kept. The trajectory is empty where nothing is stored."""
    name = query.trajectory
    if not name:
        step = query.step_of(run.kept_steps(), -1)
        rows = run.trajectories(step=step if step > 0 else None, limit=1)
        peaks = []
        for update in updates_of(run, step):
            if len(update.columns.get("slope", ())):
                sizes = np.nan_to_num(np.abs(update.columns["slope"]))
                at = int(sizes.argmax())
                owner = int(np.searchsorted(np.cumsum(update.sizes), at, side="right"))
                peaks.append((float(sizes[at]), update.trajectories[owner]))
        name = "" if not rows else max(peaks)[1] if peaks else rows[0].id
    return (query.step if query.step > 0 else run.trajectory_row(name).step) if name else 0, name


def _factors(run: RunReader, step: int, name: str, query: ViewQuery) -> Iterator[Any]:
    try:
        stored, factors = factors_of(run, step, query.method, trajectory=name)
        one = explain_token(stored, factors, name, query.token)
    except TurnwiseError as error:
        yield Note(f"The factors cannot be recomputed: {error}", "warning")
        return
    direction = "more" if one.gradient > 0 else "less"
    size = f"gradient {one.gradient:.4g}, {100 * one.share:.2g} % of the update"
    yield Note(
        f"The step made this token {direction} likely: {size}." if one.gradient else "This token has no gradient."
    )
    if one.agrees is not None:
        same, level = ("equals", "good") if one.agrees else ("DIFFERS from", "warning")
        yield Note(f"Recomputed gradient {same} what the step stored ({one.stored:.4g}).", level)
    chain = [(s.name, s.value, s.piece, s.inputs, s.formula) for s in one.chain]
    yield DataTable("Factors", ("factor", "value", "piece", "numbers", "formula"), chain, f"product: {one.numbers}")
    yield DataTable("Summands of the gradient", ("part", "value"), one.summands)
    peers = [
        (Link(p.trajectory, "why", {"trajectory": p.trajectory, "step": one.step}), p.reward, p.advantage, p.share)
        for p in one.peers
    ]
    yield DataTable("Peers", ("trajectory", "reward", "mean advantage", "share of the gradient"), peers)


# -------------------------------------------------------------------- what if


def what_if(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """The same batch under another method: one update, from the same weights, on the same trajectories."""
    steps = run.kept_steps()
    if not steps:
        yield Note(NOT_KEPT)
        return
    step, update, method = query.step_of(steps), max(0, query.update), str(run.settings.get("method", ""))
    # one that every run can compute: it needs only log-probabilities
    other = query.method or next(name for name in ("gspo", "dr_grpo") if name != method)
    yield Choice("method", "another method", other, sorted(METHODS), {"step": step, "update": update})
    yield Choice("step", "step", str(step), [str(s) for s in steps], {"method": other})
    try:
        mine, theirs = (factors_of(run, step, name, update)[1] for name in ("", other))
    except TurnwiseError as error:
        yield Note(str(error), "warning")
        return
    a, b = mine.factors.total, theirs.factors.total
    only = lambda x, y: f"{100 * float(((x != 0) & (y == 0)).double().mean()):.2f} %"  # noqa: E731
    yield FactList(
        "Agreement",
        [
            ("cosine of the two token gradients", cosine(a, b)),
            (
                f"length of {other}'s, relative to {method}'s",
                float(b.norm() / a.norm()) if a.norm() > 0 else float("nan"),
            ),
            ("tokens with opposite signs", f"{100 * float((a * b < 0).double().mean()):.2f} %"),
            (f"tokens that only {method} moves", only(a, b)),
            (f"tokens that only {other} moves", only(b, a)),
        ],
    )
    left, right = mine.recipe.slots(), theirs.recipe.slots()
    rows = [(slot, left[slot], right[slot]) for slot in left if left[slot] != right[slot]]
    about = "slots of the update only count here: another sampler, budget or strategy would have collected other data"
    yield DataTable("Slots that differ", ("slot", method, other), rows, about)

    tree, names = mine.batch.tree, mine.batch.trajectory_ids
    owner = tree.ancestor(TOKEN, TRAJECTORY)
    # each method's push on a trajectory, normalised to Σ |gradient| = 1: methods differ in scale, the optimiser takes that out
    pushes = [
        torch.zeros(tree.count(TRAJECTORY), dtype=x.dtype)
        .index_add(0, owner, x / x.abs().sum().clamp(min=1e-30))
        .tolist()
        for x in (a, b)
    ]
    apart = sorted(zip(names, *pushes, strict=True), key=lambda row: -abs(row[2] - row[1]))
    cells = [
        (Link(name, "what-if", {"step": step, "method": other, "trajectory": name}), x, y, y - x)
        for name, x, y in apart[:DIFFERENCES]
    ]
    about = "push on each trajectory as a share of the update's gradient; the largest differences first"
    yield DataTable("Where they differ", ("trajectory", method, other, "difference"), cells, about)

    name = query.trajectory or (apart[0][0] if apart else "")
    if name and name not in names:
        yield Note(f"trajectory {name} is not in this update", "warning")
    elif name:
        at = (owner == names.index(name)).nonzero().squeeze(1)
        shares = [float(m.factors.share[at].sum()) for m in (mine, theirs)]
        yield BarChart(f"Share of the gradient that {name} has", (method, other), shares, percent=True)
        for label, gradient_of in {method: a, other: b}.items():
            values, top = gradient_of[at].tolist(), float(gradient_of.abs().max()) or 1.0
            yield transcript(
                run,
                run.trajectory(name),
                [v / top for v in values],
                lambda i, values=values: f"gradient {values[i]:.4g}",  # type: ignore[misc]
                lambda i: token_link("", name, step, i),
                title=f"{name} under {label}",
            )


# ------------------------------------------------------------------- siblings


def siblings(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """The trajectories of one group: where they part, and what each was credited with."""
    name = query.group
    if not name:  # the newest group that has spread
        groups = [
            g for g in (run.groups(step=query.step) if query.step > 0 else run.groups(limit=400)) if g.trajectories
        ]
        spread = [g for g in groups if g.reward_low != g.reward_high]
        name = (spread or groups)[-1].id if groups else ""
    if not name:
        yield Note("No group has finished yet.")
        return
    row, group = run.group_row(name), run.group(name)
    step, members = row.step, group.trajectories
    yield Choice("group", f"group of step {step}", name, [g.id for g in run.groups(step=step) if g.trajectories])
    yield FactList(
        "Group",
        [
            ("group", name),
            ("task", row.task.key),
            ("step", Link(str(step), "step", {"step": step})),
            ("state", f"{row.state}{': ' + row.reason if row.reason else ''}"),
            ("mean reward", row.reward),
            ("policy version when issued", row.version),
        ],
    )
    if row.reward_low == row.reward_high and row.trajectories > 1:
        yield Note("All rewards are equal: an advantage relative to the group is 0 for every token.", "warning")
    if any(t.fork for t in members):
        forks = [(t, t.fork.parent if t.fork else "", t.fork.turn if t.fork else 0) for t in members]
        nodes = [
            TreeNode(
                t.id,
                parent,
                turn,
                len(t.turns),
                f"{t.id}: {t.reward:g}",
                t.reward,
                Link(t.id, "why", {"trajectory": t.id}),
            )
            for t, parent, turn in forks
        ]
        yield ForkDiagram("Forks", nodes)
    updates = {t.id: update_of(run, step, t.id) for t in members}
    advantages = {k: [] if u is None else [float(x) for x in u.of(k)["advantage"]] for k, u in updates.items()}
    rows = []
    for t in members:
        credit = advantages[t.id]
        mean = sum(credit) / len(credit) if credit else None
        success = {None: "", True: "yes", False: "no"}[t.success]
        link = Link(t.id, "why", {"trajectory": t.id, "step": step})
        fork = f"{t.fork.parent} at turn {t.fork.turn}" if t.fork else ""
        rows.append((link, t.reward, success, mean, len(t.turns), t.sampled, str(t.status), fork))
    columns = ("trajectory", "reward", "success", "mean advantage", "turns", "tokens", "status", "forks from")
    yield DataTable("Trajectories", columns, rows)
    yield _divergence(run, group)
    for t in sorted(members, key=lambda t: -t.reward)[:TRANSCRIPTS]:
        yield _credited(run, t, step, advantages[t.id])


def _credited(run: RunReader, trajectory: Trajectory, step: int, advantages: list[float]) -> Transcript:
    top = max((abs(a) for a in advantages), default=0.0) or 1.0
    return transcript(
        run,
        trajectory,
        [a / top for a in advantages],
        lambda i: f"advantage {advantages[i]:.4g}" if i < len(advantages) else "",
        lambda i: token_link("", trajectory.id, step, i),
        title=f"{trajectory.id}: reward {trajectory.reward:g}",
    )


def _divergence(run: RunReader, group: Group) -> DataTable:
    """For each trajectory: at which sampled token it leaves the first one, and what the two then say."""
    members = [t for t in group.trajectories if t.sampled]
    if len(members) < 2:
        return DataTable("First divergence", (), ())
    rows: list[tuple[Cell, ...]] = []
    first, *others = ([token for turn in t.turns for token in turn.tokens] for t in members)
    for t, ids in zip(members[1:], others):
        at = next((i for i, (a, b) in enumerate(zip(first, ids)) if a != b), min(len(first), len(ids)))
        if at == len(first) == len(ids):
            rows.append((t.id, "the same", None, "", ""))
            continue
        ends = np.cumsum([len(turn.tokens) for turn in t.turns])
        turn = min(int(np.searchsorted(ends, at, side="right")), len(ends) - 1)
        # a dozen tokens are enough to see how the two go on
        texts = ["".join(token_texts(run.path, part[at : at + 12]))[:DIVERGENCE_TEXT] for part in (first, ids)]
        rows.append((t.id, at, turn, *texts))
    columns = ("trajectory", "token", "turn", f"{members[0].id} says", "it says")
    return DataTable("First divergence", columns, rows, f"compared with {members[0].id}, in sampled tokens")


# ------------------------------------------------------------------- gradient


@dataclass(frozen=True)
class TokenShare:
    """One token's gradient and where it stands."""

    trajectory: Trajectory
    index: int
    turn: int
    agent: str
    part: str
    token: int
    slope: float
    advantage: float


def gradient(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """Shares of Σ |∂ loss / ∂ log π| over the sampled tokens of one step, as the step applied it."""
    steps = run.kept_steps()
    if not steps:
        yield Note(NOT_KEPT)
        return
    step = query.step_of(steps)
    yield step_choice(step, steps)
    if step not in steps:
        yield Note(f"The tokens of step {step} are not stored; stored are steps {steps[0]} to {steps[-1]}.", "warning")
        return
    tokens = list(_tokens(run, step))
    total = sum(abs(t.slope) for t in tokens)
    if not total:
        yield Note("No token of this step has a gradient: all advantages are 0, or every token is masked.", "warning")
        return
    keys = {
        "By turn": lambda t: f"turn {t.turn}" if t.turn < 8 else "turn 8 and later",
        "By agent": lambda t: t.agent,
        "By part of the answer": lambda t: t.part,
        "By sign": lambda t: "made more likely" if t.slope < 0 else "made less likely" if t.slope > 0 else "not moved",
        "By length of the trajectory": lambda t: _length(t.trajectory.sampled),
        "By difficulty": lambda t: f"difficulty {t.trajectory.task.difficulty}",
    }
    for name, key in keys.items():
        shares, counts = defaultdict[str, float](float), Counter(map(key, tokens))
        for t in tokens:
            shares[key(t)] += abs(t.slope) / total
        labels = [f"{label} ({100 * counts[label] / len(tokens):.0f} % of tokens)" for label in sorted(shares)]
        yield BarChart(name, labels, [shares[label] for label in sorted(shares)], percent=True)
    rows = []
    for t in sorted(tokens, key=lambda t: -abs(t.slope))[:TOP_TOKENS]:
        link = token_link(f"{t.trajectory.id} #{t.index}", t.trajectory.id, step, t.index)
        text = token_texts(run.path, [t.token])[0]
        rows.append((link, text, t.part, t.turn, t.advantage, -t.slope, abs(t.slope) / total))
    columns = ("token", "text", "part", "turn", "advantage", "gradient", "share")
    yield DataTable("Top tokens", columns, rows, "the largest gradients of the step")


def _length(tokens: int) -> str:
    bound = next((b for b in LENGTHS if tokens <= b), None)
    return (
        f"more than {LENGTHS[-1]} tokens" if bound is None else f"up to {bound:>4} tokens"
    )  # aligned: labels are sorted


def _tokens(run: RunReader, step: int) -> Iterator[TokenShare]:
    for update in updates_of(run, step):
        for name, trajectory in run.stored_trajectories(update.trajectories).items():
            columns, index = update.of(name), 0
            for number, turn in enumerate(trajectory.turns):
                for token, part in zip(turn.tokens, answer_parts(token_texts(run.path, turn.tokens))):
                    slope, advantage = float(columns["slope"][index]), float(columns["advantage"][index])
                    yield TokenShare(trajectory, index, number, turn.agent, part, token, slope, advantage)
                    index += 1


def answer_parts(texts: list[str]) -> list[str]:
    """For each token of a turn: thinking, call or answer, by the tags around its middle."""
    spans = [(m.start(), m.end(), m.lastgroup or "") for m in PARTS.finditer("".join(texts))]
    ends = np.cumsum([len(text) for text in texts])
    middles = [end - len(text) / 2 for end, text in zip(ends, texts)]
    return [next((kind for a, b, kind in spans if a <= middle < b), "answer") for middle in middles]


# --------------------------------------------------------------------- policy


def policy(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """Whether the policy that is trained is the one that sampled, and how old the samples are."""
    steps = run.kept_steps()
    if steps:
        step = query.step_of(steps)
        yield step_choice(step, steps)
        yield from _gaps(run, step)
    else:
        yield Note("No token numbers are stored, so single steps cannot be compared (--keep-tokens).")
    yield from curves(run.metrics(), POLICY_CURVES)


def _gaps(run: RunReader, step: int) -> Iterator[Any]:
    """Differences of the learner's log-probabilities and the sampler's in one step, its policy versions, its restarts."""
    gaps: list[tuple[float, str, int, int, float, float]] = []
    versions, causes = Counter[str](), Counter[str]()
    for update in updates_of(run, step):
        for name, trajectory in run.stored_trajectories(update.trajectories).items():
            learner, index = update.of(name)["logp"], 0
            for number, turn in enumerate(trajectory.turns):
                if turn.restart:
                    causes[str(turn.facts.get("restart", "history rewritten")) if number else "first turn"] += 1
                versions.update(f"version {v}" for v in turn.version)
                for token, sampled in zip(turn.tokens, turn.logp):
                    learned = float(learner[index])
                    gaps.append((learned - float(sampled), name, index, token, float(sampled), learned))
                    index += 1
    if not updates_of(run, step):
        yield Note(f"The tokens of step {step} are not stored.", "warning")
        return
    if not gaps:
        yield Note("The tokens of this step have no sampler log-probabilities.", "warning")
        return
    counts, _ = np.histogram(np.abs([gap[0] for gap in gaps]), [*GAP_EDGES, np.inf])
    labels = [f"below {high:g}" for high in GAP_EDGES[1:]] + ["1 and more"]
    title = f"Step {step}: |learner − sampler| of log-probabilities"
    yield BarChart(title, labels, (counts / counts.sum()).tolist(), "share of tokens", True)
    rows = [
        (token_link(f"{name} #{index}", name, step, index), token_texts(run.path, [token])[0], sampled, learned, gap)
        for gap, name, index, token, sampled, learned in sorted(gaps, key=lambda g: -abs(g[0]))[:TOP_GAPS]
    ]
    yield DataTable("Largest differences", ("token", "text", "sampler", "learner", "difference"), rows)
    yield BarChart("Tokens by policy version", [*versions], [float(n) for n in versions.values()])
    if causes:
        yield BarChart("Restarts by cause", [*causes], [float(n) for n in causes.values()])
