"""Views of sampled tokens: what a step did to one, another method's pushes, siblings, shares of the gradient, sampler and
learner compared."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.core.records import Group, Trajectory
from turnwise.core.signals import Signal
from turnwise.errors import TurnwiseError
from turnwise.inspector.factors.explain import cosine, explain_token
from turnwise.inspector.factors.movement import agreement, pushes_in_context
from turnwise.inspector.factors.stored_step import SAME_BEFORE_UPDATE
from turnwise.inspector.page.blocks import (
    BarChart,
    Choice,
    DataTable,
    FactList,
    Note,
    SideBySide,
    Transcript,
    ViewQuery,
    curves,
    token_link,
)
from turnwise.inspector.page.step_cache import factors_of, update_of, updates_of
from turnwise.inspector.page.views.colours import TokenColours
from turnwise.inspector.page.views.opening import opened_step, opened_token, solved_sentence, step_header
from turnwise.inspector.page.views.transcripts import first_difference, token_texts, transcript
from turnwise.inspector.queries import RunReader
from turnwise.observe.charts import Cell, ForkDiagram, Link, TreeNode
from turnwise.recipes import catalogue
from turnwise.recipes.registry import METHODS
from turnwise.store.token_columns import TokenColumns

HINTS = ("advantage", "logp", "entropy", "gate", "weight")  # columns that a pointer over a token shows
NOT_KEPT = "No step with numbers of tokens is stored yet."
DIFFERENCES, TRANSCRIPTS, DIVERGENCE_TEXT, SHARED_TEXT = 20, 8, 40, 12
LENGTHS = (16, 64, 256, 1024, 4096)
TOP_TOKENS, TOP_GAPS = 25, 15
PARTS = re.compile(r"(?P<thinking><think>.*?(?:</think>|$))|(?P<call><tool_call>.*?(?:</tool_call>|$))", re.DOTALL)
GAP_EDGES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
ROUNDING = 1e-5  # of a log-probability in float32
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
    """What a step did to the tokens of one trajectory. Click one: its push, how far it moved, and where the push came from."""
    step, name, token = opened_token(run, query)
    if not name:
        yield Note("No trajectory is stored yet.")
        return
    steps, row, trajectory = run.kept_steps(), run.trajectory_row(name), run.trajectory(name)
    if not query.trajectory:
        yield from step_header(run, query, step, steps)
    colours, update = TokenColours(run, step, query.colour), update_of(run, step, name)
    yield colours.choice({"trajectory": name, "token": token})
    yield FactList(
        "Trajectory",
        [
            ("trajectory", trajectory.id),
            ("group", Link(row.group, "siblings", {"group": row.group})),
            ("task", trajectory.task.key),
            ("step", Link(str(step), "step", {"step": step})),
            ("reward", trajectory.reward),
            ("success", {None: "not judged", True: "yes", False: "no"}[trajectory.success]),
            ("status", f"{trajectory.status}{': ' + trajectory.reason if trajectory.reason else ''}"),
            ("tokens", trajectory.sampled),
            *((f"reward: {part}", value) for part, value in trajectory.rewards.items()),
        ],
    )
    factors: list[Any] = []
    if update is None:
        which = f"stored are steps {steps[0]} to {steps[-1]}" if steps else "this run kept none (--keep-tokens)"
        missing = "The numbers of this trajectory's tokens are not stored: it was not trained on, or too long ago"
        yield Note(f"{missing}; {which}.", "warning")
    elif token >= 0:
        factors = list(_factors(run, step, name, token, query.method))
    left = transcript(
        run,
        trajectory,
        colours.of(name),
        token_hints(update, name),
        lambda i: token_link("", name, step, i, query.colour),
        token,
        query.offset,
        about=colours.about,
        full=colours.full,
    )
    yield SideBySide([left], factors) if factors else left


def token_hints(update: TokenColumns | None, name: str) -> Callable[[int], str]:
    """What a pointer over a token shows: the numbers that the step has of it, all with the sign "up is more likely"."""
    columns = {} if update is None else update.of(name)
    shown = {n: columns[n] for n in HINTS if n in columns}
    if "slope" in columns:
        shown["push"] = -columns["slope"]
    if "after" in columns:
        shown["movement"] = columns["after"] - columns["logp"]
    return lambda i: ", ".join(f"{n} {float(x[i]):.4g}" for n, x in shown.items() if i < len(x) and math.isfinite(x[i]))


def _factors(run: RunReader, step: int, name: str, token: int, method: str) -> Iterator[Any]:
    try:
        stored, factors = factors_of(run, step, method, trajectory=name)
        one = explain_token(stored, factors, name, token)
    except TurnwiseError as error:
        yield Note(f"The factors cannot be recomputed: {error}", "warning")
        return
    columns = stored.update.of(name)
    before, after = (float(columns[n][token]) if n in columns else math.nan for n in ("logp", "after"))
    context = pushes_in_context(stored, factors, name, token)
    text = token_texts(run.path, [context[0].id])[0].strip() or "↵"
    yield Note(f"“{text}” {movement_sentence(before, after)} {push_sentence(one.gradient, one.share, after - before)}")
    yield FactList(
        f"Token {token}",
        [
            ("push: ∂ objective / ∂ log π", one.gradient),
            ("its push on its own logit: push · (1 − π)", context[0].on_logit),
            ("push on its logit from all tokens sampled here", sum(row.on_logit for row in context)),
            ("probability before the step", math.exp(before) if math.isfinite(before) else None),
            ("probability after it, measured", math.exp(after) if math.isfinite(after) else None),
            ("movement: log-probability after − before", after - before if math.isfinite(after - before) else None),
        ],
    )
    rows = [
        (
            token_link(row.trajectory, row.trajectory, step, row.token),
            token_texts(run.path, [row.id])[0],
            row.push,
            row.on_logit,
            row.moved if math.isfinite(row.moved) else None,
        )
        for row in context[:DIFFERENCES]
    ]
    about = (
        "all tokens of this update that were sampled after exactly the same text, itself first; their pushes on its logit are "
        "exact. Other texts, which share the weights, and earlier steps, which the optimiser still follows, moved it, too: they "
        "are in the movement and not split up here"
    )
    yield DataTable(
        "What pushed this token", ("token of", "text", "its push", "on this logit", "it moved"), rows, about
    )
    if one.agrees is not None:
        same, level = ("equals", "good") if one.agrees else ("DIFFERS from", "warning")
        yield Note(f"The recomputed push {same} the one that the step applied ({one.stored:.4g}).", level)
    chain = [(s.name, s.value, s.piece, s.inputs, s.formula) for s in one.chain]
    yield DataTable("Factors", ("factor", "value", "piece", "numbers", "formula"), chain, f"product: {one.numbers}")
    yield DataTable("Summands of the push", ("part", "value"), one.summands)
    peers = [
        (Link(p.trajectory, "why", {"trajectory": p.trajectory, "step": one.step}), p.reward, p.advantage, p.share)
        for p in one.peers
    ]
    yield DataTable("Siblings", ("trajectory", "reward", "mean advantage", "share of the push"), peers)


def movement_sentence(before: float, after: float) -> str:
    """What was measured, in words."""
    if not math.isfinite(after - before):
        return "was not measured again after the step (--remeasure-tokens)."
    way = "became more likely" if after > before else "became less likely" if after < before else "did not move"
    size = f"{math.exp(before):.4g} → {math.exp(after):.4g}, {after - before:+.3g} in log-probability"
    return f"{way} in this step (measured: {size})."


def push_sentence(push: float, share: float, moved: float) -> str:
    """What pushed it, and whether the movement followed."""
    if not push:
        return (
            "The step did not push it: what moved it are other tokens and earlier steps."
            if moved
            else "Nothing pushed it."
        )
    way = "up" if push > 0 else "down"
    text = f"The step pushed it {way}, with {100 * share:.2g} % of all pushes of the update."
    against = " It moved the other way: other tokens share its weights, and the optimiser still follows earlier steps."
    return text + against * (push * moved < 0)


# -------------------------------------------------------------------- what if


def what_if(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """The same batch under another method: one update, from the same weights, on the same trajectories."""
    steps = run.kept_steps()
    if not steps:
        yield Note(NOT_KEPT)
        return
    step, update = opened_step(run, query, steps), max(0, query.update)
    method = str(run.settings.get("method", ""))
    impossible = impossible_methods(run, step)
    # one that this run can compute and that differs also where all ratios are 1, as in the first update of a step
    usual = ("dr_grpo", "grpo", "dapo", "reinforce")
    other = query.method or next((name for name in usual if name != method and name not in impossible), usual[-1])
    yield Choice("method", "another method", other, sorted(METHODS), {"step": step, "update": update}, impossible)
    yield from step_header(run, replace(query, method=other), step, steps)
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
            ("cosine of the pushes on all tokens", cosine(a, b)),
            (
                f"size of {other}'s pushes, relative to {method}'s",
                float(b.norm() / a.norm()) if a.norm() > 0 else float("nan"),
            ),
            ("tokens with opposite signs", f"{100 * float((a * b < 0).double().mean()):.2f} %"),
            (f"tokens that only {method} pushes", only(a, b)),
            (f"tokens that only {other} pushes", only(b, a)),
        ],
    )
    left, right = mine.recipe.slots(), theirs.recipe.slots()
    rows = [(slot, left[slot], right[slot]) for slot in left if left[slot] != right[slot]]
    about = "slots of the update only count here: another sampler, budget or strategy would have collected other data"
    yield DataTable("Slots that differ", ("slot", method, other), rows, about)

    tree, names = mine.batch.tree, mine.batch.trajectory_ids
    owner = tree.ancestor(TOKEN, TRAJECTORY)
    # each method's push on a trajectory, normalised to Σ |push| = 1: methods differ in scale, the optimiser takes that out
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
    about = "push on each trajectory as a share of all pushes of the update; the largest differences first"
    yield DataTable("Where they differ", ("trajectory", method, other, "difference"), cells, about)

    name = query.trajectory or (apart[0][0] if apart else "")
    if name and name not in names:
        yield Note(f"trajectory {name} is not in this update", "warning")
    elif name:
        at = (owner == names.index(name)).nonzero().squeeze(1)
        shares = [float(m.factors.share[at].sum()) for m in (mine, theirs)]
        yield BarChart(f"Share of the pushes on {name}", (method, other), shares, percent=True)

        def under(label: str, push: Any) -> Transcript:
            values = push[at].tolist()
            hint = lambda i: f"push {values[i]:.4g}" if i < len(values) else ""  # noqa: E731
            link = lambda i: token_link("", name, step, i)  # noqa: E731
            about = "Green: pushed up, red: pushed down. The largest push of the method has the full colour."
            top, title = float(push.abs().max()), f"{name} under {label}"
            return transcript(run, run.trajectory(name), values, hint, link, title=title, about=about, full=top)

        yield SideBySide([under(method, a)], [under(other, b)])


def impossible_methods(run: RunReader, step: int) -> dict[str, str]:
    """The methods that cannot be computed on a stored step, each with what they read and the run did not measure."""
    columns = {name for update in updates_of(run, step) for name in update.columns}
    return _impossible(frozenset(columns) & frozenset(map(str, Signal)))


@lru_cache(maxsize=8)
def _impossible(measured: frozenset[str]) -> dict[str, str]:
    available = {*measured, *SAME_BEFORE_UPDATE}
    reasons = {}
    for name in METHODS:
        missing = sorted(str(signal) for signal in catalogue.parse_method(name).objective.signals - available)
        if missing:
            reasons[name] = f"reads {', '.join(missing)}, which this run did not measure"
    return reasons


# ------------------------------------------------------------------- siblings


def siblings(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """The trajectories of one group: where they diverge, and what each was credited with."""
    name = query.group
    if not name:
        step, telling, _ = opened_token(run, ViewQuery(step=query.step))
        if not telling:
            yield Note("No group has finished yet.")
            return
        groups = [g for g in run.groups(step=step) if g.trajectories]
        spread = [g for g in groups if g.reward_low != g.reward_high]
        stored = update_of(run, step, telling) is not None
        name = run.trajectory_row(telling).group if stored or not spread else spread[0].id
        yield from step_header(run, query, step, run.kept_steps() or run.steps())
    row, group = run.group_row(name), run.group(name)
    step, members = row.step, group.trajectories
    names = [g.id for g in run.groups(step=step) if g.trajectories]
    yield Choice("group", f"group of step {step}", name, names, {"colour": query.colour} if query.colour else {})
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
    colours = TokenColours(run, step, query.colour, "advantage")
    yield colours.choice({"group": name})
    mean = sum(t.reward for t in members) / len(members)
    better, worse = list[Any](), list[Any]()
    classes = same_tokens(members)
    ids = {same[0].id: [token for turn in same[0].turns for token in turn.tokens] for same in classes}
    first, *others = ids.values()
    # the first is beside the sibling that leaves it first, the others beside the first: what is shared is grey
    nearest = min(others, key=lambda one: first_difference(first, one), default=())
    for t, *same in sorted(classes, key=lambda row: -row[0].reward)[:TRANSCRIPTS]:
        names = [t.id, *(twin.id for twin in same)]
        block = transcript(
            run,
            t,
            colours.of(t.id),
            token_hints(updates[t.id], t.id),
            lambda i, one=t.id: token_link("", one, step, i),  # type: ignore[misc]
            title=f"{', '.join(names)}: reward {t.reward:g}" + f", {len(names)} times the same" * bool(same),
            about=colours.about,
            full=colours.full,
            like=nearest if ids[t.id] is first else first,
        )
        (better if t.reward >= mean else worse).append(block)
    # what was rewarded beside what was not; without a difference, one below the other
    yield from [SideBySide(better, worse)] if worse else better


def same_tokens(members: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Trajectories with equal sampled tokens and reward together, in the order of their first ones."""
    merged = defaultdict[Any, list[Trajectory]](list)
    for t in members:
        merged[t.reward, tuple(tuple(turn.tokens) for turn in t.turns)].append(t)
    return list(merged.values())


