"""The memory of finished tasks: what is remembered, what is shown, and that an empty one changes nothing."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.outcomes import episode

from turnwise.core.records import Group, Task
from turnwise.recipes.experience import piece
from turnwise.rollout.guidance import cosine
from turnwise.rollout.strategies import GroupRequest, Independent

WORDS = st.lists(st.sampled_from(["red", "blue", "green", "one", "two"]), max_size=6)


class Session:
    def park(self):
        pass

    def close(self):
        pass


def told(key, task, question, success, guidance=""):
    contents = (("system", "rules"), ("user", question), ("assistant", f"did {key}"))
    says = tuple({"role": role, "content": content} for role, content in contents)
    return replace(episode(key, task, success, guidance=guidance), messages=says)


def finished(n, question, *successes):
    task = Task("t", n)
    return Group(str(n), task, tuple(told(f"{n}.{i}", task, question, s) for i, s in enumerate(successes)))


def play(live, question, size=4, task=None):
    task, given = task or Task("t", 99), []

    async def one(key, task, session, temperature_scale=1.0, support=None, **more):
        given.append(support)
        return told(key, task, question, False, support.label if support else "")

    async def run():
        return await live.begin(GroupRequest("9", task, size, lambda i, draft=False: Session(), one), Independent())

    return asyncio.run(run()), given


def test_an_empty_memory_or_no_cases_is_the_plain_policy():
    group, given = play(piece("guidance", "memento").open(0), "red")
    assert given == [None] * 4 and len(group.trajectories) == 4 and not any(t.guidance for t in group.trajectories)
    live = piece("guidance", "memento,cases=0").open(0)
    live.observe(finished(0, "red", True))
    assert play(live, "red")[1] == [None] * 4
    assert [live.plain(4), piece("guidance", "memento").open(0).plain(1)] == [0, 0]  # the strategy grows these groups


def test_similar_cases_are_shown_by_outcome_after_one_plain_rollout():
    live = piece("guidance", "memento,cases=2").open(0)
    for n, (question, success) in enumerate([("blue two", True), ("red one", True), ("red one two", False)]):
        live.observe(finished(n, question, success))
    group, given = play(live, "red one")
    assert given[0] is None and len({s.text for s in given[1:]}) == 1 and given[1].recorded
    text = given[1].text
    assert (
        text.index("solved") < text.index("did 1.0") < text.index("failed") < text.index("did 2.0")
        and "did 0.0" not in text
    )
    assert [bool(t.guidance) for t in group.trajectories] == [False, True, True, True]
    assert live.metrics()["guidance/cases"] == 3 and live.metrics()["guidance/cases_solved"] == 2


def test_one_case_by_task_the_success_first_and_never_the_task_itself():
    live = piece("guidance", "memento,size=2").open(0)
    live.observe(finished(0, "red", False, True))
    assert live.stored["t/train/1/0"] == ["red", "red\ndid 0.1", True]
    live.observe(finished(0, "red", False))
    assert live.stored["t/train/1/0"] == ["red", "red\ndid 0.0", False]
    assert play(live, "red", task=Task("t", 0))[1] == [None] * 4
    for n in (1, 2):
        live.observe(finished(n, "blue", True))
    assert list(live.stored) == ["t/train/1/1", "t/train/1/2"]


def test_what_a_guided_prompt_shows_is_not_remembered():
    live = piece("guidance", "memento").open(0)
    group = finished(0, "red", False)
    helped = told("0.9", group.task, "red\n\nearlier tasks that were solved: blue", True, "example")
    live.observe(replace(group, trajectories=(*group.trajectories, helped)))
    assert live.stored["t/train/1/0"] == ["red", "red\ndid 0.9", True]


@given(a=WORDS, b=WORDS)
def test_similarity(a, b):
    one, two = Counter(a), Counter(b)
    assert -1e-9 <= cosine(one, two) <= 1 + 1e-9 and abs(cosine(one, two) - cosine(two, one)) < 1e-12
    assert not a or abs(cosine(one, one) - 1) < 1e-9


# ------------------------------------------------------------------- learned retrieval


def shown_to(live, question, n, *successes):
    """A group of task ``n`` that sees cases, and what became of its episodes."""
    group = finished(n, question, False)
    support = live.support(group)
    guided = tuple(told(f"{n}.{i + 1}", group.task, question, s, support.label) for i, s in enumerate(successes))
    live.observe(replace(group, trajectories=(*group.trajectories, *guided)))
    return support


def test_the_weights_are_those_of_logistic_regression():
    """Written out: features bias, likeness, solved, one for each common word; one step for each episode and case."""
    live = piece("guidance", "memento,cases=2,rate=0.5").open(0)
    live.observe(finished(1, "red one", True))
    live.observe(finished(2, "blue one", False))
    shown_to(live, "red one two", 3, True, False)
    alike = [2 / (2 * 3) ** 0.5, 1 / (2 * 3) ** 0.5]  # cosines of 0/1 word counts
    names = ["likeness", "", "solved", "both one", "both red"]
    rows = [[alike[0], 1, 1, 1, 1], [alike[1], 1, 0, 1, 0]]  # the more alike first
    w = [1.0, 0, 0, 0, 0]
    for label in (1.0, 0.0):
        for x in rows:
            q = 1 / (1 + math.exp(-sum(a * b for a, b in zip(w, x))))
            w = [a + 0.5 * (label - q) * b for a, b in zip(w, x)]
    assert [live.weights[name] for name in names] == pytest.approx(w, rel=1e-12)


def test_cases_that_help_come_first_and_those_that_do_not_last():
    live = piece("guidance", "memento,cases=1,rate=0.5").open(0)
    live.observe(finished(1, "red one", True))
    live.observe(finished(2, "blue one", True))
    assert "did 1.0" in shown_to(live, "red blue red", 90).text, "at first the most similar"
    for n in range(100, 120):  # tasks with "red" that see a case with "red" fail, those with "blue" succeed
        shown_to(live, "red red", n, False)
        live.stored.pop(f"t/train/1/{n}")
        shown_to(live, "blue blue", n, True)
        live.stored.pop(f"t/train/1/{n}")
    live.stored.pop("t/train/1/90")
    assert "did 2.0" in live.support(finished(91, "red blue red", False)).text


def test_without_a_rate_nothing_is_learned():
    plain, zero = (piece("guidance", spec).open(0) for spec in ("memento", "memento,rate=0"))
    for live in (plain, zero):
        live.observe(finished(1, "red one", True))
        shown_to(live, "red", 2, True, False)
        assert live.weights == {"likeness": 1.0} and not live.shown


def test_what_was_learned_survives_a_resume():
    live = piece("guidance", "memento,rate=0.5").open(0)
    live.observe(finished(1, "red one", True))
    shown_to(live, "red", 2, True)
    live.support(finished(3, "red", False))
    again = piece("guidance", "memento,rate=0.5").open(0)
    again.load_state_dict(json.loads(json.dumps(live.state_dict())))
    assert (again.weights, again.shown) == (live.weights, live.shown) and again.shown and len(again.weights) > 1
