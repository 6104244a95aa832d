"""Nim: the rules, who should win, and what each player is paid."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.core.records import Task
from turnwise.environments.base import text_action
from turnwise.environments.builtin.nim import HEAPS, Nim
from turnwise.rollout.episode import EpisodeLimits
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import play_scripted
from turnwise.training.build import byte_tokenizer


def best(left: int, right: int, known: dict) -> bool:
    """Whether the player to move can win, by trying everything."""
    if (left, right) not in known:
        moves = [(left - n, right) for n in (1, 2, 3) if n <= left] + [
            (left, right - n) for n in (1, 2, 3) if n <= right
        ]
        known[left, right] = any(not best(*then, known) for then in moves)
    return known[left, right]


def test_the_favourite_is_who_a_full_search_says():
    known: dict = {(0, 0): False}
    for left in range(HEAPS[3][1] + 1):
        for right in range(HEAPS[3][1] + 1):
            env = Nim()
            env.start = (left, right)
            assert (env.favourite == 0) == best(left, right, known), (left, right)


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_a_perfect_player_on_both_sides_wins_for_the_favourite(difficulty):
    for seed in range(20):
        env = Nim(difficulty=difficulty)
        env.reset(seed)
        while not env.done:
            step = env.step(env.oracle())
        assert step.terminated and step.info["success"]


def test_a_wrong_move_loses():
    for text in ("left 4", "left 0", "middle 1", "", "left"):
        env = Nim()
        env.reset(0)
        step = env.step(text_action(text))
        assert step.terminated and step.reward == -1 and step.info["paid"] == {"second": 1.0} and env.winner == 1


def test_both_players_are_paid_on_their_own_last_turn():
    """A whole episode: agents take turns, and the rewards sum to nothing."""
    env, task = Nim(difficulty=2), Task("nim", 3, difficulty=2)
    played = asyncio.run(
        play_scripted("random", env, "x", task, Renderer(byte_tokenizer()), EpisodeLimits(turns=60, context=10**6))
    )
    rewards = {name: sum(t.reward for t in played.turns if t.agent == name) for name in ("first", "second")}
    assert [t.agent for t in played.turns][:4] == ["first", "second", "first", "second"]
    assert sorted(rewards.values()) == [-1.0, 1.0] and played.reward == 0
    assert [t.reward for t in played.turns[:-2]] == [0.0] * (len(played.turns) - 2)
    assert rewards[played.turns[-1].agent] == 1.0
