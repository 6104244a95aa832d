"""Searches for what is paid although it is wrong: over sequences of acts, then by training the tiny model on the reward.

A sequence is repeated until the episode ends; what earns most while it is not called right is changed and tried again. Its acts
are those of the environment's own policies, calls of its tools with odd arguments or words of the task, and single words;
``oracle`` stands for whatever the oracle does then.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.core.protocols import Action
from turnwise.errors import TurnwiseError
from turnwise.inspector.probe.adversaries import INJECTIONS, Adversary, label_of
from turnwise.inspector.probe.play import (
    ODD_VALUES,
    Lore,
    Moment,
    ProbeEpisode,
    ProbePlayer,
    ProbeTask,
    changed_call,
    follow_oracle,
)
from turnwise.inspector.probe.verdict import OraclePay, ProbeVerdict, above, fails_and_is_paid
from turnwise.inspector.queries import RunReader
from turnwise.store.rundir import RunDir
from turnwise.training import api

SURVIVORS = 24
LONGEST = 6
SETTINGS: dict[str, Any] = {
    "groups": 6, "group_size": 8, "cold_steps": 20, "cold_demos": 256, "eval_tasks": 0, "steps": 1000, "trackers": (),
}  # fmt: skip
BEST = 40  # best-paid trajectories that are judged


@dataclass(frozen=True)
class Act:
    """One element of a sequence: what is done at a moment, and its label."""

    label: str
    do: Callable[[Moment], Action]


ActSequence = tuple[Act, ...]


def search_acts(
    player: ProbePlayer, lore: Lore, tasks: Sequence[ProbeTask], pay: OraclePay, until: float, seed: int = 0
) -> Iterator[Adversary]:
    """Sequences that earned well on ``tasks`` without being called right, better ones first, until the time is up."""
    rng = random.Random(seed)
    pool = _pool(lore, rng)
    best: list[tuple[float, ActSequence]] = []
    seen: set[tuple[str, ...]] = set()
    while time.monotonic() < until:
        acts = _next(rng, pool, [acts for _, acts in best])
        key = tuple(act.label for act in acts)
        if key in seen:
            # few acts: everything was tried
            if len(seen) > 50_000:
                return
            continue
        seen.add(key)
        about = "does, again and again: " + ", then ".join(key)
        do = lambda moment, acts=acts: acts[moment.turn % len(acts)].do(moment)  # noqa: E731
        adversary = Adversary("search", about, do)
        episodes = [player.play(task, adversary.behaviour) for task in tasks]
        best = sorted([*best, (_score(episodes, pay), acts)], key=lambda pair: -pair[0])[:SURVIVORS]
        if best[0][0] > -1e-9 and any(acts is other for _, other in best[:3]):
            yield adversary


def _score(episodes: Sequence[ProbeEpisode], pay: OraclePay) -> float:
    """How much more than the oracle a sequence earns, on average; honest success is no gain."""
    gains = []
    for episode in episodes:
        oracle = pay.of(episode.task) or 0.0
        gain = episode.reward - oracle
        if episode.fault:
            gain = -abs(oracle) - 1.0
        elif episode.right and gain <= 0:
            gain -= 0.5
        gains.append(gain)
    return sum(gains) / len(gains)


def _next(rng: random.Random, pool: Sequence[Act], best: Sequence[ActSequence]) -> ActSequence:
    if not best or rng.random() < 0.3:
        return tuple(rng.choice(pool) for _ in range(rng.choice((1, 1, 2, 2, 3))))
    # the better a sequence, the more often it is changed
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
    actions = [*lore.oracle_actions, *lore.random_actions, *lore.calls(rng, lore.words, 60)]
    actions += [Action(text) for text in dict.fromkeys(texts)]
    acts = [Act(label_of(action), lambda moment, action=action: action) for action in actions]  # type: ignore[misc]
    acts += [
        Act("the latest message", lambda m: Action(lore.prefix + m.reply)),
        Act("the task", lambda m: Action(m.prompt)),
    ]
    if lore.oracle_episodes:
        acts += [Act("what the oracle does", follow_oracle)] * 8
        acts += [_changed_oracle(value) for value in (-1, -100, "", *lore.words[:10])]
    acts += [_word(position, lore.prefix) for position in range(8)]
    return acts


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


# ------------------------------------------------------------- the tiny model


class TimeIsUp(Exception):
    """Ends the training; nothing is lost by it, because only the ledger is read."""


@dataclass
class StepClock:
    """A listener that ends the training when the time is up, or when a step as long as the longest would end too late."""

    until: float
    last: float | None = None
    longest: float = 0.0

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if event == "stage":
            self.last = None  # what lies between two stages is no step
        if event == "step":
            self.longest = max(self.longest, 0.0 if self.last is None else now - self.last)
            self.last = now
        if now + self.longest > self.until:
            raise TimeIsUp


def train_against(
    cls: type[Any], until: float, player: ProbePlayer, pay: OraclePay, **settings: Any
) -> tuple[ProbeVerdict | None, str]:
    """Train until the time is up, then judge the best-paid trajectories. Also a line that says how far training came."""
    clock = StepClock(until)
    with tempfile.TemporaryDirectory() as folder:
        difficulties = tuple(getattr(cls, "difficulties", (1,)))
        try:
            api.train(clock, env=cls, out=folder, name="probe", difficulty=difficulties, **{**SETTINGS, **settings})
        except TimeIsUp:
            pass
        except TurnwiseError as error:
            return None, f"the tiny model could not be trained: {error}"
        return _judge_run(Path(folder) / "probe", player, pay)


def _judge_run(path: Path, player: ProbePlayer, pay: OraclePay) -> tuple[ProbeVerdict | None, str]:
    if not (path / "run.json").is_file() or not RunDir.open(path).ledger.is_file():
        return None, "the time was up before the tiny model's first step"
    with RunReader(path) as reader:
        rows = reader.trajectories(order="t.reward DESC", limit=BEST * 4)
        steps = max((row.step for row in rows), default=0)
        tasks, wrong = len(rows), list[tuple[ProbeEpisode, float]]()
        for row in rows:
            if row.reward is None or len(wrong) >= BEST:
                continue
            trajectory = reader.trajectory(row.id)
            task, messages = trajectory.task, tuple(trajectory.messages)
            said = tuple(Action(str(m["content"])) for m in messages if m.get("role") == "assistant")
            rewards = (float(trajectory.reward or 0.0),)
            episode = ProbeEpisode(
                ProbeTask(task.seed, task.difficulty, task.split), messages, said, rewards, row.success
            )
            oracle = pay.of(episode.task)
            if oracle is None:
                played = player.play(episode.task, follow_oracle)
                oracle = played.reward if not played.fault and pay.highest is not None else None
            if oracle is None:
                continue
            highest = max(pay.highest if pay.highest is not None else oracle, oracle)
            if fails_and_is_paid(episode, oracle) or above(episode.reward, highest):
                wrong.append((episode, oracle))
    line = f"the tiny model was trained for {steps} steps"
    if not wrong:
        return None, line
    episode, oracle = max(wrong, key=lambda pair: pair[0].reward - pair[1])
    reason = "it was learned from the reward alone, and " + (
        "fails" if episode.right is False else "is paid more than the oracle ever is"
    )
    return ProbeVerdict(reason, episode.reward, oracle, len(wrong), tasks, episode), line