def _divergence(run: RunReader, group: Group) -> DataTable:
    """For each trajectory: at which sampled token it leaves the first one, and what the two then say."""
    classes = same_tokens([t for t in group.trajectories if t.sampled])
    if len(classes) < 2:
        return DataTable("First divergence", (), ())
    rows: list[tuple[Cell, ...]] = []
    first, *others = ([token for turn in same[0].turns for token in turn.tokens] for same in classes)
    for (t, *same), ids in zip(classes[1:], others):
        at = first_difference(first, ids)
        names = ", ".join(one.id for one in (t, *same))
        ends = np.cumsum([len(turn.tokens) for turn in t.turns])
        turn = min(int(np.searchsorted(ends, at, side="right")), len(ends) - 1)
        # a dozen tokens are enough to see how the two go on
        texts = ["".join(token_texts(run.path, part[at : at + 12])) for part in (first, ids)]
        # different tokens may begin with the same characters: a reader wants those that differ, and a few before them
        shared = next((i for i, (a, b) in enumerate(zip(*texts)) if a != b), min(map(len, texts)))
        skip = max(0, shared - SHARED_TEXT)
        rows.append((names, at, turn, *("…" * bool(skip) + x[skip : skip + DIVERGENCE_TEXT] for x in texts)))
    one = ", ".join(t.id for t in classes[0])
    columns = ("trajectory", "token", "turn", f"{classes[0][0].id} says", "it says")
    return DataTable(
        "First divergence", columns, rows, f"compared with {one}, in sampled tokens; equal ones in one row"
    )


