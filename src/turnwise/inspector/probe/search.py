"""Searches for paid sequences of acts: keeps what earns most while it is not called right, changes it, tries again.

A sequence is repeated until the episode ends. Its acts are those of the environment's own policies, calls of its tools with odd
arguments or words of the task, and single words; ``oracle`` stands for whatever the oracle does then.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from turnwise.core.protocols import Action
from turnwise.inspector.probe.adversaries import INJECTIONS, Adversary, label_of
from turnwise.inspector.probe.lore import ODD_VALUES, Lore, changed_call
from turnwise.inspector.probe.play import Moment, ProbeEpisode, ProbePlayer, ProbeTask
from turnwise.inspector.probe.verdict import OraclePay

SURVIVORS = 24
LONGEST = 6


@dataclass(frozen=True)
class Act:
    """One element of a sequence: what is done at a moment, and its label."""

    label: str
    do: Callable[[Moment], Action]


ActSequence = tuple[Act, ...]


def as_adversary(acts: ActSequence) -> Adversary:
    """The sequence as a behaviour."""
    about = "does, again and again: " + ", then ".join(act.label for act in acts)
    return Adversary("search", about, lambda moment: acts[moment.turn % len(acts)].do(moment))


def search_acts(
    player: ProbePlayer, lore: Lore, tasks: Sequence[ProbeTask], pay: OraclePay, until: float, seed: int = 0
) -> Iterator[Adversary]:
    """Sequences that earned well on ``tasks`` without being called right, better ones first, until the time is up."""
    rng = random.Random(seed)
    pool = _pool(lore, rng)
    best: list[tuple[float, ActSequence]] = []
    seen: set[tuple[str, ...]] = set()
    yielded: set[tuple[str, ...]] = set()
    while time.monotonic() < until:
        acts = _next(rng, pool, [acts for _, acts in best])
        key = tuple(act.label for act in acts)
        if key in seen:
            if len(seen) > 50_000:
                return
            continue
        seen.add(key)
        adversary = as_adversary(acts)
        episodes = [player.play(task, adversary.behaviour) for task in tasks]
        best = sorted([*best, (_score(episodes, pay), acts)], key=lambda pair: -pair[0])[:SURVIVORS]
        if best[0][0] > -1e-9 and key not in yielded and any(acts is kept for _, kept in best[:3]):
            yielded.add(key)
            yield adversary


def _score(episodes: Sequence[ProbeEpisode], pay: OraclePay) -> float:
    """How much more than the oracle a sequence earns, on average; honest success is no gain."""
    gains = []
    for episode in episodes:
        oracle = pay.of(episode.task) or 0.0
        gain = episode.reward - oracle
        gains.append(
            -abs(oracle) - 1.0 if episode.fault else min(gain, 0.0) - 0.5 if episode.right and gain <= 0 else gain
        )
    return sum(gains) / len(gains)


def _next(rng: random.Random, pool: Sequence[Act], best: Sequence[ActSequence]) -> ActSequence:
    if not best or rng.random() < 0.3:
        return tuple(rng.choice(pool) for _ in range(rng.choice((1, 1, 2, 2, 3))))
    acts = list(best[min(int(rng.expovariate(0.3)), len(best) - 1)])
    kind, at = rng.random(), rng.randrange(len(acts))
    if kind < 0.4:
        acts[at] = rng.choice(pool)
    elif kind < 0.7 and len(acts) < LONGEST:
        acts.insert(at + rng.randrange(2), rng.choice(pool))
    elif kind < 0.85 and len(acts) > 1:
        del acts[at]
    else:
        other = rng.choice(best)
        acts = [*acts[: at + 1], *other[rng.randrange(len(other)) :]][:LONGEST]
    return tuple(acts)


def _pool(lore: Lore, rng: random.Random) -> list[Act]:
    texts = [*lore.words[:60], *(lore.prefix + value for value in (*ODD_VALUES, *lore.values[:8])), *INJECTIONS, ""]
    acts = [_constant(action) for action in (*lore.actions, *lore.calls(rng, lore.words, 60))]
    acts += [_constant(Action(text)) for text in dict.fromkeys(texts)]
    acts += [
        Act("the latest message", lambda m: Action(lore.prefix + m.reply)),
        Act("the task", lambda m: Action(m.prompt)),
    ]
    if lore.has_oracle:
        acts += [Act("what the oracle does", lambda m: m.oracle() or Action(""))] * 8
        acts += [_changed_oracle(value) for value in (-1, -100, "", *lore.words[:10])]
    acts += [_word(position, lore.prefix) for position in range(8)]
    return acts


def _constant(action: Action) -> Act:
    return Act(label_of(action), lambda moment: action)


def _word(position: int, prefix: str) -> Act:
    def do(moment: Moment) -> Action:
        words = moment.prompt.split()
        return Action(prefix + words[position % len(words)]) if words else Action("")

    return Act(f"word {position + 1} of the task", do)


def _changed_oracle(value: object) -> Act:
    """The oracle's act with an argument of the value's type replaced; its text, where it calls nothing."""

    def do(moment: Moment) -> Action:
        action = moment.oracle() or Action("")
        if not action.calls:
            return Action(" ".join([*action.text.split()[:-1], str(value)]))
        keys = [key for key, old in action.calls[0].arguments.items() if type(old) is type(value)]
        return changed_call(action, **{moment.rng.choice(keys): value}) if keys else action

    return Act(f"what the oracle does with {value!r}", do)
