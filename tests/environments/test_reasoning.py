"""Datasets of reasoning-gym as environments. Without the package only its absence is tested."""

import inspect
import random
import sys
import time

import pytest
from support.players import SPLITS, play

from turnwise.environments import load, make
from turnwise.environments.base import text_action
from turnwise.environments.checker.check import check_env
from turnwise.environments.families.reasoning_gym import ANSWER_FORMAT, RUN_ANSWERS, extract_answer, import_factory
from turnwise.errors import SettingError

NAMES = ("basic_arithmetic", "chain_sum", "gcd", "gsm_symbolic", "lcm", "spell_backward")


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SettingError, match=r"pip install 'turnwise-rl\[reasoning\]'"):
        load("reasoning_gym:chain_sum,max_terms=3")  # a name that no other test has made a class of


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 12 \n", "12"),
        ("3 + 9 is\n<answer> 12</answer>", "12"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("", ""),
    ],
)
def test_what_is_read_as_the_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.integration
class TestWithThePackage:
    @pytest.fixture(autouse=True)
    def needs(self):
        pytest.importorskip("reasoning_gym")

    @pytest.mark.parametrize("name", NAMES)
    def test_every_answer_of_its_own_scores_one(self, name):
        for split in SPLITS:
            for seed in range(50):
                texts, step, total = play(make(f"reasoning_gym:{name}", 1, split), seed, lambda env: env.oracle())
                assert total == 1.0 and step.info["success"] and step.terminated, texts

    @pytest.mark.parametrize("name", ("chain_sum", "gsm_symbolic"))
    def test_contract(self, name):
        found = check_env(f"reasoning_gym:{name}", episodes=6)
        assert not found.problems and not found.warnings
        assert {"oracle", "random_action", "demonstrate"} == set(found.played)

    @pytest.mark.parametrize("name", NAMES)
    def test_splits_share_no_question(self, name):
        asked = [{str(make(f"reasoning_gym:{name}", 1, split).reset(seed)) for seed in range(200)} for split in SPLITS]
        assert not asked[0] & asked[1]
        assert len(asked[0]) > 20

    def test_difficulty_is_the_level_of_the_curriculum(self):
        for difficulty in (1, 2, 3):
            env = make("reasoning_gym:chain_sum", difficulty)
            shapes = set()
            for seed in range(100):
                env.reset(seed)
                shapes.add((env.entry["metadata"]["num_terms"], env.entry["metadata"]["num_digits"]))
            assert shapes == {(t, d) for t in range(2, difficulty + 2) for d in range(1, difficulty + 1)}

    def test_a_dataset_without_levels_has_its_defaults_alone(self):
        for name in ("gsm_symbolic", "knight_swap"):  # no curriculum; one that its own configuration refuses
            assert load(f"reasoning_gym:{name}").difficulties == (1,)
        with pytest.raises(SettingError, match="no difficulty 2"):
            make("reasoning_gym:gsm_symbolic", 2)

    def test_fields_of_the_configuration(self):
        kind = load("reasoning_gym:chain_sum,max_terms=2,max_digits=2")
        assert kind.difficulties == (1,)  # nothing is left for a level to change
        env = kind()
        for seed in range(30):
            env.reset(seed)
            assert env.entry["metadata"]["num_terms"] == 2
        assert load("reasoning_gym:chain_sum,max_terms=2,max_digits=2") is kind

    @pytest.mark.parametrize(
        ("member", "words"),
        [
            ("chainsum", "did you mean 'chain_sum'"),
            ("", "write reasoning_gym:NAME"),
            ("composite", "no dataset 'composite'"),
            ("countdown", "would execute model output"),
            ("chain_sum,max_term=2", "did you mean 'max_terms'"),
            ("chain_sum,2", "write key=value"),
            ("chain_sum,seed=2", "set by the run"),
            ("chain_sum,min_terms=4", "max_terms must be >= min_terms"),
        ],
    )
    def test_wrong_names_say_what_to_write(self, member, words):
        with pytest.raises(SettingError, match=words):
            load(f"reasoning_gym:{member}")

    def test_no_score_that_is_offered_runs_an_answer(self):
        """By its source: a later version of the package may bring more."""
        kinds = import_factory().DATASETS
        running = {
            name
            for name, (kind, _) in kinds.items()
            if any(word in inspect.getsource(kind.score_answer) for word in ("eval(answer", "parse_expr(", "exec("))
        }
        assert running <= RUN_ANSWERS <= set(kinds)

    def test_prompt_answer_and_reply(self):
        env = make("reasoning_gym:chain_sum")
        [message] = env.reset(3)
        assert message["content"] == f"{env.entry['question']}\n{ANSWER_FORMAT}"
        step = env.step(text_action("nothing"))
        assert (step.reward, step.info["success"]) == (0.0, False)
        assert step.messages[0]["content"] == f"wrong: it is {env.answer()}."
        assert env.step(text_action(f"so <answer>{env.answer()}</answer>")).info["success"]
        assert env.step(text_action("1" * 5000)).reward == 0.0

    def test_half_of_the_demonstrations_are_right_and_the_others_near(self):
        env, rng = make("reasoning_gym:chain_sum", 2), random.Random(0)
        missed = []
        for seed in range(200):
            env.reset(seed)
            missed.append(abs(int(env.demonstrate(rng).text) - int(env.answer())))
        assert set(missed) == {0, 1, 2, 10} and 80 < missed.count(0) < 120

    def test_a_puzzle_without_a_reference_answer_tells_none(self):
        env = make("reasoning_gym:graph_color")
        env.reset(0)
        assert env.answer() is None
        assert env.step(text_action("{}")).messages[0]["content"] == "wrong."

    def test_an_answer_that_never_ends_is_wrong_and_the_next_is_scored(self):
        """``Fraction("1e30000000")`` computed for minutes in our own process, and nothing could interrupt it."""
        env = make("reasoning_gym:coin_flip")
        env.reset(0)
        began = time.monotonic()
        assert env.step(text_action("1e30000000")).reward < 1
        assert time.monotonic() - began < 60  # the limit is 2 s; loading the package in the process takes as long
        assert env.step(text_action(env.answer())).info["success"]
