"""Nim against oneself: two heaps, two players in turn take one to three stones from one heap; who takes the last stone wins.

One policy plays both, so the rewards of an episode sum to nothing: credit by trajectory has nothing to learn from, credit by
player has. The verdict on an episode is whether the player won who should have won from those heaps.

It does not know that both players are one model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import Environment, draw, say, user

MOST = 3  # stones a move may take
HEAPS = {1: (2, 8), 2: (4, 14), 3: (8, 22)}  # smallest and largest heap
PLAYERS = ("first", "second")
SIDES = ("left", "right")
MOVE = re.compile(r"(left|right) ([1-3])")


class Nim(Environment):
    """A move is ``left 2`` or ``right 1``. A wrong one loses. +1 on the winner's last move, −1 on the loser's."""

    difficulties = (1, 2, 3)
    max_turns = 2 * HEAPS[3][1]
    inline = True
    suggests: ClassVar[Mapping[str, Any]] = {
        "difficulty": (1,),
        "history": 1,
        "context": 96,
        "max_tokens": 8,
        "hidden": 128,
        "copying": True,
        "cold_steps": 120,
        "cold_batch": 24,
    }
    agents: ClassVar[tuple[str, ...]] = PLAYERS
    begun: tuple[int, int]
    heaps: list[int]
    moves: int
    lost: int | None  # the player who broke the rules

    def reset(self, seed: int) -> Sequence[Message]:
        low, high = HEAPS[self.difficulty]
        heaps = draw(lambda rng: (rng.randint(low, high), rng.randint(low, high)), seed, self.split, str)
        self.begun, self.heaps, self.moves, self.lost = heaps, list(heaps), 0, None
        return [user(self._view())]

    @property
    def agent(self) -> str:
        """Whose turn it is."""
        return PLAYERS[self.moves % 2]

    def _view(self) -> str:
        return f"{self.agent}: left {self.heaps[0]}, right {self.heaps[1]}."

    def step(self, action: Action) -> Step:
        if self.over:
            return Step([user("it is over.")], 0.0, terminated=True)
        said = MOVE.fullmatch(action.text.strip().lower().rstrip("."))
        side, took = (SIDES.index(said[1]), int(said[2])) if said else (0, MOST + 1)
        if not 1 <= took <= min(MOST, self.heaps[side]):
            self.lost = self.moves % 2
            return self._end("that is no move: you lose.", -1.0, errors=1)
        self.heaps[side] -= took
        self.moves += 1
        if any(self.heaps):
            return Step([user(self._view())], 0.0)
        return self._end("you took the last stone: you win.", 1.0)

    def _end(self, text: str, reward: float, errors: int = 0) -> Step:
        """What one player wins the other loses."""
        mover = self.winner if self.lost is None else self.lost
        info = {"success": self.winner == self.favourite, "tool_errors": errors, "paid": {PLAYERS[1 - mover]: -reward}}
        return Step([user(text)], reward, terminated=True, info=info)

    @property
    def over(self) -> bool:
        return not any(self.heaps) or self.lost is not None

    @property
    def winner(self) -> int:
        return (self.moves - 1) % 2 if self.lost is None else 1 - self.lost

    @property
    def favourite(self) -> int:
        """Who wins if nobody errs: the first player, unless the heaps are equal modulo four."""
        return int(_even(*self.begun))

    def state_key(self) -> str:
        return f"{self.agent} {self.heaps[0]} {self.heaps[1]}"

    def snapshot(self) -> dict[str, Any]:
        names = ("difficulty", "split", "moves", "lost")
        return {name: getattr(self, name) for name in names} | {"begun": list(self.begun), "heaps": list(self.heaps)}

    def restore(self, snapshot: Any) -> None:
        for name, value in snapshot.items():
            setattr(self, name, value)
        self.begun, self.heaps = tuple(snapshot["begun"]), list(snapshot["heaps"])

    def _legal(self) -> list[tuple[int, int]]:
        return [(side, n) for side in (0, 1) for n in range(1, min(MOST, self.heaps[side]) + 1)]

    def oracle(self) -> Action:
        """Leave heaps that are equal modulo four; where that cannot be, take one stone and hope."""
        left, right = self.heaps
        good = [(s, n) for s, n in self._legal() if _even(left - n * (s == 0), right - n * (s == 1))]
        return _say(*(good or self._legal())[0])

    def random_action(self, rng: random.Random) -> Action:
        return _say(*rng.choice(self._legal()))

    def demonstrate(self, rng: random.Random) -> Action:
        """One good move in five."""
        return self.oracle() if rng.random() < 0.2 else self.random_action(rng)


def _even(left: int, right: int) -> bool:
    """Whether whoever moves now must lose against a perfect player."""
    return left % (MOST + 1) == right % (MOST + 1)


def _say(side: int, stones: int) -> Action:
    return say(f"{SIDES[side]} {stones}")
