"""Key and door: a text grid world of two rooms. Take the key, open the door, reach the goal.

The only reward is 1 at the goal, some 10 to 30 turns away, which makes credit assignment long-range. The agent observes its four
neighbour cells and the objects in its own room. The state is small; ``state_key`` and ``snapshot`` contain all of it.
Does not know what the agent remembers: each observation is self-contained.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import LimitedEpisode, plain_words, sample_problem, text_action, user_message

Cell = tuple[int, int]  # column, row; row 0 is the north edge

MOVES: dict[str, Cell] = {"north": (0, -1), "east": (1, 0), "south": (0, 1), "west": (-1, 0)}
WORDS = (*MOVES, "take", "open")
PROMPT = "TAKE the KEY, OPEN the DOOR beside you, reach the GOAL. say NORTH, EAST, SOUTH, WEST, TAKE or OPEN"


@dataclass(frozen=True, slots=True)
class GridSize:
    """The grid of a difficulty. ``oracle`` bounds the length of the shortest solution in turns."""

    room: int  # columns of each of the two rooms
    rows: int
    pillars: int  # blocked cells
    oracle: tuple[int, int]
    turns: int


SIZES = {
    1: GridSize(room=3, rows=4, pillars=0, oracle=(10, 14), turns=28),
    2: GridSize(room=5, rows=5, pillars=4, oracle=(15, 21), turns=42),
    3: GridSize(room=7, rows=6, pillars=10, oracle=(22, 30), turns=60),
}


@dataclass(frozen=True, slots=True)
class GridLayout:
    """The part of the state that is constant within an episode."""

    start: Cell
    key: Cell
    door: Cell
    goal: Cell
    floor: frozenset[Cell]  # walkable cells, including the doorway

    @property
    def content(self) -> str:
        """The positions that define the problem; pillars alone do not make a new one."""
        return f"{self.start} {self.key} {self.door} {self.goal}"


class GridState(NamedTuple):
    """The part of the state that actions change."""

    at: Cell
    held: bool = False
    opened: bool = False


def transition(layout: GridLayout, state: GridState, word: str) -> GridState:
    """The next state; the same state if the action has no effect."""
    if word == "take":
        return state._replace(held=True) if state.at == layout.key else state
    if word == "open":
        return state._replace(opened=True) if state.held and _distance(state.at, layout.door) == 1 else state
    to = _add(state.at, MOVES[word])
    locked = to == layout.door and not state.opened
    return state if locked or to not in layout.floor else state._replace(at=to)


@lru_cache(maxsize=256)  # a few hundred states each
def distances(layout: GridLayout) -> dict[GridState, int]:
    """The number of turns to the goal from every reachable state: a forward search for the states, a backward one for the
    distances."""
    predecessors: dict[GridState, list[GridState]] = {GridState(layout.start): []}
    queue = deque(predecessors)
    while queue:
        state = queue.popleft()
        for word in WORDS:
            successor = transition(layout, state, word)
            if successor not in predecessors:
                predecessors[successor] = []
                queue.append(successor)
            predecessors[successor].append(state)
    # backwards from the goal: one search gives the distance of every state
    distance = {state: 0 for state in predecessors if state.at == layout.goal}
    queue = deque(distance)
    while queue:
        state = queue.popleft()
        for predecessor in predecessors[state]:
            if predecessor not in distance:
                distance[predecessor] = distance[state] + 1
                queue.append(predecessor)
    return distance


@lru_cache(maxsize=1024)
def layout_of(difficulty: int, split: str, seed: int) -> GridLayout:
    """Two rooms of which the length of the shortest solution is within the bounds of the difficulty. Cached, because all episodes
    of a group share one seed."""
    size = SIZES[difficulty]
    near, far = ([(c + x, r) for c in range(size.room) for r in range(size.rows)] for x in (0, size.room + 1))

    def empty_rooms(rng: random.Random) -> GridLayout:
        while True:
            door = (size.room, rng.randrange(size.rows))
            (start, key), goal = rng.sample(near, 2), rng.choice(far)
            # one turn to take, one to open; without pillars the others are walking distance
            turns = 2 + _distance(start, key) + _distance(key, door) + _distance(door, goal)
            if size.oracle[0] <= turns <= size.oracle[1]:
                return GridLayout(start, key, door, goal, frozenset({door, *near, *far}))

    empty = sample_problem(empty_rooms, seed, split, lambda layout: layout.content)
    free = sorted(empty.floor - {empty.start, empty.key, empty.door, empty.goal})
    rng = random.Random(f"pillars/{split}/{seed}")  # its own: pillars alone do not make a new problem
    while True:
        layout = replace(empty, floor=empty.floor - {*rng.sample(free, size.pillars)})
        if distances(layout).get(GridState(empty.start), size.turns) <= size.oracle[1]:
            return layout


class KeyDoor(LimitedEpisode):
    """Actions are single words; observations describe the surroundings."""

    difficulties = (1, 2, 3)
    limits: ClassVar[Mapping[int, int]] = {difficulty: size.turns for difficulty, size in SIZES.items()}
    max_turns = limits[3]
    inline = True
    oracle_share = 0.42  # somewhat less than half of the demonstrations reach the goal
    suggests: ClassVar[Mapping[str, Any]] = {
        "difficulty": (1,), "history": 1, "context": 96, "max_tokens": 4, "cold_batch": 8, "cold_steps": 60,
    }  # fmt: skip
    symbols: ClassVar[str] = r"(?:, |[.] | )?(?:north|east|south|west|here|key|door|goal|wall|held|locked|open|take) ?"
    deterministic = True

    def begin(self, seed: int) -> Sequence[Message]:
        self.layout = layout_of(self.difficulty, self.split, seed)
        self.state = GridState(self.layout.start)
        return [{"role": "system", "content": PROMPT}, user_message(view(self.layout, self.state))]

    def act(self, action: Action) -> Step:
        word, before, complaint = plain_words(action.text), self.state, "that is no move. "
        if word in WORDS:
            self.state = transition(self.layout, before, word)
            complaint = "you cannot. " if self.state == before else ""
        arrived = self.state.at == self.layout.goal
        info = {"tool_errors": int(bool(complaint)), **({"success": True} if arrived else {})}
        reply = user_message(complaint + view(self.layout, self.state))
        return Step([reply], float(arrived), terminated=arrived, info=info)

    def hint(self) -> str:
        """The direction of the goal, which is not visible from the first room."""
        return f"from the door the goal is {_bearing(self.layout.door, self.layout.goal)}"

    def hints(self) -> Sequence[str]:
        """The order of things, the direction of the goal, the moves of the shortest way."""
        state, moves = self.state, list[str]()
        while state.at != self.layout.goal:
            moves.append(_best_word(self.layout, state))
            state = transition(self.layout, state, moves[-1])
        return ("first the key, then the door, then the goal", self.hint(), f"the moves are {' '.join(moves)}")

    def turns_to_solve(self) -> float:
        return float(distances(self.layout)[self.state])

    def state_key(self) -> str:
        """The agent's position, key and door; not the turn, so that a state visited twice has one key."""
        (column, row), held, opened = self.state
        return f"{column} {row} {'key' if held else '-'} {'open' if opened else '-'}"

    def oracle(self) -> Action:
        return text_action(_best_word(self.layout, self.state))

    def random_action(self, rng: random.Random) -> Action:
        return text_action(rng.choice(WORDS))


