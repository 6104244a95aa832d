"""Environments of other packages: played to the end by their oracle or at random, refused in words where they cannot be."""

from __future__ import annotations

import random
import sys
import types

import pytest

from turnwise import environments
from turnwise.core.protocols import Step
from turnwise.environments.base import text_action
from turnwise.environments.contract import read_messages, read_step
from turnwise.errors import SettingError


def load(name, *packages):
    for package in packages:
        pytest.importorskip(package)
    return environments.load(name)


def play(cls, choose, seed=0, split="train", **more):
    """One episode; its steps. ``choose(env, rng)`` is the policy."""
    env, rng, steps = cls(split=split, **more), random.Random(seed), []
    assert read_messages(env.reset(seed), "reset")
    try:
        for _ in range(cls.max_turns + 1):
            step = read_step(env.step(choose(env, rng)))
            steps.append(step)
            if step.terminated or step.truncated:
                return steps
    finally:
        env.close()
    raise AssertionError("the episode did not end at its turn limit")


def oracle(env, rng):
    return env.oracle()


def at_random(env, rng):
    return env.random_action(rng)


def nonsense(env, rng):
    return text_action(rng.choice(["", "answer: _", "\ud800", "1e30000000", "[[[[", "go " * 400, "left\nright"]))


def succeeded(steps: list[Step]) -> bool:
    return bool(steps[-1].info.get("success"))


@pytest.mark.parametrize(
    ("name", "meant"), [("openspiel:kuhn_poker", "open_spiel:"), ("textwrld:custom", "textworld:")]
)
def test_a_misspelt_family_is_refused_with_the_one_it_resembles(name, meant):
    with pytest.raises(SettingError, match=f"did you mean {meant}"):
        environments.load(name)


