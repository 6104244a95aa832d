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
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import AnswerChances, PolicyQuestion, text_action, user_message
from turnwise.environments.families.adapter import WordWorld, import_package, split_options, world_seed
from turnwise.environments.families.game_tree import decision_states, exploitability
from turnwise.environments.families.game_words import bet_by_card, legal_words, prompt, seat_name
from turnwise.errors import SettingError, nearest

OPPONENTS = ("self", "random", "optimal")
DEMONSTRATORS = ("random", "cards")
CFR_ITERATIONS = 300


class GameEnvironment(WordWorld):
    """One match. ``environment`` makes a subclass for each game."""

    suggests: ClassVar[Mapping[str, Any]] = {
        "context": 160, "max_tokens": 10, "hidden": 128, "copying": True, "cold_steps": 120, "cold_batch": 24,
    }  # fmt: skip
    game: ClassVar[Any]
    opponent: ClassVar[str] = "self"
    demonstrator: ClassVar[str] = "random"
    state: Any
    rng: random.Random
    seat: int  # the policy's own, where the others are scripted
    finished: bool

    def begin(self, seed: int) -> Sequence[Message]:
        number = world_seed(seed, self.split)
        self.rng, self.finished = random.Random(number), False
        self.seat = number // 2 % self.game.num_players()
        for _ in range(100):  # scripted seats may end a match before the policy moves: deal again
            self.state = self.game.new_initial_state()
            self._advance()
            if not self.state.is_terminal():
                break
        return [user_message(prompt(self.state))]

    @property
    def agent(self) -> str:
        """Whose turn it is."""
        return seat_name(max(0, self.state.current_player()))

    def legal(self) -> Sequence[str]:
        return legal_words(self.state)

    def act(self, word: str) -> Step:
        if self.finished:
            return Step([user_message("it is over.")], 0.0, terminated=True)
        mover = self.state.current_player()
        self.state.apply_action(self.state.legal_actions()[self.legal().index(word)])
        self._advance()
        if not self.state.is_terminal():
            return Step([user_message(prompt(self.state))], 0.0, context=())  # a seat reads only what it knows
        return self._end(mover, list(self.state.returns()))

    def refuse(self, action: Action) -> Step:
        """An illegal move loses: its player gets the game's lowest return, the others share it."""
        mover = max(0, self.state.current_player())
        lowest, others = self.game.min_utility(), self.game.num_players() - 1
        returns = [-lowest / others] * self.game.num_players()
        returns[mover] = lowest
        return self._end(mover, returns, errors=1)

    def _end(self, mover: int, returns: list[float], errors: int = 0) -> Step:
        """The last step pays each seat; a scripted seat earns nothing that is trained on."""
        self.finished = True
        own = [n for n in range(len(returns)) if self.opponent == "self" or n == self.seat]
        paid = {seat_name(n): returns[n] for n in own if n != mover}
        best = self.seat if self.opponent != "self" else 0
        info = {"success": returns[best] > 0, "tool_errors": errors, "paid": paid}
        text = f"it is over: {', '.join(f'{seat_name(n)} {value:+g}' for n, value in enumerate(returns))}."
        return Step([user_message(text)], returns[mover] if mover in own else 0.0, True, False, info)

    def _advance(self) -> None:
        """Play chance moves and scripted seats until the policy is to move."""
        while not self.state.is_terminal():
            if self.state.is_chance_node():
                actions, weights = zip(*self.state.chance_outcomes())
                self.state.apply_action(self.rng.choices(actions, weights)[0])
            elif self.opponent != "self" and self.state.current_player() != self.seat:
                self.state.apply_action(self._scripted())
            else:
                return

    def _scripted(self) -> int:
        if self.opponent == "random":
            return int(self.rng.choice(self.state.legal_actions()))
        policy = equilibrium(self.game.get_type().short_name).action_probabilities(self.state)
        return int(self.rng.choices(list(policy), list(policy.values()))[0])

    # ---- scripted policies
    def oracle(self) -> Action:
        """A move of an equilibrium, for games small enough to solve; a random one otherwise."""
        if self.game.get_type().short_name not in SOLVED:
            return self.random_action(self.rng)
        policy = equilibrium(self.game.get_type().short_name).action_probabilities(self.state)
        chosen = self.rng.choices(list(policy), list(policy.values()))[0]
        return text_action(self.legal()[self.state.legal_actions().index(int(chosen))])

    def demonstrate(self, rng: random.Random) -> Action:
        if self.demonstrator == "cards":
            return text_action("bet" if rng.random() < bet_by_card(self.state) else "pass")
        return self.random_action(rng)

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
        return {
            "exploitability": exploitability(cls.game, lambda text, _: chances[text]),
            "unlisted": max(0.0, unlisted),
        }


SOLVED = ("kuhn_poker", "leduc_poker")  # small enough for CFR in seconds


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
    name, options = split_options("open_spiel", spec)
    pyspiel = import_package("pyspiel", "open_spiel", "open_spiel")
    opponent, demonstrator = str(options.pop("opponent", "self")), str(options.pop("demonstrator", "random"))
    if opponent not in OPPONENTS:
        raise SettingError(f"open_spiel:{name} has no opponent {opponent!r}; {nearest(opponent, OPPONENTS)}")
    if opponent == "optimal" and name not in SOLVED:
        raise SettingError(f"opponent=optimal is there for {', '.join(SOLVED)}; write opponent=random or leave it out")
    if demonstrator not in DEMONSTRATORS:
        raise SettingError(
            f"open_spiel:{name} has no demonstrator {demonstrator!r}; {nearest(demonstrator, DEMONSTRATORS)}"
        )
    if demonstrator == "cards" and name != "kuhn_poker":
        raise SettingError(f"demonstrator=cards is there for kuhn_poker, not {name}; leave it out")
    offered = pyspiel.registered_names()
    if name not in offered:
        raise SettingError(f"OpenSpiel has no game {name!r}; {nearest(name, offered)}")
    try:
        game = pyspiel.load_game(name, options) if options else pyspiel.load_game(name)
    except Exception as fault:  # SpielError, or a missing parameter
        raise SettingError(f"open_spiel:{spec} cannot be made: {str(fault).splitlines()[0]}") from fault
    kind = game.get_type()
    if kind.dynamics != kind.dynamics.SEQUENTIAL or game.num_players() < 2:
        raise SettingError(f"open_spiel:{name} is not a game of turns for two or more players; choose another")
    body = {
        "game": game,
        "opponent": opponent,
        "demonstrator": demonstrator,
        "agents": tuple(map(seat_name, range(game.num_players()))) if opponent == "self" else (),
        "max_turns": game.max_game_length(),
        "__doc__": f"{name} of OpenSpiel.",
        "__module__": __name__,
    }
    return type(f"open_spiel:{spec}", (GameEnvironment,), body)
