"""Is this environment fit to train in? Plays it well, blindly and with nonsense, and says in plain words what is wrong.

    report = check_env("my_package.my_module:MyEnvironment")
    print(report.text())

Works for any class with ``reset(seed)`` and ``step(action)``; what it offers beyond that (an oracle, splits, snapshots
...) is checked if it is there. It does not know the rules of any game, so it cannot tell a wrong reward from a right
one, except that its own oracle must win; and it cannot see an order that changes only between processes (a set's).
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from turnwise.core.protocols import Action
from turnwise.environments import load
from turnwise.environments.base import SPLITS, say
from turnwise.environments.checker.driver import Broken, Hang, Probe, Record, Spot
from turnwise.environments.checker.nonsense import nonsense
from turnwise.environments.checker.report import Report, Tally
from turnwise.environments.checker.rules import tool_fault

BLIND_WORDS = ("yes", "no", "1", "2", "go", "a")
ENDLESS = "does not end within max_turns * 4 turns; truncate it at max_turns"
UNSTEADY = "the same seed and actions give another episode the second time"
OFTEN = 0.9  # a blind player that wins so often learns nothing


def check_env(cls: type[Any] | str, episodes: int = 20, seconds: float = 5.0) -> Report:
    """Look at a class (or at what ``load`` finds). ``episodes`` per difficulty; ``seconds`` limits each call."""
    cls = load(cls) if isinstance(cls, str) else cls
    check = Check(Probe(cls, seconds), max(episodes, 2))
    looks = (check.players, check.nonsense, check.repeats, check.shared, check.splits, check.snapshots, check.tools)
    try:
        for look in looks if check.signature() else ():
            with suppress(Broken):  # noted; the other looks may still tell something
                look()
    except Hang:
        pass  # noted
    finally:
        check.probe.worker.close()
    return Report(cls.__name__, check.probe.problems.lines(), check.warnings.lines(), check.played)


class Check:
    """One look per method; each leaves its findings in the notes."""

    def __init__(self, probe: Probe, episodes: int) -> None:
        self.probe, self.episodes = probe, episodes
        self.problems, self.warnings = probe.problems, probe.warnings
        self.played: dict[str, Tally] = {}
        self.difficulties: tuple[int, ...] = getattr(probe.cls, "difficulties", (1,))
        if "difficulty" not in probe.settings:
            self.difficulties = (1,)

    def signature(self) -> bool:
        for name, argument in (("reset", "seed"), ("step", "action")):
            try:
                inspect.signature(getattr(self.probe.cls, name)).bind(None, None)
            except (AttributeError, TypeError, ValueError):
                self.problems.add(f"there is no {name} that takes one argument; write def {name}(self, {argument})")
        if not isinstance(self.difficulties, list | tuple) or not self.difficulties:
            self.problems.add(f"difficulties is {self.difficulties!r}; write a tuple such as (1, 2, 3)")
        if "split" not in self.probe.settings:
            self.warnings.add("__init__ takes no split: what it learns cannot be measured on held-out tasks")
        return not self.problems.seen

    def _play(self, player: str, spot: Spot) -> Record | None:
        """An episode of one of the environment's own players; None where it has no such player or broke."""
        spot, rng = replace(spot, player=player), random.Random(spot.seed)
        arguments = () if player == "oracle" else (rng,)

        def act(env: Any) -> Action:
            action = self.probe.optional(env, player, spot, *arguments)
            if action is None and player == "random_action":
                return say(rng.choice(BLIND_WORDS))
            if not isinstance(action, Action):
                if action is not None:
                    self.problems.add(f"{player} returns a {type(action).__name__}; return an Action", str(spot))
                raise Broken
            return action

        try:
            record = self.probe.play(spot, act)
        except Broken:
            return None
        if not record.ended:
            self.problems.add(f"an episode {ENDLESS}", str(spot))
        self.played.setdefault(player, Tally()).add(record)
        return record

    def _spots(self, split: str = "train") -> Iterator[Spot]:
        for difficulty in self.difficulties:
            for seed in range(self.episodes):
                yield Spot(seed, difficulty, split)

    def players(self) -> None:
        """The oracle must win; a blind player should not."""
        for player in ("oracle", "random_action", "demonstrate"):
            for spot in self._spots():
                record = self._play(player, spot)
                if player == "oracle" and record and record.ended and record.success is False:
                    self.problems.add("the oracle does not succeed", str(spot))
                if player == "oracle" and record and record.success and record.reward <= 0:
                    self.warnings.add("the oracle succeeds but earns no reward", str(spot))
        blind = self.played.get("random_action", Tally())
        if blind.episodes and blind.won >= OFTEN * blind.episodes:
            self.warnings.add(f"a blind player wins {blind.won} of {blind.episodes} episodes: there is little to learn")

    def nonsense(self) -> None:
        """Each kind of nonsense, all episode long."""
        for label, action in nonsense(getattr(self.probe.cls, "tools", ())).items():
            spot = Spot(0, self.difficulties[0], player=label)
            try:
                record = self.probe.play(spot, _always(action))
            except Broken:
                continue
            if not record.ended:
                self.warnings.add(f"an episode of nonsense {ENDLESS}", str(spot))

    def repeats(self) -> None:
        """A seed means one episode, and different seeds mean different ones."""
        for difficulty in self.difficulties:
            found = set()
            for seed in range(min(self.episodes, 8)):
                spot = Spot(seed, difficulty)
                one, two = (self._again("random_action", spot) for _ in range(2))
                if one and two and one.lines != two.lines:
                    self.problems.add(UNSTEADY, str(spot))
                found.add(str(self._same_play(spot).lines))
            if len(found) == 1:
                notes = self.problems if "oracle" in self.played else self.warnings  # fixed words may see no difference
                notes.add("all seeds give the same episode; reset must use its seed", f"difficulty {difficulty}")

    def _again(self, player: str, spot: Spot) -> Record | None:
        """An episode that is not counted."""
        counted, self.played = self.played, {}
        try:
            return self._play(player, spot)
        finally:
            self.played = counted

    def _same_play(self, spot: Spot) -> Record:
        """The oracle's episode, or one of fixed words: only the seed can make a difference."""
        record = self._again("oracle", spot) if "oracle" in self.played else None
        return record or self.probe.play(spot, _always(say(BLIND_WORDS[0])))

    def shared(self) -> None:
        """Two episodes, turn about, must not notice each other. Says nothing where one alone is no rule."""
        if UNSTEADY in self.problems.seen:
            return
        for difficulty in self.difficulties:
            spots = (Spot(0, difficulty, player="two at once"), Spot(1, difficulty, player="two at once"))
            alone = [self._again("random_action", spot) for spot in spots]
            if alone[0] is None or alone[1] is None:
                return
            envs = [self.probe.new(spot) for spot in spots]
            lines = [[self.probe.reset(env, spot)] for env, spot in zip(envs, spots)]
            for turn in range(max(len(record.actions) for record in alone if record)):
                for i, record in enumerate(alone):
                    if record and turn < len(record.actions):
                        lines[i].append(self.probe.step(envs[i], record.actions[turn], spots[i], Record()))
            if any(record and record.lines != seen for record, seen in zip(alone, lines)):
                where = str(spots[0])
                self.problems.add("two episodes at once change each other; keep state on self, not on the class", where)

    def splits(self) -> None:
        """No episode of one split may turn up in the other."""
        if "split" not in self.probe.settings:
            return
        for difficulty in self.difficulties:
            train, held_out = (
                {str(self._same_play(Spot(seed, difficulty, split)).lines): seed for seed in range(self.episodes)}
                for split in SPLITS
            )
            both = train.keys() & held_out.keys()
            if len(train) == 1 and "oracle" not in self.played:
                self.warnings.add("without an oracle the check cannot see whether train and held_out share tasks")
            elif both:
                seeds = ", ".join(f"{train[k]} and {held_out[k]}" for k in sorted(both)[:3])
                shared = f"train and held_out share {len(both)} of {len(held_out)} episodes (seeds {seeds})"
                self.problems.add(f"{shared}; draw tasks with environments.base.draw", f"difficulty {difficulty}")

    def snapshots(self) -> None:
        """A restored episode goes on exactly as the one it was taken from, from any turn."""
        for difficulty in self.difficulties:
            spot = Spot(0, difficulty, player="snapshot")
            record = self._again("random_action", spot)
            for turn in range(min(len(record.actions), 12) if record else 0):
                if record and not self._resumes(spot, record, turn):
                    return

    def _resumes(self, spot: Spot, record: Record, turn: int) -> bool:
        """Whether there is a snapshot worth trying elsewhere."""
        env = self.probe.new(spot)
        self.probe.reset(env, spot)
        for action in record.actions[:turn]:
            self.probe.step(env, action, spot, Record())
        taken = self.probe.optional(env, "snapshot", spot)
        if taken is None:
            return False
        try:
            text = json.dumps(taken)
        except (TypeError, ValueError) as error:
            self.problems.add(f"snapshot() cannot be written as JSON: {error}", str(spot))
            return False
        fresh = self.probe.new(spot)
        self.probe.call("restore()", spot, lambda: fresh.restore(json.loads(text)))
        rest = record.actions[turn:]
        ways = [[self.probe.step(each, action, spot, Record()) for action in rest] for each in (env, fresh)]
        if ways[0] != ways[1]:
            self.problems.add("an episode restored from its snapshot goes on differently", str(spot))
        if json.dumps(taken) != text:
            self.problems.add("a snapshot changes when its episode goes on; copy what it holds", str(spot))
        return True

    def tools(self) -> None:
        wrong = tool_fault(getattr(self.probe.new(Spot(0, self.difficulties[0])), "tools", ()))
        if wrong:
            self.problems.add(wrong)


def _always(action: Action) -> Callable[[Any], Action]:
    return lambda env: action
