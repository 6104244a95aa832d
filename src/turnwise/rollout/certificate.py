"""The exactness certificate of a run that agents played: how many of their calls continued what was sampled before token for
token, how the others differ, which calls were refused or asked for what the run decides. Read from the facts of episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from turnwise.core.protocols import OVERRULED, REFUSED
from turnwise.core.records import Status
from turnwise.core.text import printable_line
from turnwise.rollout.agent_episode import DIFFERENCE, ENDED_BY
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

if TYPE_CHECKING:
    from turnwise.store.database import EpisodeFacts

RESTARTS = (SUB_AGENT, COMPACTION, REWRITTEN, THINKING, TEMPLATE)
WORDS = {
    SUB_AGENT: "another first message, as of a sub-agent",
    COMPACTION: "the history was replaced or dropped",
    REWRITTEN: "an assistant message that was not sampled there",
    THINKING: "the chat template leaves earlier thinking out",
    TEMPLATE: "the chat template writes the history differently",
}


def certificate(episodes: Iterable[EpisodeFacts]) -> dict[str, Any]:
    """The certificate of these episodes."""
    causes: Counter[str] = Counter()
    unfinished: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    overruled: Counter[str] = Counter()
    first: dict[str, str] = {}
    totals: Counter[str] = Counter()
    for episode in episodes:
        counted = (OPENING, *SAME_TOKENS, *RESTARTS)
        causes.update({c: int(episode.facts.get(f"agent/{c}", 0)) for c in counted})
        totals["retries"] += int(episode.facts.get("agent/retries", 0))
        totals["ended by a refused call"] += ENDED_BY in episode.facts
        for kind, counts in ((REFUSED, refused), (OVERRULED, overruled)):
            counts.update({k.removeprefix(kind): int(n) for k, n in episode.facts.items() if k.startswith(kind)})
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
        "continued_share": exact / follow_ups if follow_ups else None,
        "behind_earlier_turns": exact - causes[CONTINUED],
        "restarts": {c: {"count": causes[c], "first_difference": first.get(c, "")} for c in RESTARTS if causes[c]},
        "retries": totals["retries"],
        "refused": {
            "count": refused.total(),
            "codes": dict(refused),
            "episodes_ended": totals["ended by a refused call"],
        },
        "overruled": dict(overruled),
        "unfinished": {"count": unfinished.total(), "reasons": dict(unfinished.most_common(5))},
        "tokens_sampled": totals["sampled"],
        "tokens_trained": totals["trained"],
        "trained_share": totals["trained"] / totals["sampled"] if totals["sampled"] else 1.0,
    }


def certificate_lines(exact: Mapping[str, Any]) -> list[str]:
    """A certificate in words, one fact a line."""
    follow_ups = exact["calls"] - exact["first_calls"]
    continued = "no later calls"
    if follow_ups:
        share = f"{exact['continued']:,} of {follow_ups:,} later calls ({exact['continued_share']:.1%})"
        behind = f", {exact['behind_earlier_turns']:,} of them behind an earlier turn"
        continued = f"{share} continued token for token" + behind * bool(exact["behind_earlier_turns"])
    lines = [f"{exact['calls']:,} calls in {exact['episodes']:,} episodes; {continued}"]
    refused, overruled = exact.get("refused", {}), exact.get("overruled", {})  # summaries of older runs have neither
    if refused.get("count"):
        ended = f"{refused['episodes_ended']:,} episodes ended by one and were not trained on"
        lines.append(f"refused calls: {refused['count']:,} ({_counts(refused['codes'])}); {ended}")
    if overruled:
        lines.append(f"calls that asked for what the run decides: {_counts(overruled)}")
    for cause, restart in exact["restarts"].items():
        shown = f"; the first {restart['first_difference']}" if restart["first_difference"] else ""
        lines.append(f"restarts, {cause}: {restart['count']:,} ({WORDS[cause]}){shown}")
    unfinished, reasons = exact["unfinished"]["count"], exact["unfinished"]["reasons"]
    why = f" ({next(iter(reasons))})" if reasons else ""
    lines.append(f"retried calls: {exact['retries']:,}; unfinished sessions: {unfinished:,}{why}")
    lines.append(
        f"tokens trained over tokens sampled: {exact['tokens_trained']:,} / {exact['tokens_sampled']:,} "
        f"({exact['trained_share']:.1%})"
    )
    return [printable_line(line) for line in lines]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
