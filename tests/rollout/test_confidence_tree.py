"""Trees by entropy and confidence: where they branch, where a branch is stopped, and that watching changes no token."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.untrained import Untrained

from turnwise.core.batch import prefix
from turnwise.core.records import Completion, Sampling, Status, Stop
from turnwise.engines.kernels.sampling import TokenSampler
from turnwise.errors import ContextOverflow, RecipeError
from turnwise.recipes.experience import piece
from turnwise.rollout.strategies import Independent
from turnwise.rollout.strategies.tree import (
    PRUNED,
    BranchRule,
    ConfidenceTree,
    PruneRule,
    WatchedSession,
    entropy_rise,
)

NUMBERS = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), max_size=24)
EAGER = BranchRule(high=0.01, low_share=0.0, confident=50.0, rise=-50.0, most=3, first=1)
HARSH = PruneRule(weak=100.0, window=2)  # stops every branch at its second token


@pytest.fixture(scope="module")
def untrained():
    return Untrained("keydoor")


def tokens(group):
    return [(t.id, t.fork, [tuple(turn.tokens) for turn in t.turns]) for t in group.trajectories]


# ------------------------------------------------------------------------ rules


def width_on_paper(rule, h, c):
    """The card's line, in its own words."""
    raw = rule.least + rule.by_entropy * (h - 0.5) / (2.0 - 0.5)
    raw -= rule.by_confidence * (c - rule.confident) / abs(rule.confident)
    return max(rule.least, min(rule.most, round(raw)))


@given(NUMBERS)
def test_branches_are_where_the_card_says(pairs):
    rule = BranchRule(high=2.0, low_share=0.25, confident=2.5, rise=0.2, most=4, first=3)
    hs, cs = [h for h, _ in pairs], [c for _, c in pairs]
    expected, begin = [], 0
    for t, h in enumerate(hs):
        c = math.fsum(cs[max(0, t - 3) : t + 1]) / len(cs[max(0, t - 3) : t + 1])
        before = hs[max(0, t - 4) : t]
        rise = h - math.fsum(before) / len(before) if before else 0.0
        if t - begin >= 3 and h >= 2.0 and c <= 2.5 and rise >= 0.2 and width_on_paper(rule, h, c) > 1:
            expected.append((t, width_on_paper(rule, h, c)))
            begin = t
    found = rule.branches(hs, cs)
    assert found == expected and all(2 <= w <= 4 for _, w in found)


@given(NUMBERS)
def test_width_one_never_branches(pairs):
    hs, cs = [h for h, _ in pairs], [c for _, c in pairs]
    assert BranchRule(high=0.1, low_share=0.0, confident=9.0, rise=-9.0, most=1).branches(hs, cs) == []


@given(NUMBERS)
def test_a_branch_is_stopped_at_the_first_token_that_meets_a_condition(pairs):
    rule = PruneRule(weak=0.8, tail_weak=2.0, rise=0.5)
    hs, cs = [h for h, _ in pairs], [c for _, c in pairs]
    tail = [sum(cs[max(0, t - 7) : t + 1]) / len(cs[max(0, t - 7) : t + 1]) for t in range(len(cs))]
    risen = [entropy_rise(hs, t, 4) for t in range(len(hs))]
    expected = None
    for t in range(len(hs)):
        weak = t >= 3 and sum(cs[t - 3 : t + 1]) / 4 < 0.8
        fell = t >= 2 and tail[t] <= 2.0 and all(k == 0 or tail[k] < tail[k - 1] for k in (t - 2, t - 1, t))
        rose = t >= 2 and all(risen[k] > 0 for k in (t - 2, t - 1, t)) and risen[t] > 0.5
        if weak or fell or rose:
            expected = t
            break
    assert rule.stops_at(hs, cs) == expected


def test_rules_without_conditions_never_stop_and_a_penalty_never_pays():
    calm = PruneRule(weak=0.0, tail_weak=0.0, rise=math.inf)
    assert calm.stops_at([1.0, 2.0, 3.0, 4.0], [0.5, 0.4, 0.3, 0.2]) is None
    assert PruneRule().penalty([9.0] * 8, [0.9] * 8) == 0.0
    # C_tail 0.2, least likely tenth 0.1, cost 0.05
    assert PruneRule().penalty([0.2] * 8, [0.1, *[0.8] * 7]) == pytest.approx(0.2 - 0.9 - 0.05)


@pytest.mark.parametrize(
    "wrong", [{"high": 0.0}, {"low_share": 1.0}, {"confident": 0.0}, {"least": 3, "most": 2}, {"window": 0}]
)
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(RecipeError, match="; write a number"):
        BranchRule(**wrong)


