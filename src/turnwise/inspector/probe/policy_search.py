"""The tiny model, trained on the environment's reward for the time that is left: what it is paid for although it fails."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.core.protocols import Action
from turnwise.core.records import Trajectory
from turnwise.errors import TurnwiseError
from turnwise.inspector.probe.lore import follow_oracle
from turnwise.inspector.probe.play import ProbeEpisode, ProbePlayer, ProbeTask
from turnwise.inspector.probe.verdict import OraclePay, ProbeVerdict, above, fails_and_is_paid
from turnwise.inspector.queries import RunReader
from turnwise.store.rundir import RunDir
from turnwise.training import api

SETTINGS: dict[str, Any] = {
    "groups": 6,
    "group_size": 8,
    "cold_steps": 20,
    "cold_demos": 256,
    "eval_tasks": 0,
    "steps": 1000,
    "trackers": (),
}
BEST = 40  # best-paid trajectories that are judged


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
        for row in [row for row in rows if row.reward is not None][: BEST * 4]:
            if len(wrong) >= BEST:
                break
            episode = _as_episode(reader.trajectory(row.id), row.success)
            oracle = pay.of(episode.task)
            if oracle is None:
                played = player.play(episode.task, follow_oracle)
                oracle = played.reward if not played.fault and pay.highest is not None else None
            if oracle is not None and _is_wrong(episode, oracle, pay):
                wrong.append((episode, oracle))
    line = f"the tiny model was trained for {steps} steps"
    if not wrong:
        return None, line
    episode, oracle = max(wrong, key=lambda pair: pair[0].reward - pair[1])
    reason = "it was learned from the reward alone, and " + (
        "fails" if episode.right is False else "is paid more than the oracle ever is"
    )
    return ProbeVerdict(reason, episode.reward, oracle, len(wrong), tasks, episode), line


def _is_wrong(episode: ProbeEpisode, oracle: float, pay: OraclePay) -> bool:
    highest = max(pay.highest if pay.highest is not None else oracle, oracle)
    return fails_and_is_paid(episode, oracle) or above(episode.reward, highest)


def _as_episode(trajectory: Trajectory, right: bool | None) -> ProbeEpisode:
    task, messages = trajectory.task, tuple(trajectory.messages)
    said = tuple(Action(str(m["content"])) for m in messages if m.get("role") == "assistant")
    reward = float(trajectory.reward or 0.0)
    return ProbeEpisode(ProbeTask(task.seed, task.difficulty, task.split), messages, said, (reward,), right)
