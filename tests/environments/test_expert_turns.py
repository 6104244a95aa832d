"""Single turns of an expert: which state they start in, which turns are as good, and the dialogues of a file."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import environments
from turnwise.core.protocols import Action, ToolCall
from turnwise.environments.base import text_action, tool_action
from turnwise.environments.builtin.keydoor import WORDS, KeyDoor
from turnwise.environments.demonstrated import RULES, equivalent, same_value
from turnwise.environments.expert_turns import KeyDoorTurns, LookupTurns
from turnwise.errors import SettingError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(-3, 3)
    | st.sampled_from(["", "a b", "A, b!", "3", "true", "long text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=5,
)
ACTIONS = st.builds(
    lambda text, calls: Action(text, tuple(ToolCall(name, arguments) for name, arguments in calls)),
    st.sampled_from(["north", "North.", "go  north", "open"]),
    st.lists(
        st.tuples(st.sampled_from(["find", "open"]), st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=3)),
        max_size=2,
    ),
)


@given(ACTIONS, ACTIONS, st.floats(0.1, 1.0))
def test_exact_matches_are_accepted_by_every_rule(action, expected, likeness):
    """Card: the exact-match reward is at most the functional one, on any sample."""
    accepted = [equivalent(action, expected, rule, likeness) for rule in RULES]
    assert accepted == sorted(accepted) and all(equivalent(expected, expected, rule, likeness) for rule in RULES)


@pytest.mark.parametrize(
    "a, b, same",
    [
        (3, "3", True), ("3.0", 3, True), (True, "true", True), ("0.30000001", 0.3, True), (3, 4, False), (3, "three", False),
        ({"x": 1}, {"x": "1", "y": None}, True), ({"x": 1}, {"x": 1, "y": 0}, False), ([1, "2"], ["1", 2], True),
        ([1], [1, 2], False), ("New York!", "new  york", True), ("new york", "boston", False),
        ("", None, False), (None, None, True),
    ],
)  # fmt: skip
def test_arguments_that_mean_the_same(a, b, same):
    assert same_value(a, b) is same and same_value(b, a) is same


def test_decision_tools_and_arguments():
    expected = tool_action("find", city="New York", nights=3)
    assert equivalent(tool_action("find", city="new york", nights="3"), expected)
    assert not equivalent(tool_action("find", city="new york", nights="3"), expected, "exact")
    assert not equivalent(tool_action("find", city="Boston", nights=3), expected)
    assert equivalent(tool_action("find", city="Boston", nights=3), expected, "names")
    assert not equivalent(tool_action("book", city="New York", nights=3), expected, "names")
    assert not equivalent(text_action("find New York"), expected, "names")
    assert not equivalent(Action(expected.text, expected.calls, faults=("not JSON",)), expected, "names")


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([KeyDoorTurns, LookupTurns]))
def test_an_episode_is_one_turn_of_a_demonstration(seed, cls):
    env = cls(demonstrations=5)
    read = env.reset(seed)
    plain = cls.__bases__[1]()
    expected = list(plain.reset(seed % 5))
    for _ in range(env.turn_index):
        action = plain.oracle()
        expected += [action.message, *plain.step(action).messages]
    assert read == expected and env.oracle() == plain.oracle()
    step = env.step(env.oracle())
    assert step.terminated and step.reward == 1 and step.info["success"] is True
    other = cls(demonstrations=5)
    other.reset(seed)
    assert other.step(text_action("nonsense")).reward == 0


def test_all_turns_of_all_demonstrations_are_tasks():
    found = set()
    for seed in range(400):
        env = KeyDoorTurns(demonstrations=3)
        env.reset(seed)
        found.add((seed % 3, env.turn_index))
    lengths = {}
    for number in range(3):
        plain = KeyDoor()
        plain.reset(number)
        lengths[number] = int(plain.turns_to_solve())
    assert found == {(n, k) for n, length in lengths.items() for k in range(length)}


@given(st.integers(0, 500), st.sampled_from(WORDS))
def test_a_move_that_is_as_near_is_as_good(seed, word):
    env, strict = KeyDoorTurns(), KeyDoorTurns(rule="exact")
    env.reset(seed), strict.reset(seed)
    before, expert = env.turns_to_solve(), env.oracle().text
    plain = copy.deepcopy(env)
    plain.plain_step(text_action(word))
    good = env.step(text_action(word)).reward
    assert (
        good == float(plain.turns_to_solve() < before) >= strict.step(text_action(word)).reward == float(word == expert)
    )


def test_held_out_episodes_are_the_environments_own():
    env, plain = KeyDoorTurns(split="held_out"), KeyDoor(split="held_out")
    assert env.reset(7) == plain.reset(7)
    while not (step := env.step(env.oracle())).terminated:
        assert step == plain.step(plain.oracle())
    assert env.turn_index == 0


def dialogue(city: str) -> dict:
    call = {"type": "function", "function": {"name": "find", "arguments": json.dumps({"city": city})}}
    user, found = {"role": "user", "content": f"a hotel in {city}"}, {"role": "tool", "content": "Ritz"}
    messages = [
        user,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        found,
        {"role": "assistant", "content": "The Ritz."},
    ]
    tool = {
        "type": "function",
        "function": {"name": "find", "description": "", "parameters": {"type": "object", "properties": {}}},
    }
    return {"messages": messages, "tools": [tool]}


def test_turns_of_the_dialogues_of_a_file(tmp_path):
    path = tmp_path / "dialogues.jsonl"
    rows = [
        dialogue(city)
        for city in ("Rome", "Oslo", "Lima", "Bern", "Cairo", "Delhi", "Paris", "Tokyo", "Quito", "Sofia")
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    cls = environments.load(f"demonstrated:{path}")
    assert len(cls.seeds["train"]) + len(cls.seeds["held_out"]) == 20 and [
        t["function"]["name"] for t in cls.tools
    ] == ["find"]
    seen = set()
    for seed in cls.seeds["train"]:
        env = cls()
        history = env.reset(seed)
        assert history[-1]["role"] in ("user", "tool") and env.step(env.oracle()).reward == 1
        seen.add(len(history))
        assert env.step(text_action("I do not know")).reward == 0
    assert seen == {1, 3}
    env = environments.load(f"demonstrated:{path},rule=names")()
    env.reset(0)
    assert env.step(tool_action("find", city="Mars")).reward == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ("no json", "line 1: not JSON"),
        ("[]", "not an object"),
        ('{"prompt": 1}', "no messages"),
        ('{"messages": []}', "no assistant turn"),
    ],
)
def test_a_file_without_turns_is_refused(tmp_path, text, message):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(SettingError, match=message):
        environments.load(f"demonstrated:{path}")


def test_nonsense_is_refused(tmp_path):
    for spec, message in (
        (",rule=fuzzy", "rule is 'fuzzy'"),
        (",likeness=2", "write a number"),
        (",likeness=x", "write a number"),
        (",k=1", "no option"),
    ):
        with pytest.raises(SettingError, match=message):
            environments.load(f"demonstrated:nowhere.jsonl{spec}")
    with pytest.raises(SettingError, match="cannot be read"):
        environments.load("demonstrated:nowhere.jsonl")
    with pytest.raises(SettingError, match="at least 1"):
        KeyDoorTurns(demonstrations=0)
