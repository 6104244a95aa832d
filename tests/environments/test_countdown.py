from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.environments.base import text_action
from turnwise.environments.builtin.countdown import Countdown, CountdownProblem, IllegalExpression, evaluate, solve


@pytest.mark.parametrize(
    ("text", "value"),
    [("(3+7)*2", 20), ("3+7*2", 17), ("7-3*2", 1), ("3/(7-2)", Fraction(3, 5)), (" 2*(3 - 7) ", -8)],
)
def test_values_by_hand(text, value):
    assert evaluate(text, (3, 7, 2)) == value


@pytest.mark.parametrize(
    "text",
    ["", "3+7", "3+7+2+2", "3+7+3", "3**7**2", "3//7+2", "-3+7+2", "3 7 2", "(3+7)*2=20", "(3+7)*2.0", "3+7+a", "327",
     "__import__('os')", "3,7,2", "2/(3-7)*0", "(" * 60 + "3+7+2" + ")" * 59, "٣+7+2", "003+7+2", "[3+7+2]"],
)  # fmt: skip
def test_what_is_not_legal(text):
    with pytest.raises(IllegalExpression):
        evaluate(text, (3, 7, 2))


def test_division_by_zero_is_words():
    with pytest.raises(IllegalExpression, match="divides by 0"):
        evaluate("3/(7-7)", (3, 7, 7))


@given(st.text(max_size=150))
def test_any_text_is_a_value_or_words(text):
    try:
        assert isinstance(evaluate(text, (3, 7, 2)), Fraction)
    except IllegalExpression as words:
        assert str(words)


def test_search_finds_the_known_hard_one():
    assert evaluate(solve(CountdownProblem((1, 5, 6, 7), 47)), (1, 5, 6, 7)) == 47


def test_content_ignores_order():
    assert CountdownProblem((3, 7), 10).key == CountdownProblem((7, 3), 10).key != CountdownProblem((7, 3), 4).key


def test_rewards():
    env = Countdown()
    env.reset(0)
    a, b = env.problem.numbers
    env.problem = CountdownProblem((a, b), a + b)
    right, wrong, illegal = (env.step(text_action(text)) for text in (f"{a}+{b}", f"{a}-{b}", f"{a}+{a}+{b}"))
    assert [s.reward for s in (right, wrong, illegal)] == [1.0, 0.0, 0.0]
    assert [s.info["rewards"]["format"] for s in (right, wrong, illegal)] == [1.0, 1.0, 0.0]
    assert [s.info["tool_errors"] for s in (right, wrong, illegal)] == [0, 0, 1]
    assert all(s.terminated for s in (right, wrong, illegal))