# ---------------------------------------------------------------------- sampling


def test_the_generator_reports_confidence(untrained):
    """−mean log p of the five most likely tokens less ln 5, against the model's own logits; never negative."""

    async def run():
        request = untrained.request()
        watched = WatchedSession(request.open_session(0))
        return await request.play("e", request.task, watched), watched

    played, watched = asyncio.run(run())
    turn = played.turns[0]
    ids = torch.tensor([[*turn.context, *turn.tokens]])
    with torch.no_grad():
        logp = untrained.stock(ids).logits[0, len(turn.context) - 1 : -1].double().log_softmax(-1)
    expected = -logp.sort(descending=True).values[:, :5].mean(-1) - math.log(5)
    found = torch.tensor(watched.confidence[: len(turn.tokens)]).double()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_confidence_is_zero_where_five_tokens_share_the_mass():
    sampler = TokenSampler([Sampling()], torch.device("cpu"))
    logits = torch.full((1, 50), -1e9)
    logits[0, :5] = 0.0
    entropy, confidence = sampler.certainty(logits)
    assert entropy.item() == pytest.approx(math.log(5), abs=1e-5) and confidence.item() == pytest.approx(0.0, abs=1e-5)


def test_watching_in_pieces_changes_no_token(untrained):
    """A rule that never stops samples in pieces of a few tokens: the same tokens and log-probabilities as one call."""

    async def run(rule):
        request = untrained.request(seed=3)
        return await request.play("e", request.task, WatchedSession(request.open_session(0), rule))

    calm = PruneRule(weak=0.0, tail_weak=0.0, rise=math.inf)
    whole, pieces = (asyncio.run(run(rule)) for rule in (None, calm))
    assert [t.tokens for t in whole.turns] == [t.tokens for t in pieces.turns]
    for a, b in zip(whole.turns, pieces.turns):
        assert list(a.logp) == pytest.approx(list(b.logp), abs=1e-4) and a.stop == b.stop


def test_a_stopped_session_keeps_what_it_sampled_and_samples_no_more():
    class Ten:
        calls = 0

        async def generate(self, ids, sampling):
            self.calls += 1
            n = sampling.max_tokens
            return Completion([7] * n, [-0.5] * n, [0.0] * n, [1] * n, Stop.LENGTH, 0.1, [1.0] * n, [0.1] * n)

    async def run():
        session = WatchedSession(Ten(), PruneRule(weak=0.4, window=6))
        done = await session.generate([1, 2], Sampling(max_tokens=40))
        with pytest.raises(ContextOverflow, match="pruned"):
            await session.generate([1, 2], Sampling(max_tokens=4))
        return done, session

    done, session = asyncio.run(run())
    assert len(done.tokens) == len(done.logp) == 6 and done.stop == Stop.LENGTH
    assert session.session.calls == 2 and session.stopped  # two pieces of four, not ten


def test_without_branches_it_is_plain_sampling(untrained):
    plain = tokens(untrained.grow(Independent()))
    assert tokens(untrained.grow(ConfidenceTree(2, BranchRule(most=1)))) == plain
    assert tokens(untrained.grow(piece("strategy", "echo,trunks=6"))) == plain


@pytest.mark.parametrize("prune", [None, HARSH])
def test_a_tree_has_the_groups_size_and_is_what_the_learner_reads(untrained, prune):
    strategy = ConfidenceTree(2, EAGER, prune)
    group = untrained.grow(strategy, size=8)
    by_id = {t.id: t for t in group.trajectories}
    assert len(by_id) == 8 and any(t.fork for t in group.trajectories)
    assert tokens(group) == tokens(untrained.grow(strategy, size=8))
    for t in group.trajectories:
        assert t.status != Status.FAILED, t.reason
        if t.fork is not None:
            parent = by_id[t.fork.parent]
            whole = [*prefix(parent, by_id), *(i for turn in parent.turns for i in (*turn.context, *turn.tokens))]
            assert whole[: len(prefix(t, by_id))] == prefix(t, by_id)
    measured, recorded = untrained.logp(group)
    torch.testing.assert_close(measured, recorded, rtol=1e-4, atol=1e-4)


def test_only_forks_are_stopped_and_carry_their_penalty(untrained):
    group = untrained.grow(ConfidenceTree(2, EAGER, HARSH), size=8)
    stopped = [t for t in group.trajectories if PRUNED in t.facts]
    assert stopped and all(t.fork is not None and t.sampled == 2 and t.facts[PRUNED] <= 0 for t in stopped)
    assert all(PRUNED in t.facts for t in group.trajectories if t.fork is not None)
