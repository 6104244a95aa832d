"""Games of OpenSpiel by self-play: one policy at every seat, or other seats held by a scripted player.

    load("open_spiel:kuhn_poker")                       both seats are the policy
    load("open_spiel:tic_tac_toe,opponent=random")      the policy moves first or second; the other seat moves at random
    load("open_spiel:leduc_poker,opponent=optimal")     the other seat plays an equilibrium found by CFR
    load("open_spiel:kuhn_poker,demonstrator=cards")    demonstrations bet more often with a higher card; else they are random

A prompt holds what its player knows (the game's information state) and the legal actions. Returns are paid on each seat's last
turn. ``exploitability`` turns a policy into the exact amount that a best response wins against it. Sequential games of two or
more players; chance moves are drawn from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import AnswerChances, PolicyQuestion, text_action, user_message
from turnwise.environments.families import adapter
from turnwise.environments.families.adapter import SeatedGame, WordWorld
from turnwise.errors import SettingError

OPPONENTS = ("self", "random", "optimal")
DEMONSTRATORS = ("random", "cards")
SOLVED = ("kuhn_poker", "leduc_poker")  # small enough for CFR in seconds
CFR_ITERATIONS = 300
CARDS = ("J", "Q", "K")
MAX_NODES = 20_000  # a game with more is not enumerated
# (prompt, legal actions) -> probability of each
ActionProbabilities = Callable[[str, Sequence[str]], Mapping[str, float]]


class GameEnvironment(SeatedGame, WordWorld):
    """One match. ``environment`` makes a subclass for each game."""

    suggests: ClassVar[Mapping[str, Any]] = {
        "context": 160, "max_tokens": 10, "hidden": 128, "copying": True, "cold_steps": 120, "cold_batch": 24,
    }  # fmt: skip
    first_seat = 1
    game: ClassVar[Any]
    demonstrator: ClassVar[str] = "random"

    def begin(self, seed: int) -> Sequence[Message]:
        self.sit_down(seed)
        for _ in range(100):  # scripted seats may end a match before the policy moves: deal again
            self.state = self.game.new_initial_state()
            self._advance()
            if not self.state.is_terminal():
                break
        return [user_message(prompt(self.state))]

    @property
    def agent(self) -> str:
        """Whose turn it is."""
        return self.seat_name(max(0, self.state.current_player()))

    def legal(self) -> Sequence[str]:
        return legal_words(self.state)

    def move(self, word: str) -> Step:
        mover = self.state.current_player()
        self.state.apply_action(self.state.legal_actions()[self.legal().index(word)])
        self._advance()
        if not self.state.is_terminal():
            return Step([user_message(prompt(self.state))], context=())  # a seat reads only what it knows
        return self.pay(mover, dict(enumerate(self.state.returns())), "it is over: {}.")

    def refuse(self) -> Step:
        """An illegal move loses: its player gets the game's lowest return, the others share it."""
        mover, lowest = max(0, self.state.current_player()), self.game.min_utility()
        share = -lowest / (self.seats - 1)
        returns = {seat: lowest if seat == mover else share for seat in range(self.seats)}
        return self.pay(mover, returns, "it is over: {}.", errors=1)

    def _advance(self) -> None:
        """Play chance moves and scripted seats until the policy is to move."""
        while not self.state.is_terminal():
            if self.state.is_chance_node():
                actions, weights = zip(*self.state.chance_outcomes())
                self.state.apply_action(self.rng.choices(actions, weights)[0])
            elif not self.is_scripted(self.state.current_player()):
                return
            elif self.opponent == "random":
                self.state.apply_action(int(self.rng.choice(self.state.legal_actions())))
            else:
                self.state.apply_action(self._equilibrium_move())

    def _equilibrium_move(self) -> int:
        policy = equilibrium(self.game.get_type().short_name).action_probabilities(self.state)
        return int(self.rng.choices(list(policy), list(policy.values()))[0])

    # ---- scripted policies
    def oracle(self) -> Action:
        """A move of an equilibrium, for games small enough to solve; a random one otherwise."""
        if self.game.get_type().short_name not in SOLVED:
            return self.random_action(self.rng)
        return text_action(self.legal()[self.state.legal_actions().index(self._equilibrium_move())])

    def demonstrate(self, rng: random.Random) -> Action:
        if self.demonstrator == "random":
            return self.random_action(rng)
        # Kuhn poker by a player who knows the order of the cards and nothing else: bets in 1/4, 1/2, 3/4 of the turns
        card = int(self.state.information_state_string(self.state.current_player())[0])
        return text_action("bet" if rng.random() < (card + 1) / (len(CARDS) + 1) else "pass")

    # ---- what is known of a policy without playing
    @classmethod
    def policy_questions(cls) -> Sequence[PolicyQuestion]:
        """Every prompt of the game, where it is small enough."""
        prompts = {prompt(state): tuple(legal_words(state)) for state in decision_states(cls.game)}
        return [PolicyQuestion(text, words) for text, words in prompts.items()]

    @classmethod
    def policy_metrics(cls, chances: AnswerChances) -> Mapping[str, float]:
        """Exploitability, and the mean probability of texts that are no legal action."""
        unlisted = sum(1 - sum(answers.values()) for answers in chances.values()) / len(chances)
        loss = exploitability(cls.game, lambda text, _: chances[text])
        return {"exploitability": loss, "unlisted": max(0.0, unlisted)}


