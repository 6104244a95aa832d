"""The exactness certificate of a run whose episodes an agent played: what share of its calls continued the recorded ids token for
token, why the others did not, and how much of what was sampled was trained on. Read from the ledger; measures nothing itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.records import Status
from turnwise.core.text import printable_line
from turnwise.rollout.agent_episode import DIFFERENCE
from turnwise.rollout.lineage import (
    COMPACTION,
    CONTINUED,
    OPENING,
    REWRITTEN,
    SAME_TOKENS,
    SUB_AGENT,
    TEMPLATE,
    THINKING,
)
from turnwise.store.database import EpisodeFacts
from turnwise.store.ledger import SqliteLedger

RESTARTS = (SUB_AGENT, COMPACTION, REWRITTEN, THINKING, TEMPLATE)
WORDS = {
    SUB_AGENT: "another first message, as of a sub-agent",
    COMPACTION: "the history was replaced or dropped",
    REWRITTEN: "an assistant message that was not sampled there",
    THINKING: "the chat template leaves earlier thinking out",
    TEMPLATE: "the chat template writes the history differently",
}


def run_certificate(settings: Settings, ledger: Path) -> dict[str, Any]:
    """The entry of a summary; empty for runs without an agent."""
    if not settings.agent:
        return {}
    with SqliteLedger(ledger, readonly=True) as recorded:
        return {"exactness": certificate(recorded.episode_facts())}


def certificate(episodes: Iterable[EpisodeFacts]) -> dict[str, Any]:
    """The certificate of these episodes."""
    causes: Counter[str] = Counter()
    unfinished: Counter[str] = Counter()
    first: dict[str, str] = {}
    totals: Counter[str] = Counter()
    for episode in episodes:
        known = (OPENING, *SAME_TOKENS, *RESTARTS)
        causes.update({c: int(episode.facts.get(f"agent/{c}", 0)) for c in known})
        totals["retries"] += int(episode.facts.get("agent/retries", 0))
        totals["episodes"] += 1
        totals["sampled"] += episode.sampled
        totals["trained"] += episode.sampled if episode.trained else 0
        if episode.status == Status.FAILED:
            unfinished[episode.reason or "no reason"] += 1
        for cause in RESTARTS:
            if f"{DIFFERENCE}{cause}" in episode.facts:
                first.setdefault(cause, str(episode.facts[f"{DIFFERENCE}{cause}"]))
    follow_ups = causes.total() - causes[OPENING]
    exact = sum(causes[cause] for cause in SAME_TOKENS)
    return {
        "episodes": totals["episodes"],
        "calls": causes.total(),
        "first_calls": causes[OPENING],
        "continued": exact,
        "continued_share": exact / follow_ups if follow_ups else 1.0,
        "behind_earlier_turns": exact - causes[CONTINUED],
        "restarts": {c: {"count": causes[c], "first_difference": first.get(c, "")} for c in RESTARTS if causes[c]},
        "retries": totals["retries"],
        "unfinished": {"count": unfinished.total(), "reasons": dict(unfinished.most_common(5))},
        "tokens_sampled": totals["sampled"],
        "tokens_trained": totals["trained"],
        "trained_share": totals["trained"] / totals["sampled"] if totals["sampled"] else 1.0,
    }


def certificate_lines(found: Mapping[str, Any]) -> list[str]:
    """A certificate in words, one fact a line."""
    follow_ups = found["calls"] - found["first_calls"]
    lines = [
        f"{found['calls']:,} calls in {found['episodes']:,} episodes; {found['continued']:,} of {follow_ups:,} later calls "
        f"({found['continued_share']:.1%}) continued token for token"
        + (f", {found['behind_earlier_turns']:,} of them behind an earlier turn" * bool(found["behind_earlier_turns"]))
    ]
    for cause, restart in found["restarts"].items():
        shown = f"; the first {restart['first_difference']}" if restart["first_difference"] else ""
        lines.append(f"restarts, {cause}: {restart['count']:,} ({WORDS[cause]}){shown}")
    unfinished, reasons = found["unfinished"]["count"], found["unfinished"]["reasons"]
    why = f" ({next(iter(reasons))})" if reasons else ""
    lines.append(f"retried calls: {found['retries']:,}; unfinished sessions: {unfinished:,}{why}")
    lines.append(
        f"tokens trained over tokens sampled: {found['tokens_trained']:,} / {found['tokens_sampled']:,} "
        f"({found['trained_share']:.1%})"
    )
    return [printable_line(line) for line in lines]
