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
from turnwise.inspector.probe.play import (
    LORE_TASKS,
    Lore,
    ProbeEpisode,
    ProbePlayer,
    ProbeTask,
    RightCheck,
    follow_oracle,
    gather_lore,
)
from turnwise.inspector.probe.search import search_acts, train_against
from turnwise.inspector.probe.verdict import OraclePay, ProbeVerdict, judge

EXPLORED, DECIDING, SEARCHED = 4, 12, 2  # tasks
SCRIPTED_SHARE, SEARCH_SHARE = 0.4, 0.65  # of the time, until which each stage may last
RESERVE = 8.0  # seconds that the last stage leaves for its end
SHOWN = 5  # behaviours in the text; JSON holds all
LONGEST = 240  # characters of a message in the text
Say = Callable[[str], None]


@dataclass(frozen=True)
class ProbeFinding:
    """One behaviour that is paid although something calls it wrong."""

    family: str
    about: str
    verdict: ProbeVerdict

    def text(self) -> str:
        v = self.verdict
        pay = f"paid {v.reward:.3g} on average, the oracle {v.oracle:.3g}, in {v.tasks} of {v.played} tasks"
        lines = [f"{self.family}: {self.about}", f"  {v.reason}: {pay}", f"  for example ({v.example.task}):"]
        return "\n".join(
            [*lines, *(f"    {line}" for line in transcript(v.example)), f"    reward: {v.example.reward:.3g}"]
        )

    def as_dict(self) -> dict[str, Any]:
        v = self.verdict
        numbers = {"reward": v.reward, "oracle": v.oracle, "tasks": v.tasks, "played": v.played}
        example = {"task": str(v.example.task), "reward": v.example.reward, "messages": list(v.example.messages)}
        return {"family": self.family, "about": self.about, "reason": v.reason, **numbers, "example": example}


@dataclass(frozen=True)
class ProbeReport:
    """``findings``: at most one for each family, the best-paid first."""

    environment: str
    findings: tuple[ProbeFinding, ...]
    behaviours: int
    episodes: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings

    def text(self) -> str:
        tried = f"{self.behaviours} behaviours in {self.episodes} episodes, {self.seconds:.0f} s"
        if self.ok:
            head = f"{self.environment}: no paid behaviour was called wrong ({tried}). That is no proof that there is none."
        else:
            count = f"{len(self.findings)} kind{'s' * (len(self.findings) > 1)} of behaviour"
            head = f"{self.environment}: {count} paid although wrong ({tried}), the best paid first"
        blocks = [head, *(finding.text() for finding in self.findings[:SHOWN])]
        if len(self.findings) > SHOWN:
            blocks.append(
                f"{len(self.findings) - SHOWN} more kinds: " + ", ".join(f.family for f in self.findings[SHOWN:])
            )
        return "\n\n".join([*blocks, *(f"note: {note}" for note in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"environment": self.environment, "ok": self.ok, "behaviours": self.behaviours}
        facts |= {"episodes": self.episodes, "seconds": round(self.seconds, 1)}
        return {**facts, "findings": [finding.as_dict() for finding in self.findings], "notes": list(self.notes)}


def transcript(episode: ProbeEpisode) -> list[str]:
    """The dialogue, one line for each message, long texts and long dialogues cut."""
    lines = []
    for message in episode.messages:
        text = " ".join(str(message["content"]).split())
        shown = f"{text[:LONGEST]} … ({len(text)} characters)" if len(text) > LONGEST else text or "(nothing)"
        lines.append(f"{message['role']}: {shown}")
    return lines if len(lines) <= 14 else [*lines[:8], f"… ({len(lines) - 12} more messages)", *lines[-4:]]


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
        # far from the attacked seeds: an adversary must not have seen the answers
        lore = gather_lore(self.player, self.tasks(1000, LORE_TASKS))
        explored = self.tasks(0, EXPLORED)
        deciding = self.tasks(500, DECIDING, "held_out")
        self.pay = self.oracle_pay(lore, [*explored, *deciding])
        self.say("scripted adversaries")
        self.attack(adversaries(lore), explored, deciding, self.began + SCRIPTED_SHARE * self.seconds)
        if self.everything or not self.findings:
            self.say("search over sequences of acts")
            until = self.began + SEARCH_SHARE * self.seconds
            sequences = search_acts(self.player, lore, explored[:SEARCHED], self.pay, until)
            self.attack(sequences, explored, deciding, until)
        end = self.began + self.seconds - RESERVE
        if (self.everything or not self.findings) and end > time.monotonic():
            self.say("training of the tiny model")
            verdict, line = train_against(self.player.cls, end, self.player, self.pay)
            self.notes.append(line)
            if verdict is not None:
                self.keep(ProbeFinding("learned", "what the tiny model learned", verdict))
        order = sorted(self.findings.values(), key=lambda finding: -finding.verdict.excess)
        took = time.monotonic() - self.began
        return ProbeReport(self.name, tuple(order), self.behaviours, self.player.played, took, tuple(self.notes))

    def tasks(self, first: int, count: int, split: str = "train") -> list[ProbeTask]:
        """Tasks of all difficulties in turn."""
        levels = tuple(getattr(self.player.cls, "difficulties", (1,))) if "difficulty" in self.player.settings else (1,)
        split = split if "split" in self.player.settings else "train"
        return [ProbeTask(first + n, levels[n % len(levels)], split) for n in range(count)]

    def oracle_pay(self, lore: Lore, tasks: Sequence[ProbeTask]) -> OraclePay:
        """The measure of all pay; refuses an environment in which nothing can be called wrong."""
        if lore.oracle_episodes:
            pay = OraclePay({task: self.player.play(task, follow_oracle) for task in tasks})
            if not any(pay.of(task) for task in tasks):
                self.notes.append("the oracle earns nothing, so every reward counts as more than the oracle's")
            return pay
        tried = [self.player.play(task, a.behaviour) for task in tasks[:2] for a in adversaries(lore)[:60]]
        # one random action again and again, so that some success is seen
        drawn = [(task, action) for task in tasks for action in self.player.random_actions(task, 6)]
        tried += [self.player.play(task, repeat(action)) for task, action in drawn]
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

    def attack(
        self, attackers: Iterable[Adversary], explored: Sequence[ProbeTask], deciding: Sequence[ProbeTask], until: float
    ) -> None:
        """Play each behaviour on a few tasks; where it looks wrong, decide on the others."""
        for adversary in attackers:
            if time.monotonic() > until:
                break
            self.behaviours += 1
            play = lambda tasks, act=adversary.behaviour: [self.player.play(task, act) for task in tasks]  # noqa: E731
            first = play(explored[:SEARCHED])
            if judge(first, self.pay, adversary.blind) is None:
                first += play(explored[SEARCHED:])
                if judge(first, self.pay, adversary.blind) is None:
                    continue
            verdict = judge(play(deciding), self.pay, adversary.blind)
            if verdict is not None:
                self.keep(ProbeFinding(adversary.family, adversary.about, verdict))

    def keep(self, finding: ProbeFinding) -> None:
        before = self.findings.get(finding.family)
        if before is None or finding.verdict.excess > before.verdict.excess:
            self.findings[finding.family] = finding
