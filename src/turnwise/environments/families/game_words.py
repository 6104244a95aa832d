"""States of OpenSpiel games in words: what a seat knows, and what it may say. Knows no episode."""

from __future__ import annotations

from typing import Any

from turnwise.environments.families.adapter import clean_word, listed

CARDS = ("J", "Q", "K")


def seat_name(player: int) -> str:
    return f"player {player + 1}"


def legal_words(state: Any) -> list[str]:
    """The legal actions as words, in the order of the game."""
    player = state.current_player()
    return [clean_word(state.action_to_string(player, action)).rstrip(";") for action in state.legal_actions()]


def prompt(state: Any) -> str:
    """What the player to move knows, and may do."""
    player = state.current_player()
    return f"{seat_name(player)}: {knowledge(state, player)}\nsay {listed(legal_words(state))}"


def bet_by_card(state: Any) -> float:
    """How often a player of Kuhn poker bets who knows the order of the cards and nothing else: 1/4, 1/2, 3/4."""
    card = int(state.information_state_string(state.current_player())[0])
    return (card + 1) / (len(CARDS) + 1)


def knowledge(state: Any, player: int) -> str:
    """The information state of a player in words."""
    kind = state.get_game().get_type()
    if kind.short_name == "kuhn_poker":
        text = state.information_state_string(player)
        said = " ".join({"p": "pass", "b": "bet"}[letter] for letter in text[1:])
        return f"card {CARDS[int(text[0])]}" + (f", said {said}" if said else "")
    perfect = kind.information == kind.information.PERFECT_INFORMATION
    if perfect and kind.provides_observation_string:
        return " / ".join(state.observation_string(player).strip().splitlines())
    if kind.provides_information_state_string:
        return " ".join(state.information_state_string(player).split())
    return " ".join(str(state).split())
