"""Pages between the views: one step with its groups, and a search over all trajectories."""

from __future__ import annotations

from typing import Any

from turnwise.inspector.page.blocks import Choice, DataTable, FactList, Note, ViewPage
from turnwise.inspector.page.view_query import ViewQuery
from turnwise.inspector.queries import RunReader
from turnwise.observe.charts import Link

PAGE = 100


def step(run: RunReader, query: ViewQuery) -> ViewPage:
    """The groups of one step, and its metrics."""
    steps = run.steps()
    number = query.step if query.step > 0 else steps[-1] if steps else 1
    groups = run.groups(step=number, limit=PAGE, offset=max(0, query.offset))
    rows = [
        (
            Link(g.id, "siblings", {"group": g.id}),
            g.task.key,
            g.state,
            g.reason,
            g.reward,
            g.success,
            "no" if g.reward_low == g.reward_high else "yes",
            g.trajectories,
            g.tokens,
        )
        for g in groups
    ]
    columns = ("group", "task", "state", "reason", "reward", "success", "spread", "trajectories", "tokens")
    links = [("who eats the gradient", "gradient"), ("what if", "what-if"), ("same policy?", "policy")]
    links += [("who waits for whom", "waits"), ("is the reward gamed?", "reward")]
    blocks: list[Any] = [
        Choice("step", "step", str(number), [str(s) for s in steps]),
        FactList("Views of this step", [(name, Link("open", view, {"step": number})) for name, view in links]),
        DataTable("Groups", columns, rows, f"{query.offset} to {query.offset + len(rows)}"),
    ]
    if len(groups) == PAGE:
        more = Link("next groups", "step", {"step": number, "offset": query.offset + PAGE})
        blocks.append(FactList("", [("more", more)]))
    metrics = [row for row in run.metrics() if row.step == number]
    numbers = {name: value for row in metrics for name, value in row.values.items()}
    blocks.append(DataTable("Metrics", ("metric", "value"), sorted(numbers.items())))
    return ViewPage("step", f"Step {number}", "What one step trained on, and what it logged.", blocks)


def search(run: RunReader, query: ViewQuery) -> ViewPage:
    """Trajectories whose id, reason or text contains the words."""
    text = query.search.strip()
    blocks: list[Any] = []
    if text:
        found = run.trajectories(search=text, limit=PAGE, offset=max(0, query.offset))
        rows = [
            (Link(t.id, "why", {"trajectory": t.id}), t.task.key, t.step, t.reward, t.status, t.reason, t.tokens)
            for t in found
        ]
        columns = ("trajectory", "task", "step", "reward", "status", "reason", "tokens")
        blocks.append(DataTable(f"{len(rows)} trajectories", columns, rows, f"that contain {text!r}, at most {PAGE}"))
    else:
        blocks.append(Note("Type a word of a transcript, a trajectory's id, or a reason."))
    return ViewPage("search", "Search", "Searches ids, reasons and messages of all trajectories.", blocks)