@cache
def equilibrium(name: str) -> Any:
    """The average policy of CFR."""
    import pyspiel
    from open_spiel.python.algorithms import cfr

    solver = cfr.CFRSolver(pyspiel.load_game(name))
    for _ in range(CFR_ITERATIONS):
        solver.evaluate_and_update_policy()
    return solver.average_policy()


@cache
def environment(spec: str) -> type[GameEnvironment]:
    """The class of a game's short name; ``opponent`` says who holds the other seats, further options are the game's own."""
    name, options = adapter.split_options("open_spiel", spec)
    pyspiel = adapter.import_package("pyspiel", "open_spiel")
    opponent, demonstrator = str(options.pop("opponent", "self")), str(options.pop("demonstrator", "random"))
    adapter.require_offered(opponent, OPPONENTS, f"open_spiel:{name} has no opponent")
    if opponent == "optimal" and name not in SOLVED:
        raise SettingError(f"opponent=optimal is there for {', '.join(SOLVED)}; write opponent=random or leave it out")
    adapter.require_offered(demonstrator, DEMONSTRATORS, f"open_spiel:{name} has no demonstrator")
    if demonstrator == "cards" and name != "kuhn_poker":
        raise SettingError(f"demonstrator=cards is there for kuhn_poker, not {name}; leave it out")
    adapter.require_offered(name, pyspiel.registered_names(), "OpenSpiel has no game")
    with adapter.refusing(f"open_spiel:{spec}"):  # SpielError, or a missing parameter
        game = pyspiel.load_game(name, options) if options else pyspiel.load_game(name)
    kind, seats = game.get_type(), game.num_players()
    if kind.dynamics != kind.dynamics.SEQUENTIAL or seats < 2:
        raise SettingError(f"open_spiel:{name} is not a game of turns for two or more players; choose another")
    return adapter.member_class(
        "open_spiel", spec, GameEnvironment, f"{name} of OpenSpiel.",
        game=game, opponent=opponent, demonstrator=demonstrator, seats=seats, max_turns=game.max_game_length(),
        agents=tuple(map(GameEnvironment.seat_name, range(seats))) if opponent == "self" else (),
    )  # fmt: skip


# ------------------------------------------------------------------ states in words


def legal_words(state: Any) -> list[str]:
    """The legal actions as words, in the order of the game."""
    player = state.current_player()
    return [adapter.clean_word(state.action_to_string(player, action)).rstrip(";") for action in state.legal_actions()]


