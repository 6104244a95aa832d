"""Games of TextArena: one player, or several seats of one policy, or seats held by a random player.

    load("textarena:TicTacToe-v0")
    load("textarena:KuhnPoker-v0,opponent=random")      where the game lists its moves

An observation is all that the seat to move has been told. Rewards are the package's, paid on each seat's last turn. The package
has hundreds of ids; some need word lists that it downloads, and say so when they are made.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import text_action, user_message
from turnwise.environments.families import adapter
from turnwise.environments.families.adapter import SeatedGame
from turnwise.errors import SettingError

OPPONENTS = ("self", "random")
MOVES = re.compile(r"[Aa]vailable (?:[Mm]oves|actions)[^:\n]*:\s*(.+)$", re.MULTILINE)
MOVE = re.compile(r"\[[^\[\]]+\]")
TURNS = 60


class TextArenaEnvironment(SeatedGame):
    """One match. ``environment`` makes a subclass for each id."""

    max_turns = TURNS
    deterministic = True
    suggests: ClassVar[Mapping[str, Any]] = {"context": 1024, "max_tokens": 24}
    make: ClassVar[Any]  # returns a new match of the package
    player: int  # whose turn it is

    def begin(self, seed: int) -> Sequence[Message]:
        number = self.sit_down(seed)
        self.match = type(self).make()
        self.match.reset(num_players=self.seats, seed=number)
        self._observe()
        self._play_scripted_seats()
        return [user_message(self.observation)]

    @property
    def agent(self) -> str:
        """Whose turn it is."""
        return self.seat_name(self.player)

    def act(self, action: Action) -> Step:
        mover = self.player
        if not self._ends_with(action.text.strip()[:500]) and not self._play_scripted_seats():
            return Step([user_message(self.observation)], context=())  # it is all that the seat was told
        rewards, facts = self.match.close()
        # mistakes of a scripted seat are not the policy's
        errors = sum(bool(facts.get(n, {}).get("invalid_move")) for n in rewards if not self.is_scripted(n))
        return self.pay(mover, rewards, str(facts.get(mover, {}).get("reason", "it is over.")), errors)

    def _observe(self) -> None:
        self.player, observation = self.match.get_observation()
        self.observation = str(observation).strip()

    def _ends_with(self, move: str) -> bool:
        """Make a move; whether it ends the match."""
        over, _ = self.match.step(move)
        if not over:
            self._observe()
        return bool(over)

    def _play_scripted_seats(self) -> bool:
        """Until the policy is to move; whether one of them ends the match."""
        while self.is_scripted(self.player):
            if self._ends_with(self.rng.choice(legal_moves(self.observation) or ["[pass]"])):
                return True
        return False


class ListedMovesEnvironment(TextArenaEnvironment):
    """A game that lists its moves in every observation: any of them imitates a player who knows the rules."""

    def oracle(self) -> Action:
        return self.random_action(self.rng)

    def random_action(self, rng: random.Random) -> Action:
        return text_action(rng.choice(legal_moves(self.observation)))


def legal_moves(observation: str) -> list[str]:
    """The moves that an observation lists last; empty where the game lists none."""
    lists = MOVES.findall(observation)
    return MOVE.findall(lists[-1]) if lists else []


@cache
def environment(spec: str) -> type[TextArenaEnvironment]:
    """The class of an id; ``players`` where the game allows several numbers, ``opponent=random`` where it lists its moves."""
    name, options = adapter.split_options("textarena", spec)
    textarena = adapter.import_package("textarena", "textarena")
    adapter.require_offered(name, list(textarena.envs.registration.ENV_REGISTRY), "TextArena has no game")
    opponent, players = str(options.pop("opponent", "self")), options.pop("players", None)
    adapter.require_offered(opponent, OPPONENTS, f"textarena:{name} has no opponent")

    def make() -> Any:
        return textarena.make(name, **options)

    with adapter.refusing(f"textarena:{spec}"):  # a word list that cannot be downloaded, a wrong option
        for seats in [players] if players else (1, 2, 3, 4):
            match = make()
            try:
                match.reset(num_players=seats, seed=0)
                first = str(match.get_observation()[1])
                break
            except AssertionError:  # the game is for another number of players
                if seats == (players or 4):
                    raise
    base = ListedMovesEnvironment if legal_moves(first) else TextArenaEnvironment
    if opponent == "random" and base is TextArenaEnvironment:
        raise SettingError(f"textarena:{name} lists no moves, so a random opponent cannot play; leave opponent out")
    agents = tuple(map(base.seat_name, range(seats))) if opponent == "self" and seats > 1 else ()
    match = {"make": staticmethod(make), "seats": seats, "opponent": opponent, "agents": agents}
    return adapter.member_class("textarena", spec, base, f"{name} of TextArena.", **match)
