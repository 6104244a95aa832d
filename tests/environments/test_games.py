"""Games of OpenSpiel: what a seat reads, and exact numbers of a policy by enumeration."""

from __future__ import annotations

import asyncio
import random

import pytest

pytest.importorskip("pyspiel")
import pyspiel

from turnwise import environments
from turnwise.core.records import Task
from turnwise.environments.families.open_spiel import decision_states, exploitability, legal_words, prompt
from turnwise.errors import SettingError
from turnwise.rollout.episode import EpisodeLimits
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import play_scripted
from turnwise.training.build import byte_tokenizer

pytestmark = pytest.mark.integration


def uniform(text, words):
    return dict.fromkeys(words, 1.0)


@pytest.mark.parametrize("game", ["kuhn_poker", "leduc_poker"])
def test_a_seat_never_reads_what_another_seat_knows(game):
    """The first prompt, with the cards of the first seat, stood before the prompts of the second seat."""
    cls, renderer = environments.load(f"open_spiel:{game}"), Renderer(byte_tokenizer())
    for seed in range(4):
        task = Task(game, seed)
        played = asyncio.run(play_scripted("random", cls(), "x", task, renderer, EpisodeLimits(9, context=10**6)))
        for turn in played.turns:
            seats = {name for name in ("player 1", "player 2") if f"{name}:" in renderer.decode(turn.context)}
            assert seats == {turn.agent}
            assert turn.restart == (turn is not played.turns[0])


def test_the_own_enumeration_agrees_with_the_package():
    """Nim with two small heaps is small enough for the package, which tells histories apart."""
    from open_spiel.python import policy as policies
    from open_spiel.python.algorithms import exploitability as measure

    game = pyspiel.load_game("nim", {"pile_sizes": "1;2"})
    chances = {}

    def arbitrary(text, words):
        return chances.setdefault(text, {word: random.Random(f"{text}{word}").random() for word in words})

    table = policies.TabularPolicy(game)
    for index, state in enumerate(table.states):
        values = arbitrary(prompt(state), legal_words(state))
        row, total = table.action_probability_array[index], sum(values.values())
        row[:] = 0
        for action, word in zip(state.legal_actions(), legal_words(state)):
            row[action] = values[word] / total
    assert exploitability(game, arbitrary) == pytest.approx(measure.exploitability(game, table))


def test_perfect_play_cannot_be_exploited():
    """A policy that looks the game of tic-tac-toe up to its end loses nothing; a uniform one does."""
    game = pyspiel.load_game("tic_tac_toe")
    best: dict[str, dict[str, float]] = {}
    known: dict[str, float] = {}

    def value(state):
        if state.is_terminal():
            return state.returns()[0]
        if str(state) not in known:
            children = [value(state.child(action)) for action in state.legal_actions()]
            known[str(state)] = (max if state.current_player() == 0 else min)(children)
            best[prompt(state)] = {word: float(v == known[str(state)]) for word, v in zip(legal_words(state), children)}
        return known[str(state)]

    assert value(game.new_initial_state()) == 0
    assert exploitability(game, lambda text, _: best[text]) == pytest.approx(0)
    assert exploitability(game, uniform) > 0.5


def test_questions_cover_every_decision_and_large_games_have_none():
    cls = environments.load("open_spiel:kuhn_poker")
    assert len(cls.policy_questions()) == 12
    uniformly = {q.prompt: dict.fromkeys(q.answers, 0.4) for q in cls.policy_questions()}
    measured = cls.policy_metrics(uniformly)
    assert measured["exploitability"] == pytest.approx(11 / 24) and measured["unlisted"] == pytest.approx(0.2)
    assert decision_states(pyspiel.load_game("connect_four")) == []
    assert environments.load("open_spiel:connect_four").policy_questions() == []


def test_demonstrations_by_card_bet_more_often_with_a_higher_card():
    cls = environments.load("open_spiel:kuhn_poker,demonstrator=cards")
    bets: dict[str, list[bool]] = {card: [] for card in "JQK"}
    rng = random.Random(0)
    for seed in range(600):
        env = cls()
        text = env.reset(seed)[0]["content"]
        bets[text.split("card ")[1][0]].append(env.demonstrate(rng).text == "bet")
    rates = [sum(bets[card]) / len(bets[card]) for card in "JQK"]
    assert rates == pytest.approx([0.25, 0.5, 0.75], abs=0.1)


@pytest.mark.parametrize("spec", ["kuhn_poker,demonstrator=card", "leduc_poker,demonstrator=cards"])
def test_a_demonstrator_that_is_not_there_is_refused(spec):
    with pytest.raises(SettingError, match="demonstrator"):
        environments.load(f"open_spiel:{spec}")
