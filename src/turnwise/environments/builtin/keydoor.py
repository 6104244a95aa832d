"""Key and door: a text grid of two rooms. Take the key, open the door, walk to the goal.

The only reward is 1 at the goal, some 10 to 30 turns away, so credit has to travel far. The agent sees its four
neighbours and what stands in its own room. The state is small and exact; ``state_key`` and ``snapshot`` hold it all.

It does not know how the agent remembers: each observation stands alone.
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
from turnwise.environments.base import Environment, draw, say, user

Cell = tuple[int, int]  # column, row; row 0 is the north edge

MOVES: dict[str, Cell] = {"north": (0, -1), "east": (1, 0), "south": (0, 1), "west": (-1, 0)}
WORDS = (*MOVES, "take", "open")
PROMPT = "TAKE the KEY, OPEN the DOOR beside you, reach the GOAL. say NORTH, EAST, SOUTH, WEST, TAKE or OPEN"


@dataclass(frozen=True, slots=True)
class Size:
    """How large a difficulty is. ``oracle`` bounds the shortest solution, in turns."""

    room: int  # columns of each of the two rooms
    rows: int
    pillars: int  # blocked cells
    oracle: tuple[int, int]
    turns: int


SIZES = {
    1: Size(room=3, rows=4, pillars=0, oracle=(10, 14), turns=28),
    2: Size(room=5, rows=5, pillars=4, oracle=(15, 21), turns=42),
    3: Size(room=7, rows=6, pillars=10, oracle=(22, 30), turns=60),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """What never changes in an episode."""

    start: Cell
    key: Cell
    door: Cell
    goal: Cell
    floor: frozenset[Cell]  # every cell one can stand on, the doorway among them

    @property
    def content(self) -> str:
        """What a good player gets to see of it; pillars alone do not make a new problem."""
        return f"{self.start} {self.key} {self.door} {self.goal}"


class State(NamedTuple):
    """What changes."""

    at: Cell
    held: bool = False
    opened: bool = False


def move(layout: Layout, state: State, word: str) -> State:
    """The next state; the same one where the word does nothing."""
    if word == "take":
        return state._replace(held=True) if state.at == layout.key else state
    if word == "open":
        return state._replace(opened=True) if state.held and _apart(state.at, layout.door) == 1 else state
    to = _plus(state.at, MOVES[word])
    shut = to == layout.door and not state.opened
    return state if shut or to not in layout.floor else state._replace(at=to)


def distances(layout: Layout) -> dict[State, int]:
    """Turns to the goal from every state that can be met: forwards to find the states, backwards to count."""
    before: dict[State, list[State]] = {State(layout.start): []}
    queue = deque(before)
    while queue:
        here = queue.popleft()
        for word in WORDS:
            then = move(layout, here, word)
            if then not in before:
                before[then] = []
                queue.append(then)
            before[then].append(here)
    far = {state: 0 for state in before if state.at == layout.goal}
    queue = deque(far)
    while queue:
        here = queue.popleft()
        for state in before[here]:
            if state not in far:
                far[state] = far[here] + 1
                queue.append(state)
    return far


distances_of = lru_cache(maxsize=256)(distances)  # a few hundred states each


@lru_cache(maxsize=1024)
def layout_of(difficulty: int, split: str, seed: int) -> Layout:
    """Cached, because a whole group of episodes starts from one seed."""
    size = SIZES[difficulty]
    bare = draw(lambda rng: _bare(rng, size), seed, split, lambda layout: layout.content)
    return _furnish(bare, size, random.Random(f"pillars/{split}/{seed}"))


def _bare(rng: random.Random, size: Size) -> Layout:
    """Two empty rooms, drawn again until the shortest solution is as long as the difficulty says."""
    near, far = ([(c + x, r) for c in range(size.room) for r in range(size.rows)] for x in (0, size.room + 1))
    while True:
        door = (size.room, rng.randrange(size.rows))
        (start, key), goal = rng.sample(near, 2), rng.choice(far)
        # one turn to take, one to open; without pillars all else is walking straight
        turns = 2 + _apart(start, key) + _apart(key, door) + _apart(door, goal)
        if size.oracle[0] <= turns <= size.oracle[1]:
            return Layout(start, key, door, goal, frozenset({door, *near, *far}))


def _furnish(bare: Layout, size: Size, rng: random.Random) -> Layout:
    """With pillars in the way, but never so that the solution becomes too long."""
    inner = sorted(bare.floor - {bare.start, bare.key, bare.door, bare.goal})
    while True:
        layout = replace(bare, floor=bare.floor - {*rng.sample(inner, size.pillars)})
        if distances_of(layout).get(State(bare.start), size.turns) <= size.oracle[1]:
            return layout


class KeyDoor(Environment):
    """Words in, a view of the surroundings out."""

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
    layout: Layout
    state: State

    def __init__(self, *, difficulty: int = 1, split: str = "train") -> None:
        super().__init__(difficulty=difficulty, split=split)
        self.max_turns = SIZES[difficulty].turns

    def reset(self, seed: int) -> Sequence[Message]:
        self._begin(seed)
        return [{"role": "system", "content": PROMPT}, user(view(self.layout, self.state))]

    def step(self, action: Action) -> Step:
        if self._over():
            return self._answer("it is over.", 0.0, 0)
        self.turns += 1
        word = action.text.strip().lower().rstrip(".")
        if word not in WORDS:
            return self._answer(f"that is no move. {view(self.layout, self.state)}", 0.0, 1)
        before, self.state = self.state, move(self.layout, self.state, word)
        if self.state == before:
            return self._answer(f"you cannot. {view(self.layout, self.state)}", 0.0, 1)
        return self._answer(view(self.layout, self.state), float(self._won()), 0)

    def _answer(self, text: str, reward: float, errors: int) -> Step:
        won, over = self._won(), self._over()
        info: dict[str, Any] = {"tool_errors": errors} | ({"success": won} if over else {})
        return Step([user(text)], reward, terminated=won, truncated=over and not won, info=info)

    def _won(self) -> bool:
        return self.state.at == self.layout.goal

    def _over(self) -> bool:
        return self._won() or self.turns >= self.max_turns

    def hint(self) -> str:
        """Where the goal lies, which nobody sees before the door."""
        return f"from the door the goal is {_bearing(self.layout.door, self.layout.goal)}"

    def state_key(self) -> str:
        """Where the agent is and what it has done; not the turn, so that a state met twice is one state."""
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
        self.state = State((column, row), snapshot["held"], snapshot["opened"])
        self.turns = snapshot["turns"]

    def _begin(self, seed: int) -> None:
        self.seed, self.turns = seed, 0
        self.layout = layout_of(self.difficulty, self.split, seed)
        self.state = State(self.layout.start)

    def oracle(self) -> Action:
        far = distances_of(self.layout)
        return say(min(WORDS, key=lambda word: far[move(self.layout, self.state, word)]))

    def random_action(self, rng: random.Random) -> Action:
        return say(rng.choice(WORDS))

    def demonstrate(self, rng: random.Random) -> Action:
        """Good moves among blind ones; so many that somewhat less than half of the episodes reach the goal."""
        return self.oracle() if rng.random() < 0.42 else self.random_action(rng)


def view(layout: Layout, state: State) -> str:
    """What the agent sees: the things in its room, or held, and where there is no way."""
    things = ["key held"] if state.held else []
    if state.at[0] <= layout.door[0]:
        things += [] if state.held else [f"key {_bearing(state.at, layout.key)}"]
        things.append(f"door {_bearing(state.at, layout.door)}, {'open' if state.opened else 'locked'}")
    if state.at[0] >= layout.door[0]:
        things.append(f"goal {_bearing(state.at, layout.goal)}")
    walls = [word for word, way in MOVES.items() if _plus(state.at, way) not in layout.floor]
    things += [f"wall {' '.join(walls)}"] if walls else []
    return ". ".join(things)


def _bearing(here: Cell, there: Cell) -> str:
    """``2 north 1 east``; ``here`` where there is no distance."""
    east, south = there[0] - here[0], there[1] - here[1]
    parts = [f"{abs(south)} {'south' if south > 0 else 'north'}"] if south else []
    parts += [f"{abs(east)} {'east' if east > 0 else 'west'}"] if east else []
    return " ".join(parts) or "here"


def _plus(cell: Cell, way: Cell) -> Cell:
    return cell[0] + way[0], cell[1] + way[1]


def _apart(one: Cell, other: Cell) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])
