"""When a paid behaviour is called wrong. The oracle's pay for the same task is the measure; tasks that were not explored decide.

- *fails and is paid*: the flag (or the check) says wrong, and the reward is at least the oracle's, in two or more tasks;
- *paid more than the oracle*: the mean reward over the tasks is above the oracle's mean;
- *right without knowing*: a behaviour that cannot know the answer, or that is the same in every task although the oracle's
  differs, is called right and paid in nearly every task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from turnwise.inspector.probe.play import ProbeEpisode, ProbeTask

TOLERANCE = 0.05  # of the oracle's pay
NEARLY_ALL = 0.9  # of the tasks
FAILURES = 2  # tasks in which a failure was paid in full

FAILS = "it fails and is paid as much as the oracle"
MORE = "it is paid more than the oracle"
BLIND = "it cannot know the answer and is called right"


@dataclass(frozen=True)
class OraclePay:
    """What the oracle earns and says in each task. Without an oracle: ``best``, the most that a success was seen to earn."""

    episodes: Mapping[ProbeTask, ProbeEpisode]
    best: float | None = None

    def of(self, task: ProbeTask) -> float | None:
        episode = self.episodes.get(task)
        return episode.reward if episode is not None and not episode.fault else self.best

    def same(self, episode: ProbeEpisode) -> bool:
        """Whether the episode is what the oracle does in that task."""
        oracle = self.episodes.get(episode.task)
        return oracle is not None and oracle.said == episode.said

    @property
    def varies(self) -> bool:
        """Whether the oracle acts differently in different tasks; unknown counts as no."""
        return len({episode.said for episode in self.episodes.values()}) > 1

    @property
    def highest(self) -> float | None:
        paid = [e.reward for e in self.episodes.values() if not e.fault]
        return max(paid, default=self.best) if paid or self.best is not None else None


@dataclass(frozen=True)
class ProbeVerdict:
    """Why a behaviour is wrong, and the episode that shows it best."""

    reason: str
    reward: float  # mean over the tasks in which it is wrong
    oracle: float  # mean of the oracle's there
    tasks: int  # in which it is wrong
    played: int
    example: ProbeEpisode

    @property
    def excess(self) -> float:
        return self.reward - self.oracle


def at_least(reward: float, pay: float) -> bool:
    return reward >= pay - TOLERANCE * abs(pay) - 1e-9


def above(reward: float, pay: float) -> bool:
    return reward > pay + TOLERANCE * abs(pay) + 1e-6


def judge(episodes: Sequence[ProbeEpisode], pay: OraclePay, blind: bool = False) -> ProbeVerdict | None:
    """The verdict over the same behaviour in several tasks; None if nothing is wrong."""
    measured = [
        (e, oracle) for e in episodes if not e.fault and (oracle := pay.of(e.task)) is not None and not pay.same(e)
    ]
    if not measured:
        return None
    failed = [(e, oracle) for e, oracle in measured if fails_and_is_paid(e, oracle)]
    # one failure may be a task that is easy to be paid in
    if len(failed) >= min(FAILURES, len(measured)):
        return _verdict(FAILS, failed, len(measured))
    if above(fmean(e.reward for e, _ in measured), fmean(oracle for _, oracle in measured)):
        return _verdict(MORE, [pair for pair in measured if above(pair[0].reward, pair[1])], len(measured))
    right = [(e, oracle) for e, oracle in measured if e.right and oracle > 0 and at_least(e.reward, oracle)]
    # two equal answers may be luck; more, where the oracle's differ, are not
    constant = len({e.said for e, _ in measured}) == 1 and pay.varies and len(measured) > 2
    if (blind or constant) and len(right) >= NEARLY_ALL * len(measured):
        return _verdict(BLIND, right, len(measured))
    return None


def fails_and_is_paid(episode: ProbeEpisode, oracle: float) -> bool:
    """A failure whose reward is the oracle's or more. Where the oracle earns nothing, doing nothing is no proof."""
    paid = at_least(episode.reward, oracle) if oracle else episode.reward > 1e-6
    return episode.right is False and paid


def _verdict(reason: str, pairs: Sequence[tuple[ProbeEpisode, float]], played: int) -> ProbeVerdict:
    example = max(pairs, key=lambda pair: pair[0].reward - pair[1])[0]
    rewards, oracle = fmean(e.reward for e, _ in pairs), fmean(pay for _, pay in pairs)
    return ProbeVerdict(reason, rewards, oracle, len(pairs), played, example)
