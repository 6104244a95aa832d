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
from turnwise.environments.base import LimitedEpisode, plain_words, sample_problem, text_action, user_message

MAX_STONES = 3  # per move
HEAPS = {1: (2, 8), 2: (4, 14), 3: (8, 22)}  # smallest and largest heap
PLAYERS = ("first", "second")
SIDES = ("left", "right")
MOVE = re.compile(r"(left|right) ([1-3])")


class Nim(LimitedEpisode):
    """A move is ``left 2`` or ``right 1``. An illegal move loses. +1 on the winner's last move, −1 on the loser's."""

    difficulties = (1, 2, 3)
    max_turns = 2 * HEAPS[3][1]
    inline = True
    oracle_share = 0.2
    suggests: ClassVar[Mapping[str, Any]] = {
        "difficulty": (1,), "history": 1, "context": 96, "max_tokens": 8, "hidden": 128, "copying": True,
        "cold_steps": 120, "cold_batch": 24,
    }  # fmt: skip
    agents: ClassVar[tuple[str, ...]] = PLAYERS
    deterministic = True

    def begin(self, seed: int) -> Sequence[Message]:
        low, high = HEAPS[self.difficulty]
        self.start = sample_problem(lambda rng: (rng.randint(low, high), rng.randint(low, high)), seed, self.split)
        self.heaps, self.moves, self.winner = list(self.start), 0, -1  # nobody until the end
        return [user_message(self._view())]

    @property
    def agent(self) -> str:
        """The player whose turn it is."""
        return PLAYERS[self.moves % 2]

    def _view(self) -> str:
        return f"{self.agent}: left {self.heaps[0]}, right {self.heaps[1]}."

    def act(self, action: Action) -> Step:
        mover, match = self.moves % 2, MOVE.fullmatch(plain_words(action.text))
        # a text that is no move counts as one stone too many, which is never legal
        side, stones = (SIDES.index(match[1]), int(match[2])) if match else (0, MAX_STONES + 1)
        if legal := (side, stones) in self._legal():
            self.heaps[side] -= stones
            self.moves += 1
            if any(self.heaps):
                return Step([user_message(self._view())])
        self.winner = mover if legal else 1 - mover
        reward, text = (1.0, "you took the last stone: you win.") if legal else (-1.0, "that is no move: you lose.")
        info = {"success": self.winner == self.favourite, "tool_errors": int(not legal)}
        return Step([user_message(text)], reward, True, info=info | {"paid": {PLAYERS[1 - mover]: -reward}})

    @property
    def favourite(self) -> int:
        """The winner under optimal play: the first player, unless the heaps are equal modulo four."""
        return int(_is_losing(*self.start))

    def state_key(self) -> str:
        return f"{self.agent} {self.heaps[0]} {self.heaps[1]}"

    def _legal(self) -> list[tuple[int, int]]:
        return [(side, n) for side in (0, 1) for n in range(1, min(MAX_STONES, self.heaps[side]) + 1)]

    def oracle(self) -> Action:
        """Leave heaps that are equal modulo four; if no move does, take the first legal move."""
        left, right = self.heaps
        winning = [(s, n) for s, n in self._legal() if _is_losing(left - n * (s == 0), right - n * (s == 1))]
        return _move_action(*(winning or self._legal())[0])

    def random_action(self, rng: random.Random) -> Action:
        return _move_action(*rng.choice(self._legal()))


def _is_losing(left: int, right: int) -> bool:
    """Whether the player to move loses under optimal play."""
    return left % (MAX_STONES + 1) == right % (MAX_STONES + 1)


def _move_action(side: int, stones: int) -> Action:
    return text_action(f"{SIDES[side]} {stones}")
