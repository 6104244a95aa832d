"""Siblings: the trajectories of a group aligned, where they first part, where credit differs; forks drawn as a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.core.records import Group, Trajectory
from turnwise.inspector.page.blocks import Choice, DataTable, FactList, Note, ViewPage
from turnwise.inspector.page.step_cache import update_of
from turnwise.inspector.page.token_text import token_texts
from turnwise.inspector.page.view_query import ViewQuery
from turnwise.inspector.page.views.transcripts import transcript
from turnwise.inspector.queries import RunReader
from turnwise.observe.charts import ForkDiagram, Link, TreeNode

ABOUT = "The trajectories of one group: where they part, and what each was credited with."
TRANSCRIPTS, TEXT = 8, 40


def siblings(run: RunReader, query: ViewQuery) -> ViewPage:
    """One group, chosen by its id; without one, the newest group that has spread."""
    name = query.group or _choose(run, query.step)
    if not name:
        return ViewPage("siblings", "Siblings", ABOUT, [Note("No group has finished yet.")])
    row, group = run.group_row(name), run.group(name)
    neighbours = [g.id for g in run.groups(step=row.step) if g.trajectories]
    blocks: list[Any] = [
        Choice("group", f"group of step {row.step}", name, neighbours),
        FactList(
            "Group",
            [
                ("group", name),
                ("task", row.task.key),
                ("step", Link(str(row.step), "step", {"step": row.step})),
                ("state", f"{row.state}{': ' + row.reason if row.reason else ''}"),
                ("mean reward", row.reward),
                ("policy version when issued", row.version),
            ],
        ),
    ]
    if row.reward_low == row.reward_high and row.trajectories > 1:
        blocks.append(
            Note("All rewards are equal: an advantage relative to the group is 0 for every token.", "warning")
        )
    if any(t.fork for t in group.trajectories):
        blocks.append(_tree(group))
    blocks += [_table(run, group, row.step), _divergence(run, group)]
    shown = sorted(group.trajectories, key=lambda t: -t.reward)[:TRANSCRIPTS]
    blocks += [_transcript(run, t, row.step) for t in shown]
    return ViewPage("siblings", "Siblings", ABOUT, blocks)


def _choose(run: RunReader, step: int) -> str:
    wanted = run.groups(step=step) if step > 0 else run.groups(limit=400)
    groups = [g for g in wanted if g.trajectories]
    spread = [g for g in groups if g.reward_low != g.reward_high]
    return (spread or groups)[-1].id if groups else ""


def _advantages(run: RunReader, trajectory: Trajectory, step: int) -> list[float]:
    update = update_of(run, step, trajectory.id)
    return [] if update is None else [float(x) for x in update.of(trajectory.id)["advantage"]]


def _table(run: RunReader, group: Group, step: int) -> DataTable:
    rows = []
    for t in group.trajectories:
        advantages = _advantages(run, t, step)
        mean = sum(advantages) / len(advantages) if advantages else None
        success = {None: "", True: "yes", False: "no"}[t.success]
        link = Link(t.id, "why", {"trajectory": t.id, "step": step})
        fork = f"{t.fork.parent} at turn {t.fork.turn}" if t.fork else ""
        rows.append((link, t.reward, success, mean, len(t.turns), t.sampled, str(t.status), fork))
    columns = ("trajectory", "reward", "success", "mean advantage", "turns", "tokens", "status", "forks from")
    return DataTable("Trajectories", columns, rows)


def _divergence(run: RunReader, group: Group) -> DataTable:
    """For each trajectory: at which sampled token it leaves the first one, and what the two then say."""
    members = [t for t in group.trajectories if t.sampled]
    if len(members) < 2:
        return DataTable("First divergence", (), ())
    first, rows = members[0], list[tuple[str | float | int | Link | None, ...]]()
    ids = [[token for turn in t.turns for token in turn.tokens] for t in members]
    for t, own in zip(members[1:], ids[1:]):
        at = next((i for i, (a, b) in enumerate(zip(ids[0], own)) if a != b), min(len(ids[0]), len(own)))
        same = at == len(ids[0]) == len(own)
        texts = ["".join(token_texts(run.path, part[at : at + 12]))[:TEXT] for part in (ids[0], own)]
        rows.append((t.id, "the same", None, "", "") if same else (t.id, at, _turn_at(t, at), *texts))
    columns = ("trajectory", "token", "turn", f"{first.id} says", "it says")
    return DataTable("First divergence", columns, rows, f"compared with {first.id}, in sampled tokens")


def _turn_at(trajectory: Trajectory, token: int) -> int:
    for number, turn in enumerate(trajectory.turns):
        token -= len(turn.tokens)
        if token < 0:
            return number
    return max(0, len(trajectory.turns) - 1)


def _transcript(run: RunReader, trajectory: Trajectory, step: int) -> Any:
    advantages = _advantages(run, trajectory, step)
    top = max((abs(a) for a in advantages), default=0.0) or 1.0
    hint = lambda i: f"advantage {advantages[i]:.4g}" if i < len(advantages) else ""  # noqa: E731
    link = lambda i: Link("", "why", {"trajectory": trajectory.id, "step": step, "token": i})  # noqa: E731
    title = f"{trajectory.id}: reward {trajectory.reward:g}"
    return transcript(run, trajectory, [a / top for a in advantages], hint, link, title=title)


def _tree(group: Group) -> ForkDiagram:
    nodes: Sequence[TreeNode] = [
        TreeNode(
            t.id,
            t.fork.parent if t.fork else "",
            t.fork.turn if t.fork else 0,
            len(t.turns),
            f"{t.id}: {t.reward:g}",
            t.reward,
            Link(t.id, "why", {"trajectory": t.id}),
        )
        for t in group.trajectories
    ]
    return ForkDiagram("Forks", nodes)
