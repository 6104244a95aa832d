"""Help for a part of each group, and episodes that start near the end of a solution: who gets it, and what is recorded."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.outcomes import group_of
from support.untrained import Untrained

from turnwise.core.records import Status, Task
from turnwise.errors import RecipeError, SettingError
from turnwise.recipes.experience import piece
from turnwise.rollout.guidance import BackwardStarts, LateStarts
from turnwise.rollout.strategies import Independent
from turnwise.rollout.support import Support


@pytest.fixture(scope="module")
def untrained():
    return Untrained("keydoor", max_turns=18)


def grown(untrained, spec, size=4, live=None, seed=1, group=None):
    live = live or piece("guidance", spec).open(0)

    async def run():
        request = untrained.request(seed=seed, size=size)
        request = replace(request, group=group or request.group)
        return await live.begin(request, Independent())

    return asyncio.run(run())


def tokens(group):
    return [[tuple(turn.tokens) for turn in t.turns] for t in group.trajectories]


# ------------------------------------------------------------- half of a group


def test_half_of_a_group_is_sampled_with_the_document_and_recorded_without(untrained):
    group = grown(untrained, "trimpi,tier=2")
    plain, guided = group.trajectories[:2], group.trajectories[2:]
    assert [bool(t.guidance) for t in group.trajectories] == [False, False, True, True]
    assert {t.turns[0].context for t in guided} == {plain[0].turns[0].context}  # the document is in no training context
    measured, recorded = untrained.logp(group)
    split = sum(t.sampled for t in plain)
    torch.testing.assert_close(measured[:split], recorded[:split], rtol=1e-4, atol=1e-4)
    assert (measured[split:] - recorded[split:]).abs().max() > 1e-3  # they were sampled under another prompt


def test_no_share_is_the_strategys_group(untrained):
    assert tokens(grown(untrained, "trimpi,share=0")) == tokens(untrained.grow(Independent(), size=4))


def test_a_document_of_ones_own(untrained, tmp_path):
    text = tmp_path / "rules.txt"
    text.write_text("always say take\n")
    group = grown(untrained, f"trimpi,document={text}")
    assert group.trajectories[3].guidance.startswith("hint: always say take")
    assert piece("guidance", f"trimpi,document={text}").requirements == {"help"}
    with pytest.raises(SettingError, match="no file"):
        piece("guidance", "trimpi,document=nowhere.txt")


# ------------------------------------------------------- starts near the end


def test_the_beginning_of_a_solution_is_context_and_the_rest_is_sampled(untrained):
    group = grown(untrained, "ipa,first=3", size=3)
    plain = untrained.grow(Independent(), size=1).trajectories[0]
    for t in group.trajectories:
        assert t.status != Status.FAILED, t.reason
        assert t.guidance == "last 3 turns" and t.turns[0].context != plain.turns[0].context
        assert t.turns[0].state == group.trajectories[0].turns[0].state  # all start in the same state
    measured, recorded = untrained.logp(group)
    torch.testing.assert_close(measured, recorded, rtol=1e-4, atol=1e-4)


def test_beyond_the_beginning_a_group_is_plain(untrained):
    group = grown(untrained, "ipa,first=100")
    assert not any(t.guidance for t in group.trajectories)
    assert tokens(group) == tokens(untrained.grow(Independent(), size=4))


def test_the_last_turn_alone_solves_the_task_from_where_it_starts():
    """The state before the last turn of the solution is one turn away from the goal."""
    world = Untrained("keydoor", max_turns=18)

    async def run(left):
        request = world.request(seed=2)
        points = []
        support = Support(turns_left=left)
        await request.play("x", request.task, request.open_session(0), support=support, fork_points=points)
        return points[0].remaining

    assert [asyncio.run(run(left)) for left in (1, 2, 5)] == [1.0, 2.0, 5.0]


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=30), st.integers(1, 3), st.integers(1, 3))
def test_the_start_moves_back_with_success_and_forward_without(rates, first, by):
    rule, left = BackwardStarts(first, by, 0.5), first
    for rate in rates:
        moved = rule.move(left, rate)
        assert moved == (left + by if rate >= 0.5 else max(first, left - by) if rate == 0 else left)
        assert moved >= first
        left = moved


def test_what_was_learnt_survives_a_restart():
    live = BackwardStarts().open(0)
    easy, hard = Task("t", 1), Task("t", 2)
    guided = lambda group: replace(  # noqa: E731
        group, trajectories=tuple(replace(t, guidance="last 1 turns") for t in group.trajectories)
    )
    for _ in range(3):
        live.observe(guided(group_of(easy, [1, 1])))
        live.observe(guided(group_of(hard, [0, 0])))
    assert live.left == {easy.key: 4, hard.key: 1}
    live.observe(guided(group_of(easy, [1, 0, 0, 0])))  # a quarter is neither enough nor nothing
    assert live.left[easy.key] == 4
    live.observe(guided(group_of(easy, [1, 0])))  # a half is enough
    assert live.left[easy.key] == 5 and "guidance/withdrawn" not in live.metrics()
    live.observe(group_of(easy, [1, 0]))  # at the prompt: there is no earlier start
    live.observe(group_of(easy, [1, 0, 0]))
    assert live.left[easy.key] == 5 and live.metrics()["guidance/withdrawn"] == 1
    live.observe(group_of(easy, [0, 0]))
    assert live.left[easy.key] == 4
    again = BackwardStarts().open(0)
    again.load_state_dict(json.loads(json.dumps(live.state_dict())))
    assert again.left == live.left and again.metrics() == live.metrics()


def test_late_starts_are_drawn_evenly_and_by_group(untrained):
    live = LateStarts(starts=3, apart=2).open(7)
    seen = Counter()
    for n in range(48):
        group = grown(untrained, "", size=2, live=live, group=str(n))
        (place,) = {t.guidance for t in group.trajectories}  # one place for all episodes of a group
        seen[place] += 1
    assert set(seen) == {"", "last 2 turns", "last 4 turns", "last 6 turns"} and min(seen.values()) >= 4


def test_no_late_starts_is_plain_sampling(untrained):
    assert tokens(grown(untrained, "wovr,starts=0")) == tokens(untrained.grow(Independent(), size=4))


@pytest.mark.parametrize("wrong", [{"first": 0}, {"by": 0}, {"enough": 0.0}])
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(RecipeError, match="; write a number"):
        BackwardStarts(**wrong)
