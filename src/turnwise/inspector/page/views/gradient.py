"""Who eats the gradient: its shares by turn, agent, part of the answer, sign, length and difficulty, and its top tokens."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from turnwise.core.records import Trajectory
from turnwise.inspector.page.blocks import BarChart, Choice, DataTable, Note, ViewPage
from turnwise.inspector.page.step_cache import updates_of
from turnwise.inspector.page.token_text import token_texts
from turnwise.inspector.page.view_query import ViewQuery
from turnwise.inspector.queries import RunReader
from turnwise.inspector.stored_trajectories import ledger_trajectories
from turnwise.observe.charts import Link

ABOUT = "Shares of Σ |∂ loss / ∂ log π| over the sampled tokens of one step, as the step applied it."
LENGTHS = (16, 64, 256, 1024, 4096)
TOP = 25
PARTS = re.compile(r"(?P<thinking><think>.*?(?:</think>|$))|(?P<call><tool_call>.*?(?:</tool_call>|$))", re.DOTALL)


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


def gradient(run: RunReader, query: ViewQuery) -> ViewPage:
    """One step, the newest kept one if none is chosen."""
    kept = run.kept_steps()
    step = query.step if query.step > 0 else kept[-1] if kept else 0
    title = "Who eats the gradient"
    if not kept:
        return ViewPage("gradient", title, ABOUT, [Note("This run keeps no token numbers (--keep-tokens).")])
    blocks: list[Any] = [Choice("step", "step", str(step), [str(s) for s in kept])]
    if step not in kept:
        text = f"The tokens of step {step} are not stored; stored are steps {kept[0]} to {kept[-1]}."
        return ViewPage("gradient", title, ABOUT, [*blocks, Note(text, "warning")])
    tokens = list(_tokens(run, step))
    total = sum(abs(t.slope) for t in tokens)
    if not tokens or not total:
        text = "No token of this step has a gradient: all advantages are 0, or every token is masked."
        return ViewPage("gradient", title, ABOUT, [*blocks, Note(text, "warning")])
    keys = {
        "By turn": lambda t: f"turn {t.turn}" if t.turn < 8 else "turn 8 and later",
        "By agent": lambda t: t.agent,
        "By part of the answer": lambda t: t.part,
        "By sign": lambda t: "made more likely" if t.slope < 0 else "made less likely" if t.slope > 0 else "not moved",
        "By length of the trajectory": lambda t: _length(t.trajectory.sampled),
        "By difficulty": lambda t: f"difficulty {t.trajectory.task.difficulty}",
    }
    for name, key in keys.items():
        shares, counts = defaultdict[str, float](float), defaultdict[str, int](int)
        for t in tokens:
            shares[key(t)] += abs(t.slope) / total
            counts[key(t)] += 1
        labels = [f"{label} ({100 * counts[label] / len(tokens):.0f} % of tokens)" for label in sorted(shares)]
        blocks.append(BarChart(name, labels, [shares[label] for label in sorted(shares)], percent=True))
    blocks.append(_top(run, tokens, total, step))
    return ViewPage("gradient", title, ABOUT, blocks)


def _length(tokens: int) -> str:
    bound = next((b for b in LENGTHS if tokens <= b), None)
    return f"more than {LENGTHS[-1]} tokens" if bound is None else f"up to {bound:>4} tokens"


def _tokens(run: RunReader, step: int) -> Iterator[TokenShare]:
    for update in updates_of(run, step):
        for name, trajectory in ledger_trajectories(run, update.trajectories).items():
            columns = update.of(name)
            parts = answer_parts(run, trajectory)
            index = 0
            for number, turn in enumerate(trajectory.turns):
                for token in turn.tokens:
                    slope, advantage = float(columns["slope"][index]), float(columns["advantage"][index])
                    yield TokenShare(trajectory, index, number, turn.agent, parts[index], token, slope, advantage)
                    index += 1


def answer_parts(run: RunReader, trajectory: Trajectory) -> list[str]:
    """For each sampled token: thinking, call or answer, by the tags in the text of its turn."""
    parts: list[str] = []
    for turn in trajectory.turns:
        texts = token_texts(run.path, turn.tokens)
        whole, ends = "".join(texts), list[float]()
        spans = [(m.start(), m.end(), m.lastgroup or "") for m in PARTS.finditer(whole)]
        position = 0
        for text in texts:
            ends.append(position + len(text) / 2)
            position += len(text)
        parts += [next((kind for a, b, kind in spans if a <= middle < b), "answer") for middle in ends]
    return parts


def _top(run: RunReader, tokens: list[TokenShare], total: float, step: int) -> DataTable:
    best = sorted(tokens, key=lambda t: -abs(t.slope))[:TOP]
    rows = []
    for t in best:
        query = {"trajectory": t.trajectory.id, "step": step, "token": t.index}
        text = token_texts(run.path, [t.token])[0]
        link = Link(f"{t.trajectory.id} #{t.index}", "why", query)
        rows.append((link, text, t.part, t.turn, t.advantage, -t.slope, abs(t.slope) / total))
    columns = ("token", "text", "part", "turn", "advantage", "gradient", "share")
    return DataTable("Top tokens", columns, rows, "the largest gradients of the step")
