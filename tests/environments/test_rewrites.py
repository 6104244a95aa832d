"""Harder wordings of word problems: another text, the same answer, solvable by the scripted policy."""

from __future__ import annotations

import asyncio
import random
import re

import pytest

from turnwise import environments
from turnwise.environments.builtin.calculator import QUESTIONS, REWRITES, TERMS, Calculator, make_problem, reworded
from turnwise.errors import SettingError


@pytest.mark.parametrize("wording", range(1, 1 + len(REWRITES)))
@pytest.mark.parametrize("difficulty", QUESTIONS)
def test_a_wording_is_another_text_with_the_same_answer(difficulty, wording):
    rng = random.Random(difficulty)
    for problem in (make_problem(rng, difficulty) for _ in range(100)):
        written = reworded(problem, wording)
        assert written == reworded(problem, wording) and written.question != problem.question
        assert written.answer == problem.answer
        shown = dict(re.findall(r"\b([a-z])=(\d+)", written.question))
        assert shown == {
            name: str(value) for name, value in written.numbers
        }  # all that the expression needs, and no more
        assert set(re.findall(r"[a-z]", written.expression)) == set(shown)


def test_a_sub_problem_hides_one_number():
    problem = make_problem(random.Random(3), 3)
    written = reworded(problem, 3)
    hidden = set(dict(problem.numbers)) - set(dict(written.numbers))
    assert len(hidden) == 1 and set(dict(written.numbers)) - set(dict(problem.numbers)) == {"p", "q"}
    term = reworded(problem, 2).question
    assert term.split()[1] in TERMS and term.endswith(f"What is the {term.split()[1]}?")


async def played(env: Calculator, seed: int) -> float:
    env.reset(seed)
    try:
        for _ in range(env.max_turns):
            step = await env.step(env.oracle())
            if step.terminated or step.truncated:
                return step.reward
    finally:
        env.close()
    return 0.0


@pytest.mark.parametrize("wording", range(4))
def test_the_scripted_policy_solves_every_wording(wording):
    for seed in range(4):
        env = Calculator(difficulty=1 + seed % 3)
        env.wording = wording
        assert asyncio.run(played(env, seed)) == 1.0


def test_training_tasks_draw_a_wording_and_held_out_ones_keep_the_original():
    cls = environments.load("calculator,rewrites=3")

    def texts(maker, split):
        return [maker(difficulty=2, split=split).reset(seed)[0]["content"] for seed in range(200)]

    plain, drawn = texts(Calculator, "train"), texts(cls, "train")
    changed = sum(a != b for a, b in zip(plain, drawn))
    assert 120 <= changed <= 180  # three of four
    assert drawn == texts(cls, "train") and texts(cls, "held_out") == texts(Calculator, "held_out")
    answers = [maker(difficulty=2) for maker in (Calculator, cls)]
    for seed in range(50):
        for env in answers:
            env.reset(seed)
        assert answers[0].answer() == answers[1].answer()
    with pytest.raises(SettingError, match="rewrites is 4; write 0 to 3"):
        Calculator(rewrites=4)


@pytest.mark.parametrize("wording", range(4))
def test_imperfect_demonstrations_stay_imperfect(wording):
    """A demonstration that should fail does: an undefined name is one under every wording."""
    from turnwise.environments.builtin.calculator import _invalid_expression, _wrong_expression

    rng = random.Random(wording)
    for _ in range(200):
        problem = reworded(make_problem(rng, rng.choice((1, 2, 3))), wording)
        names = dict(problem.numbers)
        with pytest.raises((SyntaxError, NameError)):
            eval(_invalid_expression(problem.expression, rng), {"__builtins__": {}}, names)
        assert eval(_wrong_expression(problem.expression, rng), {"__builtins__": {}}, names) is not None