# ------------------------------------------------------------------- gradient


@dataclass(frozen=True)
class TokenShare:
    """One token's push and movement, and where it stands."""

    trajectory: Trajectory
    index: int
    turn: int
    agent: str
    part: str
    token: int
    push: float
    advantage: float
    moved: float  # NaN: not measured


def gradient(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """Which tokens one step pushed: shares of Σ |push|, with push = ∂ objective / ∂ log π as the step applied it; and how far
    they moved."""
    steps = run.kept_steps()
    if not steps:
        yield Note(NOT_KEPT)
        return
    step = opened_step(run, query, steps)
    yield from step_header(run, query, step, steps)
    if step not in steps:
        yield Note(f"The tokens of step {step} are not stored; stored are steps {steps[0]} to {steps[-1]}.", "warning")
        return
    tokens = list(_tokens(run, step))
    total = sum(abs(t.push) for t in tokens)
    if not total:
        why_none = solved_sentence(run) or "All its advantages are 0, or every token is masked."
        yield Note(f"Step {step} pushed no token. {why_none}", "warning")
        return
    yield from _push_and_movement(run, step)
    keys = {
        "By turn": lambda t: f"turn {t.turn}" if t.turn < 8 else "turn 8 and later",
        "By agent": lambda t: t.agent,
        "By part of the answer": lambda t: t.part,
        "By direction": lambda t: "pushed up" if t.push > 0 else "pushed down" if t.push < 0 else "not pushed",
        "By length of the trajectory": lambda t: _length(t.trajectory.sampled),
        "By difficulty": lambda t: f"difficulty {t.trajectory.task.difficulty}",
    }
    for name, key in keys.items():
        shares, counts = defaultdict[str, float](float), Counter(map(key, tokens))
        for t in tokens:
            shares[key(t)] += abs(t.push) / total
        labels = [f"{label} ({100 * counts[label] / len(tokens):.0f} % of tokens)" for label in sorted(shares)]
        if len(labels) > 1:  # all tokens in one class: there is nothing to compare
            yield BarChart(name, labels, [shares[label] for label in sorted(shares)], percent=True)
    rows = []
    for t in sorted(tokens, key=lambda t: -abs(t.push))[:TOP_TOKENS]:
        link = token_link(f"{t.trajectory.id} #{t.index}", t.trajectory.id, step, t.index)
        text = token_texts(run.path, [t.token])[0]
        moved = t.moved if math.isfinite(t.moved) else None
        rows.append((link, text, t.part, t.turn, t.advantage, t.push, abs(t.push) / total, moved))
    columns = ("token", "text", "part", "turn", "advantage", "push", "share of all pushes", "movement")
    yield DataTable(
        "Tokens with the largest pushes", columns, rows, "movement: log-probability after the step − before"
    )


def _push_and_movement(run: RunReader, step: int) -> Iterator[Any]:
    """What was measured after the step, and how far pushes foretell it."""
    for update in updates_of(run, step):
        one = agreement(update)
        if one.measured:
            facts: list[tuple[str, Cell]] = [
                ("tokens measured again after the step", f"{one.measured} of {sum(update.sizes)}"),
                ("pushed tokens that moved the way they were pushed", f"{100 * one.same_sign:.0f} %"),
                ("correlation with movement, by token", one.tokens),
                ("correlation with movement, sums of a trajectory", one.trajectories),
            ]
            yield FactList("Push on its own logit, and movement", facts)


def _length(tokens: int) -> str:
    bound = next((b for b in LENGTHS if tokens <= b), None)
    return (
        f"more than {LENGTHS[-1]} tokens" if bound is None else f"up to {bound:>4} tokens"
    )  # aligned: labels are sorted


def _tokens(run: RunReader, step: int) -> Iterator[TokenShare]:
    for update in updates_of(run, step):
        for name, trajectory in run.stored_trajectories(update.trajectories).items():
            columns, index = update.of(name), 0
            moved = columns["after"] - columns["logp"] if "after" in columns else np.full(trajectory.sampled, np.nan)
            for number, turn in enumerate(trajectory.turns):
                for token, part in zip(turn.tokens, answer_parts(token_texts(run.path, turn.tokens))):
                    push, advantage = -float(columns["slope"][index]), float(columns["advantage"][index])
                    where = (trajectory, index, number, turn.agent, part, token)
                    yield TokenShare(*where, push, advantage, float(moved[index]))
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
        step = opened_step(run, query, steps)
        yield from step_header(run, query, step, steps)
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
    if causes:
        yield BarChart("Restarts by cause", [*causes], [float(n) for n in causes.values()])
    largest = max(abs(gap[0]) for gap in gaps)
    if largest < ROUNDING and len(versions) < 2:
        yield Note(
            f"Step {step}: sampler and learner agree. The log-probabilities of all {len(gaps)} tokens, sampled by "
            f"{' and '.join(versions) or 'one version'}, differ by at most {largest:.2g}: rounding.",
            "good",
        )
        return
    counts, _ = np.histogram(np.abs([gap[0] for gap in gaps]), [*GAP_EDGES, np.inf])
    labels = [f"below {high:g}" for high in GAP_EDGES[1:]] + ["1 and more"]
    title = f"Step {step}: |learner − sampler| of log-probabilities"
    yield BarChart(title, labels, (counts / counts.sum()).tolist(), "share of tokens", True)
    yield BarChart("Tokens by policy version", [*versions], [float(n) for n in versions.values()])
    rows = [
        (token_link(f"{name} #{index}", name, step, index), token_texts(run.path, [token])[0], sampled, learned, gap)
        for gap, name, index, token, sampled, learned in sorted(gaps, key=lambda g: -abs(g[0]))[:TOP_GAPS]
    ]
    yield DataTable("Largest differences", ("token", "text", "sampler", "learner", "difference"), rows)