def test_a_module_that_is_there_is_never_taken_for_a_family(tmp_path, monkeypatch):
    (tmp_path / "textwrld.py").write_text("from turnwise.environments.builtin.nim import Nim\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert environments.load("textwrld:Nim").__name__ == "Nim"


def test_a_class_of_the_running_program_is_found(monkeypatch):
    """A program that is run has a module without a spec."""
    module = types.ModuleType("running_program")
    module.__spec__, module.Nim = None, environments.load("nim")
    monkeypatch.setitem(sys.modules, "running_program", module)
    assert environments.load("running_program:Nim").__name__ == "Nim"


@pytest.mark.integration
@pytest.mark.parametrize("world", ["GoToObj", "GoToRedBall", "PickupLoc", "OpenDoor"])
def test_the_bot_solves_missions_of_minigrid(world):
    cls = load(f"minigrid:BabyAI-{world}-v0", "minigrid")
    assert all(succeeded(play(cls, oracle, seed)) for seed in range(5))
    assert not succeeded(play(cls, nonsense))


@pytest.mark.integration
def test_a_minigrid_world_is_told_in_words_that_fit_what_is_seen():
    cls = load("minigrid:BabyAI-GoToRedBallNoDists-v0", "minigrid")
    env = cls()
    first = env.reset(0)[0]["content"]
    assert first.startswith("go to the red ball.") and "red ball" in first.split("you see")[1]
    before = env.world.unwrapped.agent_dir
    env.step(text_action("left"))
    assert env.world.unwrapped.agent_dir == (before - 1) % 4


@pytest.mark.integration
def test_a_demonstrator_that_errs_still_has_a_plan():
    cls = load("minigrid:BabyAI-GoToObj-v0", "minigrid")
    ends = [play(cls, lambda env, rng: env.demonstrate(rng), seed) for seed in range(10)]
    assert sum(map(succeeded, ends)) >= 5


@pytest.mark.integration
@pytest.mark.parametrize("name", ["FrozenLake-v1,is_slippery=false", "CliffWalking-v1", "Blackjack-v1", "CartPole-v1"])
def test_gymnasium_worlds_end(name):
    cls = load(f"gymnasium:{name}", "gymnasium")
    for policy in (at_random, nonsense):
        play(cls, policy)


@pytest.mark.integration
def test_the_shortest_way_over_the_ice_succeeds():
    cls = load("gymnasium:FrozenLake-v1,is_slippery=false", "gymnasium")
    way = iter(["down", "down", "right", "right", "down", "right"])
    steps = play(cls, lambda env, rng: text_action(next(way)))
    assert succeeded(steps) and steps[-1].reward == 1.0 and "[G]" in steps[-1].messages[0]["content"]


@pytest.mark.integration
@pytest.mark.parametrize("game", ["kuhn_poker", "leduc_poker", "tic_tac_toe", "nim", "connect_four"])
def test_a_match_against_oneself_pays_every_seat(game):
    cls = load(f"open_spiel:{game}", "pyspiel")
    for seed in range(5):
        last = play(cls, at_random, seed)[-1]
        assert last.reward + sum(last.info["paid"].values()) == pytest.approx(0)
    lost = play(cls, nonsense)[-1]
    assert lost.reward == cls.game.min_utility() and lost.info["tool_errors"] == 1


@pytest.mark.integration
def test_exploitability_of_known_policies():
    """Uniform play of Kuhn poker loses 11/24 to a best response; an equilibrium loses nothing."""
    pytest.importorskip("pyspiel")
    import pyspiel

    from turnwise.environments.families.open_spiel import equilibrium, exploitability, legal_words, prompt

    game = pyspiel.load_game("kuhn_poker")
    assert exploitability(game, lambda _, words: dict.fromkeys(words, 1.0)) == pytest.approx(11 / 24)
    table = {}
    policy = equilibrium("kuhn_poker")
    for state in policy.states:
        chances = policy.action_probabilities(state)
        table[prompt(state)] = dict(zip(legal_words(state), (chances[a] for a in state.legal_actions())))
    assert exploitability(game, lambda text, _: table[text]) < 0.01


@pytest.mark.integration
def test_a_scripted_opponent_holds_the_other_seat():
    cls = load("open_spiel:tic_tac_toe,opponent=random", "pyspiel")
    assert cls.agents == ()
    seats = {play(cls, at_random, seed)[0].messages[0]["content"].split(":")[0] for seed in range(6)}
    assert {"player 1", "player 2"} & seats
    assert not play(cls, at_random)[-1].info["paid"]


@pytest.mark.integration
@pytest.mark.parametrize("game", ["TicTacToe-v0", "KuhnPoker-v0", "KuhnPoker-v0,opponent=random"])
def test_textarena_games_end(game):
    cls = load(f"textarena:{game}", "textarena")
    for seed in range(3):
        play(cls, at_random, seed)
    play(cls, nonsense)


@pytest.mark.integration
@pytest.mark.parametrize(
    "category", ["simple_python", "multiple", "parallel", "irrelevance", "live_simple", "multi_turn_base"]
)
def test_reference_calls_are_right_and_others_are_wrong(category):
    cls = load(f"bfcl:{category}", "bfcl_eval")
    for split in ("train", "held_out"):
        assert all(succeeded(play(cls, oracle, seed, split)) for seed in range(20))
    ids = [{e["id"] for e in cls.entries[split]} for split in ("train", "held_out")]
    assert ids[0] and ids[1] and not ids[0] & ids[1]
    if category != "irrelevance":
        assert not any(succeeded(play(cls, lambda env, rng: text_action("no"), seed)) for seed in range(10))
        assert 0 < sum(succeeded(play(cls, lambda env, rng: env.demonstrate(rng), seed)) for seed in range(40)) < 40


@pytest.mark.integration
@pytest.mark.slow
def test_the_gold_path_of_scienceworld_succeeds():
    cls = load("scienceworld:find-plant", "scienceworld")
    steps = play(cls, oracle)
    assert succeeded(steps) and sum(step.reward for step in steps) == pytest.approx(1.0)


@pytest.mark.integration
@pytest.mark.slow
def test_the_known_policy_wins_a_generated_game_of_textworld(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cls = load("textworld:custom,rooms=1,objects=2,quest=1,games=2", "textworld")
    assert succeeded(play(cls, oracle, split="held_out"))
    assert not succeeded(play(cls, nonsense))


WRONG = {
    "minigrid:BabyAI-GoToNothing-v0": ("minigrid", "no world"),
    "gymnasium:FrozenLaek-v1": ("gymnasium", "FrozenLake-v1"),
    "gymnasium:Pendulum-v1": ("gymnasium", "discrete"),
    "gymnasium:FrozenLake-v1,slipery=1": ("gymnasium", "slipery"),
    "open_spiel:kuhn_pokre": ("pyspiel", "kuhn_poker"),
    "open_spiel:kuhn_poker,opponent=me": ("pyspiel", "opponent"),
    "open_spiel:chess,opponent=optimal": ("pyspiel", "optimal"),
    "textarena:TicTacTow-v0": ("textarena", "TicTacToe-v0"),
    "textworld:nowhere.z8": ("textworld", "game file"),
    "textworld:custom,room=3": ("textworld", "rooms"),
    "bfcl:simpel": ("bfcl_eval", "simple"),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_member_is_refused_in_words(name):
    package, words = WRONG[name]
    pytest.importorskip(package)
    with pytest.raises(SettingError, match=words):
        environments.load(name)


@pytest.mark.parametrize(
    "family", ["minigrid", "gymnasium", "open_spiel", "textarena", "scienceworld", "textworld", "bfcl"]
)
def test_a_family_without_its_package_says_how_to_install_it(family, monkeypatch):
    from turnwise.environments.families import adapter, scienceworld

    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(scienceworld, "IDLE", [])
    monkeypatch.setattr(scienceworld.shutil, "which", lambda program: program)  # as if Java were here
    monkeypatch.setattr(adapter.importlib, "import_module", missing)
    module = environments.FAMILIES[family].rpartition(".")[2]
    loaded = __import__(f"turnwise.environments.families.{module}", fromlist=["environment"])
    with pytest.raises(SettingError, match="pip install"):
        loaded.environment.__wrapped__("anything")
