
import pytest
from support.players import play

from turnwise.environments.base import text_action
from turnwise.environments.builtin.guess import ATTRIBUTES, QUESTIONS, THINGS, Guess, best_question, divide, solvable

FOUR = ("big red ball", "big blue ball", "small red ball", "small blue ball")


def test_halving_by_hand():
    assert len(THINGS) == 32
    assert best_question(FOUR) == "big"
    assert divide(FOUR, "red") == (("big red ball", "small red ball"), ("big blue ball", "small blue ball"))
    assert solvable(FOUR, 2) and not solvable(FOUR, 1)
    colours = ("big red ball", "big blue ball", "big green ball", "big black ball")
    assert solvable(colours, 3) and not solvable(colours, 2)  # each question removes one candidate


@pytest.mark.parametrize("difficulty", Guess.difficulties)
def test_asking_in_a_fixed_order_is_too_slow(difficulty):
    """A player who remembers everything but does not choose its questions wins far less often than one who does."""

    def fixed(env):
        if env.turns < QUESTIONS[difficulty]:
            return text_action(f"is it {ATTRIBUTES[-1 - env.turns]}?")
        return env.oracle()

    won = [play(Guess(difficulty=difficulty), seed, fixed)[1].info["success"] for seed in range(200)]
    assert sum(won) / len(won) < 0.7


def test_a_wrong_guess_ends_it_and_a_wrong_word_costs_a_turn():
    env = Guess()
    env.reset(0)
    slip = env.step(text_action("is it purple?"))
    assert slip.info == {"tool_errors": 1} and "2 left" in slip.messages[0]["content"]
    other = next(letter for letter in "abcd" if letter != env.answer()[-1])
    end = env.step(text_action(f"Guess {other}."))
    assert end.terminated and end.info["success"] is False and env.answer()[-1] in end.messages[0]["content"]


def test_questions_left_unused_are_truncated_not_won():
    _, step, total = play(Guess(), 0, lambda env: text_action("is it red?"))
    assert step.truncated and not step.terminated and step.info["success"] is False and total == 0


def test_state_key_is_the_set_of_candidates():
    one, two = Guess(difficulty=3), Guess(difficulty=3)
    one.reset(4), two.reset(4)
    for word in ("red", "big"):
        one.step(text_action(f"is it {word}?"))
    for word in ("big", "red"):
        two.step(text_action(f"is it {word}?"))
    assert one.state_key() == two.state_key()
    assert one.problem.hidden in one.state_key()


def test_each_observation_stands_alone():
    env = Guess(difficulty=2)
    env.reset(3)
    step = env.step(text_action(f"is it {best_question(env.remaining)}?"))
    text = step.messages[0]["content"]
    assert step.info["facts"] == {"question": 1.0}
    for thing, letter in zip(env.problem.candidates, "abcdefg"):
        assert (f"{thing} {letter}" in text) == (thing in env.remaining)
    assert env.step(text_action(env.answer())).info["success"]