def _best_word(layout: GridLayout, state: GridState) -> str:
    distance = distances(layout)
    return min(WORDS, key=lambda word: distance[transition(layout, state, word)])


def view(layout: GridLayout, state: GridState) -> str:
    """The observation: objects in the agent's room, the held key, and blocked directions."""
    things = ["key held"] if state.held else []
    if state.at[0] <= layout.door[0]:
        things += [] if state.held else [f"key {_bearing(state.at, layout.key)}"]
        things.append(f"door {_bearing(state.at, layout.door)}, {'open' if state.opened else 'locked'}")
    if state.at[0] >= layout.door[0]:
        things.append(f"goal {_bearing(state.at, layout.goal)}")
    # pillars and walls look the same
    walls = [word for word, way in MOVES.items() if _add(state.at, way) not in layout.floor]
    things += [f"wall {' '.join(walls)}"] if walls else []
    return ". ".join(things)


def _bearing(here: Cell, there: Cell) -> str:
    """``2 north 1 east``; ``here`` at distance 0."""
    east, south = there[0] - here[0], there[1] - here[1]
    parts = [f"{abs(south)} {'south' if south > 0 else 'north'}"] if south else []
    parts += [f"{abs(east)} {'east' if east > 0 else 'west'}"] if east else []
    return " ".join(parts) or "here"


def _add(cell: Cell, way: Cell) -> Cell:
    return cell[0] + way[0], cell[1] + way[1]


def _distance(one: Cell, other: Cell) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])
