
from support.players import SPLITS, play

from turnwise.environments.base import text_action
from turnwise.environments.builtin.keydoor import (
    SIZES,
    GridLayout,
    GridState,
    KeyDoor,
    distances,
    transition,
    view,
)

# S.#.   start, key below it, the door in the lower row, the goal behind it
# KxD G  (x: an empty cell)
FLOOR = frozenset({(0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (3, 1)})
SMALL = GridLayout(start=(0, 0), key=(0, 1), door=(2, 1), goal=(3, 1), floor=FLOOR)


def test_shortest_way_by_hand():
    assert distances(SMALL)[GridState((0, 0))] == 6  # south, take, east, open, east, east
    state = GridState((0, 0))
    for word in ("south", "take", "east", "open", "east", "east"):
        after = transition(SMALL, state, word)
        assert after != state
        state = after
    assert state == GridState((3, 1), held=True, opened=True)


def test_the_door_is_shut_without_the_key():
    beside = GridState((1, 1))
    assert transition(SMALL, beside, "east") == transition(SMALL, beside, "open") == beside
    assert transition(SMALL, beside._replace(at=(0, 0), held=True), "open") == GridState(
        (0, 0), held=True
    )  # not next to it


def test_view_by_hand():
    assert view(SMALL, GridState((0, 0))) == ("key 1 south. door 1 south 2 east, locked. wall north west")
    assert view(SMALL, GridState((2, 1), True, True)) == ("key held. door here, open. goal 1 east. wall north south")


def test_oracle_lengths_are_those_of_the_difficulty():
    for difficulty, size in SIZES.items():
        for split in SPLITS:
            for seed in range(20):
                env = KeyDoor(difficulty=difficulty, split=split)
                play(env, seed, lambda env: env.oracle())
                assert size.oracle[0] <= env.turns <= size.oracle[1] <= size.turns / 2


def test_truncated_at_the_limit():
    env = KeyDoor()
    _, step, total = play(env, 0, lambda env: text_action("take"))
    assert step.truncated and not step.terminated and step.info["success"] is False
    assert env.turns == env.max_turns and total == 0


def test_state_key_is_the_state_and_not_the_way():
    env, other = KeyDoor(), KeyDoor()
    env.reset(0), other.reset(0)
    there = next(w for w in ("north", "south", "east", "west") if transition(env.layout, env.state, w) != env.state)
    back = {"north": "south", "south": "north", "east": "west", "west": "east"}[there]
    env.step(text_action(there))
    assert env.state_key() != other.state_key()
    env.step(text_action(back))
    assert env.state_key() == other.state_key()
    assert env.turns != other.turns
