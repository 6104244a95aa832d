"""``turnwise probe-reward ENV``: attacks an environment's reward, and shows what it pays although it is wrong.

    report = probe_reward("my_package.my_module:MyEnvironment", minutes=2)
    print(report.text())

Scripted adversaries come first, then a search over sequences of acts, then the tiny model, each only while nothing was found and
time is left. What looks wrong on a few tasks is played again on tasks of the held-out split; only that decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.environments import load
from turnwise.errors import SettingError
from turnwise.inspector.probe.adversaries import Adversary, adversaries, repeat
from turnwise.inspector.probe.lore import LORE_TASKS, Lore, follow_oracle, gather_lore
from turnwise.inspector.probe.play import ProbeEpisode, ProbePlayer, ProbeTask, RightCheck
from turnwise.inspector.probe.policy_search import train_against
from turnwise.inspector.probe.report import ProbeFinding, ProbeReport
from turnwise.inspector.probe.search import search_acts
from turnwise.inspector.probe.verdict import OraclePay, judge

EXPLORED, DECIDING, SEARCHED = 4, 12, 2  # tasks
SCRIPTED_SHARE, SEARCH_SHARE = 0.4, 0.65  # of the time, until which each stage may last
RESERVE = 8.0  # seconds that the last stage leaves for its end
Say = Callable[[str], None]


def probe_reward(
    environment: str | type[Any],
    minutes: float = 2.0,
    check: RightCheck | None = None,
    everything: bool = False,
    say: Say = lambda text: None,
) -> ProbeReport:
    """Probe a class, or the one that ``load`` returns. ``check(env, messages)`` says whether a finished episode is right, in
    place of ``info["success"]``; ``everything``: go on to the next stage although something was found."""
    if not minutes > 0:
        raise SettingError(f"minutes is {minutes}; write a positive number")
    cls = load(environment) if isinstance(environment, str) else environment
    name = environment if isinstance(environment, str) else cls.__name__
    player = ProbePlayer(cls, check)
    try:
        return _Probe(player, name, time.monotonic(), 60 * minutes, everything, say).run()
    finally:
        player.close()


@dataclass
class _Probe:
    player: ProbePlayer
    name: str
    began: float
    seconds: float
    everything: bool
    say: Say
    pay: OraclePay = field(default_factory=lambda: OraclePay({}))
    findings: dict[str, ProbeFinding] = field(default_factory=dict)  # by family: the one with the highest excess
    behaviours: int = 0
    notes: list[str] = field(default_factory=list)

    def run(self) -> ProbeReport:
        self.say("how the oracle plays")
        lore = gather_lore(self.player, self.tasks(1000, LORE_TASKS))
        explored = self.tasks(0, EXPLORED)
        deciding = self.tasks(500, DECIDING, "held_out")
        self.pay = self.oracle_pay(lore, [*explored, *deciding])
        self.say("scripted adversaries")
        self.attack(adversaries(lore), explored, deciding, self.until(SCRIPTED_SHARE))
        if self.goes_on:
            self.say("search over sequences of acts")
            until = self.until(SEARCH_SHARE)
            found = search_acts(self.player, lore, explored[:SEARCHED], self.pay, until)
            self.attack(found, explored, deciding, until)
        if self.goes_on and self.until(1.0) - RESERVE > time.monotonic():
            self.say("training of the tiny model")
            self.train()
        order = sorted(self.findings.values(), key=lambda finding: -finding.verdict.excess)
        took = time.monotonic() - self.began
        return ProbeReport(self.name, tuple(order), self.behaviours, self.player.played, took, tuple(self.notes))

    @property
    def goes_on(self) -> bool:
        return self.everything or not self.findings

    def until(self, share: float) -> float:
        return self.began + share * self.seconds

    def tasks(self, first: int, count: int, split: str = "train") -> list[ProbeTask]:
        """Tasks of all difficulties in turn."""
        levels = tuple(getattr(self.player.cls, "difficulties", (1,))) if "difficulty" in self.player.settings else (1,)
        split = split if "split" in self.player.settings else "train"
        return [ProbeTask(first + n, levels[n % len(levels)], split) for n in range(count)]

    def oracle_pay(self, lore: Lore, tasks: Sequence[ProbeTask]) -> OraclePay:
        """The measure of all pay; refuses an environment in which nothing can be called wrong."""
        if lore.has_oracle:
            pay = OraclePay({task: self.player.play(task, follow_oracle) for task in tasks})
            if not any(pay.of(task) for task in tasks):
                self.notes.append("the oracle earns nothing, so every reward counts as more than the oracle's")
            return pay
        tried = [self.player.play(task, a.behaviour) for task in tasks[:2] for a in adversaries(lore)[:60]]
        tried += self._random_episodes(tasks)
        if all(episode.right is None for episode in tried):
            fault = next((f" (its episodes end with {e.fault})" for e in tried if e.fault), "")
            raise SettingError(
                f"nothing in {self.name} says what is wrong{fault}; write a method `oracle`, return info['success'] with the "
                "last step, or give --check file.py:function"
            )
        paid = [episode.reward for episode in tried if episode.right]
        self.notes.append(
            "there is no oracle; the measure is the most that a success was seen to earn"
            if paid
            else "there is no oracle, and no behaviour succeeded: a failure can be compared with nothing"
        )
        return OraclePay({}, max(paid, default=None))

    def _random_episodes(self, tasks: Sequence[ProbeTask]) -> list[ProbeEpisode]:
        """Episodes of one random action again and again, so that some success is seen."""
        pairs = [(task, action) for task in tasks for action in self.player.random_actions(task, 6)]
        return [self.player.play(task, repeat(action)) for task, action in pairs]

    def attack(
        self, found: Iterable[Adversary], explored: Sequence[ProbeTask], deciding: Sequence[ProbeTask], until: float
    ) -> None:
        """Play each behaviour on a few tasks; where it looks wrong, decide on the others."""
        for adversary in found:
            if time.monotonic() > until:
                break
            self.behaviours += 1
            first = [self.player.play(task, adversary.behaviour) for task in explored[:SEARCHED]]
            if judge(first, self.pay, adversary.blind) is None:
                first += [self.player.play(task, adversary.behaviour) for task in explored[SEARCHED:]]
                if judge(first, self.pay, adversary.blind) is None:
                    continue
            episodes = [self.player.play(task, adversary.behaviour) for task in deciding]
            verdict = judge(episodes, self.pay, adversary.blind)
            if verdict is not None:
                self.keep(ProbeFinding(adversary.family, adversary.about, verdict))

    def train(self) -> None:
        verdict, line = train_against(self.player.cls, self.until(1.0) - RESERVE, self.player, self.pay)
        self.notes.append(line)
        if verdict is not None:
            self.keep(ProbeFinding("learned", "what the tiny model learned", verdict))

    def keep(self, finding: ProbeFinding) -> None:
        known = self.findings.get(finding.family)
        if known is None or finding.verdict.excess > known.verdict.excess:
            self.findings[finding.family] = finding