def prompt(state: Any) -> str:
    """What the player to move knows, and may do."""
    player, kind = state.current_player(), state.get_game().get_type()
    if kind.short_name == "kuhn_poker":
        text = state.information_state_string(player)
        said = " ".join({"p": "pass", "b": "bet"}[letter] for letter in text[1:])
        knowledge = f"card {CARDS[int(text[0])]}" + (f", said {said}" if said else "")
    elif kind.information == kind.information.PERFECT_INFORMATION and kind.provides_observation_string:
        knowledge = " / ".join(state.observation_string(player).strip().splitlines())
    elif kind.provides_information_state_string:
        knowledge = " ".join(state.information_state_string(player).split())
    else:
        knowledge = " ".join(str(state).split())
    return f"{GameEnvironment.seat_name(player)}: {knowledge}\nsay {adapter.listed(legal_words(state))}"


# ------------------------------------------------------------------ exact numbers by enumeration
#
# Games of imperfect information are left to the package. In games of perfect information it tells apart positions that only
# their history distinguishes (294,778 in tic-tac-toe); here equal positions are one, so that small board games can be solved.


def has_perfect_information(game: Any) -> bool:
    kind = game.get_type()
    return bool(kind.information == kind.information.PERFECT_INFORMATION)


def decision_states(game: Any) -> list[Any]:
    """One state for each position (perfect information) or history (imperfect) in which a player moves; empty for large games."""
    seen: set[str] = set()
    states: list[Any] = []
    stack, is_perfect = [game.new_initial_state()], has_perfect_information(game)
    while stack:
        state = stack.pop()
        key = f"{state.current_player()} {state}" if is_perfect else state.history_str()
        if key in seen or state.is_terminal():
            continue
        seen.add(key)
        if len(seen) > MAX_NODES:
            return []
        if not state.is_chance_node():
            states.append(state)
        stack += [state.child(action) for action in state.legal_actions()]
    return states


def exploitability(game: Any, policy: ActionProbabilities) -> float:
    """How much a best response wins against ``policy``, on average over the seats: 0 at an equilibrium. Probabilities of legal
    actions are scaled to sum to 1."""
    if has_perfect_information(game):
        seats = range(game.num_players())
        gains = [seat_value(game, policy, n, best=True) - seat_value(game, policy, n, best=False) for n in seats]
        return float(sum(gains) / len(gains))
    from open_spiel.python import policy as policies
    from open_spiel.python.algorithms import exploitability as measure

    table = policies.TabularPolicy(game)
    for index, state in enumerate(table.states):
        row = table.action_probability_array[index]
        row[:] = 0
        for action, chance in probabilities(state, policy).items():
            row[action] = chance
    return float(measure.exploitability(game, table))


def probabilities(state: Any, policy: ActionProbabilities) -> dict[int, float]:
    """The probability of each legal action; equal ones where the policy gives none of them any."""
    words, actions = legal_words(state), state.legal_actions()
    chances = policy(prompt(state), words)
    total = sum(chances[word] for word in words)
    return {a: chances[word] / total if total > 0 else 1 / len(words) for word, a in zip(words, actions)}


def seat_value(game: Any, policy: ActionProbabilities, seat: int, best: bool) -> float:
    """The value of a game of perfect information for one seat: where ``best``, that seat plays a best response; all other
    decisions are the policy's."""
    values: dict[str, float] = {}

    def value(state: Any) -> float:
        if state.is_terminal():
            return float(state.returns()[seat])
        key = f"{state.current_player()} {state}"
        if key not in values:
            after = {action: value(state.child(action)) for action in state.legal_actions()}
            if best and state.current_player() == seat:
                values[key] = max(after.values())
            else:
                # a chance node is played by the game, every other one by the policy
                chances = dict(state.chance_outcomes()) if state.is_chance_node() else probabilities(state, policy)
                values[key] = sum(chances[action] * worth for action, worth in after.items())
        return values[key]

    return value(game.new_initial_state())
