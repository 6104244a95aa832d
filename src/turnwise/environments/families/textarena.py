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
from turnwise.environments.base import Environment, text_action, user_message
from turnwise.environments.families.adapter import import_package, split_options, world_seed
from turnwise.errors import SettingError, nearest

OPPONENTS = ("self", "random")
MOVES = re.compile(
    r"[Aa]vailable (?:[Mm]oves|actions)[^:\n]*:\s*(.+)$", re.MULTILINE
)  # the last such line of an observation
MOVE = re.compile(r"\[[^\[\]]+\]")
TURNS = 60


class TextArenaEnvironment(Environment):
    """One match. ``environment`` makes a subclass for each id."""

    max_turns = TURNS
    suggests: ClassVar[Mapping[str, Any]] = {"context": 1024, "max_tokens": 24}
    make: ClassVar[Any]  # returns a new match of the package
    players: ClassVar[int]
    opponent: ClassVar[str] = "self"
    match: Any
    player: int
    seat: int  # the policy's own, where the others are scripted
    observation: str
    done: bool

    def reset(self, seed: int) -> Sequence[Message]:
        number = world_seed(seed, self.split)
        self.rng, self.done, self.turns = random.Random(number), False, 0
        self.match = type(self).make()
        self.match.reset(num_players=self.players, seed=number)
        self.seat = number // 2 % self.players
        self._observe()
        self._scripted_seats()
        return [user_message(self.observation)]

    @property
    def agent(self) -> str:
        """Whose turn it is."""
        return seat_name(self.player)

    def step(self, action: Action) -> Step:
        if self.done:
            return Step([user_message("it is over.")], 0.0, terminated=True)
        self.turns += 1
        mover = self.player
        self._move(action.text.strip()[:500])
        self._scripted_seats()
        if self.done:
            return self._end(mover)
        cut = self.turns >= TURNS
        info = {"success": False} if cut else {}
        return Step(
            [user_message(self.observation)], 0.0, False, cut, info, context=()
        )  # it is all that the seat was told

    def _move(self, text: str) -> None:
        self.done, _ = self.match.step(text)
        if not self.done:
            self._observe()

    def _observe(self) -> None:
        self.player, observation = self.match.get_observation()
        self.observation = str(observation).strip()

    def _scripted_seats(self) -> None:
        while self.opponent != "self" and not self.done and self.player != self.seat:
            self._move(self.rng.choice(legal_moves(self.observation) or ["[pass]"]))

    def _end(self, mover: int) -> Step:
        rewards, facts = self.match.close()
        own = [n for n in rewards if self.opponent == "self" or n == self.seat]
        paid = {seat_name(n): float(rewards[n]) for n in own if n != mover}
        errors = sum(bool(facts.get(n, {}).get("invalid_move")) for n in own)
        first = 0 if self.opponent == "self" else self.seat
        info = {"success": rewards.get(first, 0) > 0, "tool_errors": errors, "paid": paid}
        reason = str(facts.get(mover, {}).get("reason", "it is over."))
        return Step([user_message(reason)], float(rewards.get(mover, 0)), True, False, info)


class ListedMovesEnvironment(TextArenaEnvironment):
    """A game that lists its moves in every observation: any of them imitates a player who knows the rules."""

    def oracle(self) -> Action:
        return self.random_action(self.rng)

    def random_action(self, rng: random.Random) -> Action:
        return text_action(rng.choice(legal_moves(self.observation)))


def seat_name(player: int) -> str:
    return f"player {player}"


def legal_moves(observation: str) -> list[str]:
    """The moves that an observation lists last; empty where the game lists none."""
    lists = MOVES.findall(observation)
    return MOVE.findall(lists[-1]) if lists else []


@cache
def environment(spec: str) -> type[TextArenaEnvironment]:
    """The class of an id; ``players`` where the game allows several numbers, ``opponent=random`` where it lists its moves."""
    name, options = split_options("textarena", spec)
    textarena = import_package("textarena", "textarena", "textarena")
    offered = list(textarena.envs.registration.ENV_REGISTRY)
    if name not in offered:
        raise SettingError(f"TextArena has no game {name!r}; {nearest(name, offered)}")
    opponent, players = str(options.pop("opponent", "self")), options.pop("players", None)
    if opponent not in OPPONENTS:
        raise SettingError(f"textarena:{name} has no opponent {opponent!r}; {nearest(opponent, OPPONENTS)}")

    def make() -> Any:
        return textarena.make(name, **options)

    try:
        count, first = _first_observation(make, players)
    except Exception as fault:  # a word list that cannot be downloaded, a wrong option
        words = " ".join(str(fault).split()) or type(fault).__name__
        raise SettingError(f"textarena:{spec} cannot be made: {words[:300]}") from fault
    listed = bool(legal_moves(first))
    if opponent == "random" and not listed:
        raise SettingError(
            f"textarena:{name} does not list its moves, so a random opponent cannot play; leave opponent out"
        )
    body = {
        "make": staticmethod(make),
        "players": count,
        "opponent": opponent,
        "agents": tuple(map(seat_name, range(count))) if opponent == "self" and count > 1 else (),
        "__doc__": f"{name} of TextArena.",
        "__module__": __name__,
    }
    return type(f"textarena:{spec}", (ListedMovesEnvironment if listed else TextArenaEnvironment,), body)


def _first_observation(make: Any, players: int | None) -> tuple[int, str]:
    """The number of players that a game takes, and what its first player reads."""
    fault: Exception | None = None
    for count in [players] if players else (1, 2, 3, 4):
        match = make()
        try:
            match.reset(num_players=count, seed=0)
            return count, str(match.get_observation()[1])
        except AssertionError as wrong_number:
            fault = wrong_number
    raise fault or ValueError("no number of players fits")
