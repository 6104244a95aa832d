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
from turnwise.environments.base import Environment, sample_problem, text_action, user_message

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
    distance = {state: 0 for state in predecessors if state.at == layout.goal}
    queue = deque(distance)
    while queue:
        state = queue.popleft()
        for predecessor in predecessors[state]:
            if predecessor not in distance:
                distance[predecessor] = distance[state] + 1
                queue.append(predecessor)
    return distance


distances_of = lru_cache(maxsize=256)(distances)  # a few hundred states each


@lru_cache(maxsize=1024)
def layout_of(difficulty: int, split: str, seed: int) -> GridLayout:
    """Cached, because all episodes of a group share one seed."""
    size = SIZES[difficulty]
    empty = sample_problem(lambda rng: _empty_rooms(rng, size), seed, split, lambda layout: layout.content)
    return _with_pillars(empty, size, random.Random(f"pillars/{split}/{seed}"))


def _empty_rooms(rng: random.Random, size: GridSize) -> GridLayout:
    """Two empty rooms, resampled until the length of the shortest solution is within the bounds of the difficulty."""
    near, far = ([(c + x, r) for c in range(size.room) for r in range(size.rows)] for x in (0, size.room + 1))
    while True:
        door = (size.room, rng.randrange(size.rows))
        (start, key), goal = rng.sample(near, 2), rng.choice(far)
        # one turn to take, one to open; without pillars the others are walking distance
        turns = 2 + _distance(start, key) + _distance(key, door) + _distance(door, goal)
        if size.oracle[0] <= turns <= size.oracle[1]:
            return GridLayout(start, key, door, goal, frozenset({door, *near, *far}))


def _with_pillars(empty: GridLayout, size: GridSize, rng: random.Random) -> GridLayout:
    """The layout with random pillars, resampled until the solution is short enough."""
    free = sorted(empty.floor - {empty.start, empty.key, empty.door, empty.goal})
    while True:
        layout = replace(empty, floor=empty.floor - {*rng.sample(free, size.pillars)})
        if distances_of(layout).get(GridState(empty.start), size.turns) <= size.oracle[1]:
            return layout


class KeyDoor(Environment):
    """Actions are single words; observations describe the surroundings."""

    difficulties = (1, 2, 3)
    max_turns = SIZES[3].turns
    inline = True
    suggests: ClassVar[Mapping[str, Any]] = {
        "difficulty": (1,),
        "history": 1,
        "context": 96,
        "max_tokens": 4,
        "cold_batch": 8,
        "cold_steps": 60,
    }
    symbols: ClassVar[str] = r"(?:, |[.] | )?(?:north|east|south|west|here|key|door|goal|wall|held|locked|open|take) ?"
    seed: int
    turns: int
    layout: GridLayout
    state: GridState

    def __init__(self, *, difficulty: int = 1, split: str = "train") -> None:
        super().__init__(difficulty=difficulty, split=split)
        self.max_turns = SIZES[difficulty].turns

    def reset(self, seed: int) -> Sequence[Message]:
        self._begin(seed)
        return [{"role": "system", "content": PROMPT}, user_message(view(self.layout, self.state))]

    def step(self, action: Action) -> Step:
        if self._is_over():
            return self._step("it is over.", 0.0, 0)
        self.turns += 1
        word = action.text.strip().lower().rstrip(".")
        if word not in WORDS:
            return self._step(f"that is no move. {view(self.layout, self.state)}", 0.0, 1)
        before, self.state = self.state, transition(self.layout, self.state, word)
        if self.state == before:
            return self._step(f"you cannot. {view(self.layout, self.state)}", 0.0, 1)
        return self._step(view(self.layout, self.state), float(self._succeeded()), 0)

    def _step(self, text: str, reward: float, errors: int) -> Step:
        success, over = self._succeeded(), self._is_over()
        info: dict[str, Any] = {"tool_errors": errors} | ({"success": success} if over else {})
        return Step([user_message(text)], reward, terminated=success, truncated=over and not success, info=info)

    def _succeeded(self) -> bool:
        return self.state.at == self.layout.goal

    def _is_over(self) -> bool:
        return self._succeeded() or self.turns >= self.max_turns

    def hint(self) -> str:
        """The direction of the goal, which is not visible from the first room."""
        return f"from the door the goal is {_bearing(self.layout.door, self.layout.goal)}"

    def hints(self) -> Sequence[str]:
        """The order of things, the direction of the goal, the moves of the shortest way."""
        return (
            "first the key, then the door, then the goal",
            self.hint(),
            f"the moves are {' '.join(self._shortest_way())}",
        )

    def turns_to_solve(self) -> float:
        return float(distances_of(self.layout)[self.state])

    def _shortest_way(self) -> list[str]:
        """The moves of the scripted policy from here to the goal."""
        distance, state, moves = distances_of(self.layout), self.state, list[str]()
        while state.at != self.layout.goal:
            moves.append(min(WORDS, key=lambda word: distance[transition(self.layout, state, word)]))
            state = transition(self.layout, state, moves[-1])
        return moves

    def state_key(self) -> str:
        """The agent's position, key and door; not the turn, so that a state visited twice has one key."""
        at, (held, opened) = self.state.at, (self.state.held, self.state.opened)
        return f"{at[0]} {at[1]} {'key' if held else '-'} {'open' if opened else '-'}"

    def snapshot(self) -> dict[str, Any]:
        state = self.state
        return {
            "difficulty": self.difficulty,
            "split": self.split,
            "seed": self.seed,
            "turns": self.turns,
            "at": list(state.at),
            "held": state.held,
            "opened": state.opened,
        }

    def restore(self, snapshot: Any) -> None:
        self.difficulty, self.split = snapshot["difficulty"], snapshot["split"]
        self.max_turns = SIZES[self.difficulty].turns
        self._begin(snapshot["seed"])
        column, row = snapshot["at"]
        self.state = GridState((column, row), snapshot["held"], snapshot["opened"])
        self.turns = snapshot["turns"]

    def _begin(self, seed: int) -> None:
        self.seed, self.turns = seed, 0
        self.layout = layout_of(self.difficulty, self.split, seed)
        self.state = GridState(self.layout.start)

    def oracle(self) -> Action:
        distance = distances_of(self.layout)
        return text_action(min(WORDS, key=lambda word: distance[transition(self.layout, self.state, word)]))

    def random_action(self, rng: random.Random) -> Action:
        return text_action(rng.choice(WORDS))

    def demonstrate(self, rng: random.Random) -> Action:
        """The oracle in 42 % of the turns, otherwise random: somewhat less than half of the episodes reach the goal."""
        return self.oracle() if rng.random() < 0.42 else self.random_action(rng)


def view(layout: GridLayout, state: GridState) -> str:
    """The observation: objects in the agent's room, the held key, and blocked directions."""
    things = ["key held"] if state.held else []
    if state.at[0] <= layout.door[0]:
        things += [] if state.held else [f"key {_bearing(state.at, layout.key)}"]
        things.append(f"door {_bearing(state.at, layout.door)}, {'open' if state.opened else 'locked'}")
    if state.at[0] >= layout.door[0]:
        things.append(f"goal {_bearing(state.at, layout.goal)}")
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
