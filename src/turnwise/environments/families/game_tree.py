"""Exact numbers of OpenSpiel games by enumeration: all decisions, and what a best response wins against a policy.

Games of imperfect information are left to the package. In games of perfect information it tells apart positions that only
their history distinguishes (294,778 in tic-tac-toe); here equal positions are one, so that small board games can be solved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from turnwise.environments.families.adapter import import_package
from turnwise.environments.families.game_words import legal_words, prompt

MAX_NODES = 20_000  # a game with more is not enumerated
ActionProbabilities = Callable[[str, Sequence[str]], Mapping[str, float]]
"""(prompt, legal actions) -> probability of each."""


def has_perfect_information(game: Any) -> bool:
    kind = game.get_type()
    return bool(kind.information == kind.information.PERFECT_INFORMATION)


def decision_states(game: Any) -> list[Any]:
    """One state for each position (perfect information) or history (imperfect) in which a player moves; empty for large games."""
    seen: set[str] = set()
    states: list[Any] = []
    stack = [game.new_initial_state()]
    while stack:
        state = stack.pop()
        key = position(state) if has_perfect_information(game) else state.history_str()
        if key in seen or state.is_terminal():
            continue
        seen.add(key)
        if len(seen) > MAX_NODES:
            return []
        if not state.is_chance_node():
            states.append(state)
        stack += [child for _, child in children(state)]
    return states


def position(state: Any) -> str:
    return f"{state.current_player()} {state}"


def children(state: Any) -> Iterator[tuple[int, Any]]:
    for action in state.legal_actions():
        yield action, state.child(action)


def exploitability(game: Any, policy: ActionProbabilities) -> float:
    """How much a best response wins against ``policy``, on average over the seats: 0 at an equilibrium. Probabilities of legal
    actions are scaled to sum to 1."""
    if has_perfect_information(game):
        seats = range(game.num_players())
        gains = [Responder(policy, n, True).value(game) - Responder(policy, n, False).value(game) for n in seats]
        return float(sum(gains) / len(gains))
    import_package("pyspiel", "open_spiel", "open_spiel")
    from open_spiel.python import policy as policies
    from open_spiel.python.algorithms import exploitability as measure

    table = policies.TabularPolicy(game)
    for index, state in enumerate(table.states):
        row = table.action_probability_array[index]
        row[:] = 0
        for action, chance in probabilities(state, policy).items():
            row[action] = chance
    return float(measure.exploitability(game, table))


def average_policy(game: Any, policies: Sequence[ActionProbabilities]) -> ActionProbabilities:
    """The policy that plays one of ``policies``, drawn before the game: at each decision their probabilities, weighted by how
    often the player's own moves of each lead there."""
    table: dict[str, dict[str, float]] = {}
    for policy in policies:
        seen: set[str] = set()  # a player's information state once, not once for each history of the others
        stack = [(game.new_initial_state(), (1.0,) * game.num_players())]
        while stack:
            state, reach = stack.pop()
            if state.is_terminal():
                continue
            if state.is_chance_node():
                stack += [(child, reach) for _, child in children(state)]
                continue
            player, text = state.current_player(), prompt(state)
            chances = probabilities(state, policy)
            if text not in seen:
                seen.add(text)
                row = table.setdefault(text, {})
                for word, chance in zip(legal_words(state), chances.values()):
                    row[word] = row.get(word, 0.0) + reach[player] * chance
            for action, child in children(state):
                own = reach[player] * chances[action]
                stack.append((child, (*reach[:player], own, *reach[player + 1 :])))
    return lambda text, words: table[text]


def probabilities(state: Any, policy: ActionProbabilities) -> dict[int, float]:
    """The probability of each legal action; equal ones where the policy gives none of them any."""
    words, actions = legal_words(state), state.legal_actions()
    chances = policy(prompt(state), words)
    total = sum(chances[word] for word in words)
    return {a: chances[word] / total if total > 0 else 1 / len(words) for word, a in zip(words, actions)}


class Responder:
    """The value of a game of perfect information for one seat: where ``best``, that seat plays a best response; all other
    decisions are the policy's."""

    def __init__(self, policy: ActionProbabilities, seat: int, best: bool) -> None:
        self.policy, self.seat, self.best = policy, seat, best
        self.values: dict[str, float] = {}

    def value(self, game: Any) -> float:
        return self._of(game.new_initial_state())

    def _of(self, state: Any) -> float:
        if state.is_terminal():
            return float(state.returns()[self.seat])
        key = position(state)
        if key not in self.values:
            self.values[key] = self._computed(state)
        return self.values[key]

    def _computed(self, state: Any) -> float:
        values = {action: self._of(child) for action, child in children(state)}
        if self.best and state.current_player() == self.seat:
            return max(values.values())
        chances = dict(state.chance_outcomes()) if state.is_chance_node() else probabilities(state, self.policy)
        return sum(chances[action] * value for action, value in values.items())
