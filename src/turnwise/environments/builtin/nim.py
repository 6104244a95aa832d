"""Nim by self-play: two heaps, two players alternately take one to three stones from one heap; taking the last stone wins.

One policy plays both, so the rewards of an episode sum to zero: credit per trajectory gives no gradient, credit per agent does.
An episode succeeds if the player with the winning position at the start wins.

Does not know that both players are one model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import Environment, sample_problem, text_action, user_message

MAX_STONES = 3  # per move
HEAPS = {1: (2, 8), 2: (4, 14), 3: (8, 22)}  # smallest and largest heap
PLAYERS = ("first", "second")
SIDES = ("left", "right")
MOVE = re.compile(r"(left|right) ([1-3])")


class Nim(Environment):
    """A move is ``left 2`` or ``right 1``. An illegal move loses. +1 on the winner's last move, −1 on the loser's."""

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
    start: tuple[int, int]
    heaps: list[int]
    moves: int
    lost: int | None  # the player who made an illegal move

    def reset(self, seed: int) -> Sequence[Message]:
        low, high = HEAPS[self.difficulty]
        heaps = sample_problem(lambda rng: (rng.randint(low, high), rng.randint(low, high)), seed, self.split, str)
        self.start, self.heaps, self.moves, self.lost = heaps, list(heaps), 0, None
        return [user_message(self._view())]

    @property
    def agent(self) -> str:
        """The player whose turn it is."""
        return PLAYERS[self.moves % 2]

    def _view(self) -> str:
        return f"{self.agent}: left {self.heaps[0]}, right {self.heaps[1]}."

    def step(self, action: Action) -> Step:
        if self.over:
            return Step([user_message("it is over.")], 0.0, terminated=True)
        match = MOVE.fullmatch(action.text.strip().lower().rstrip("."))
        side, stones = (SIDES.index(match[1]), int(match[2])) if match else (0, MAX_STONES + 1)
        if not 1 <= stones <= min(MAX_STONES, self.heaps[side]):
            self.lost = self.moves % 2
            return self._end("that is no move: you lose.", -1.0, errors=1)
        self.heaps[side] -= stones
        self.moves += 1
        if any(self.heaps):
            return Step([user_message(self._view())], 0.0)
        return self._end("you took the last stone: you win.", 1.0)

    def _end(self, text: str, reward: float, errors: int = 0) -> Step:
        """The last step: the other player gets the negative reward."""
        mover = self.winner if self.lost is None else self.lost
        info = {"success": self.winner == self.favourite, "tool_errors": errors, "paid": {PLAYERS[1 - mover]: -reward}}
        return Step([user_message(text)], reward, terminated=True, info=info)

    @property
    def over(self) -> bool:
        return not any(self.heaps) or self.lost is not None

    @property
    def winner(self) -> int:
        return (self.moves - 1) % 2 if self.lost is None else 1 - self.lost

    @property
    def favourite(self) -> int:
        """The winner under optimal play: the first player, unless the heaps are equal modulo four."""
        return int(_is_losing(*self.start))

    def state_key(self) -> str:
        return f"{self.agent} {self.heaps[0]} {self.heaps[1]}"

    def snapshot(self) -> dict[str, Any]:
        names = ("difficulty", "split", "moves", "lost")
        return {name: getattr(self, name) for name in names} | {"start": list(self.start), "heaps": list(self.heaps)}

    def restore(self, snapshot: Any) -> None:
        for name, value in snapshot.items():
            setattr(self, name, value)
        self.start, self.heaps = tuple(snapshot["start"]), list(snapshot["heaps"])

    def _legal(self) -> list[tuple[int, int]]:
        return [(side, n) for side in (0, 1) for n in range(1, min(MAX_STONES, self.heaps[side]) + 1)]

    def oracle(self) -> Action:
        """Leave heaps that are equal modulo four; if no move does, take the first legal move."""
        left, right = self.heaps
        winning = [(s, n) for s, n in self._legal() if _is_losing(left - n * (s == 0), right - n * (s == 1))]
        return _move_action(*(winning or self._legal())[0])

    def random_action(self, rng: random.Random) -> Action:
        return _move_action(*rng.choice(self._legal()))

    def demonstrate(self, rng: random.Random) -> Action:
        """The oracle's move in one of five turns, otherwise random."""
        return self.oracle() if rng.random() < 0.2 else self.random_action(rng)


def _is_losing(left: int, right: int) -> bool:
    """Whether the player to move loses under optimal play."""
    return left % (MAX_STONES + 1) == right % (MAX_STONES + 1)


def _move_action(side: int, stones: int) -> Action:
    return text_action(f"{SIDES[side]} {stones}")
