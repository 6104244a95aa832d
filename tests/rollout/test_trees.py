"""Trees of forks, inside turns and deeper than one fork: shared ids, budgets, and what the learner reads."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.untrained import Untrained

from turnwise.core.batch import prefix
from turnwise.core.records import Status, Task, Trajectory, Turn
from turnwise.errors import SettingError
from turnwise.recipes.experience import piece
from turnwise.rollout.episode import ForkPoint
from turnwise.rollout.strategies import Independent
from turnwise.rollout.strategies.tree import GrownEpisode, UncertainTokens, edit_distance, first_error
from turnwise.rollout.support import Support
from turnwise.training import episodes


@pytest.fixture(scope="module", params=["keydoor", "lookup"])
def untrained(request):
    return Untrained(request.param)


TREES = ["arpo,trunks=2", "spo_tree,factors=2/2/2,segment=3", "latr,share=0.7,look=3", "branch,trunks=2"]


@pytest.mark.parametrize("spec", TREES)
def test_a_tree_has_exactly_the_groups_size_and_every_prefix_is_its_parents(untrained, spec):
    group = untrained.grow(piece("strategy", spec), size=8)
    by_id = {t.id: t for t in group.trajectories}
    assert len(by_id) == 8 and any(t.fork for t in group.trajectories)
    for t in group.trajectories:
        assert t.status != Status.FAILED, t.reason
        if t.fork is None:
            continue
        parent = by_id[t.fork.parent]
        whole = [*prefix(parent, by_id), *(i for turn in parent.turns for i in (*turn.context, *turn.tokens))]
        assert whole[: len(prefix(t, by_id))] == prefix(t, by_id) or any(turn.restart for turn in parent.turns)


@pytest.mark.parametrize("spec", TREES)
def test_what_was_sampled_is_what_the_learner_reads(untrained, spec):
    measured, recorded = untrained.logp(untrained.grow(piece("strategy", spec), size=8))
    torch.testing.assert_close(measured, recorded, rtol=1e-4, atol=1e-4)


def test_forks_lie_inside_turns_and_trees_are_deep():
    group = Untrained("keydoor").grow(piece("strategy", "spo_tree,factors=2/2/2,segment=3"), size=8)
    by_id = {t.id: t for t in group.trajectories}
    depth = lambda t: 0 if t.fork is None else 1 + depth(by_id[t.fork.parent])  # noqa: E731
    assert max(map(depth, group.trajectories)) == 2
    assert any(t.fork and t.fork.token for t in group.trajectories)


@pytest.mark.parametrize("spec", ["arpo,trunks=6", "arpo,trunks=2,width=1", "latr,share=0", "spo_tree,factors=6"])
def test_without_branches_a_tree_is_plain_sampling(untrained, spec):
    plain = untrained.grow(Independent())
    grown = untrained.grow(piece("strategy", spec))
    same = lambda g: sorted((t.id, [tuple(turn.tokens) for turn in t.turns]) for t in g.trajectories)  # noqa: E731
    assert same(grown) == same(plain)


@pytest.mark.parametrize("spec", TREES)
def test_trees_are_deterministic(untrained, spec):
    once, again = (untrained.grow(piece("strategy", spec), seed=5) for _ in range(2))
    ids = lambda g: [(t.id, t.fork, [tuple(turn.tokens) for turn in t.turns]) for t in g.trajectories]  # noqa: E731
    assert ids(once) == ids(again)


def test_the_generator_reports_entropies(untrained):
    """Entropies of the whole distribution, against the model's own logits."""
    listed = []

    async def run():
        request = untrained.request()
        session = request.open_session(0)
        return await untrained.play("e", request.task, session, entropies=listed)

    played = asyncio.run(run())
    assert [len(e) for e in listed] == [len(turn.tokens) for turn in played.turns]
    turn = played.turns[0]
    ids = torch.tensor([[*turn.context, *turn.tokens]])
    with torch.no_grad():
        logp = untrained.stock(ids).logits[0, len(turn.context) - 1 : -1].double().log_softmax(-1)
    expected = -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close(torch.tensor(listed[0]).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_a_played_prefix_is_context_and_the_rest_is_sampled(share):
    """The ids of the solution's first part are in the context, in order; they are never among the sampled tokens; and the
    recorded log-probabilities are those of the plain policy after that prefix."""
    world = Untrained("lookup")

    async def run():
        request = world.request()
        return await request.play_all([request.open_session(0)], support=Support(share=share, played=True))

    (played,) = asyncio.run(run())
    assert played.status != Status.FAILED, played.reason
    assert played.guidance.startswith("prefix")
    resolver = episodes.SupportResolver(world.env_spec.make, world.renderer, world.env_spec.limits, world.env_spec.tools)
    given_ = asyncio.run(resolver.resolve(Support(share=share, played=True), Task("lookup", 1)))
    flat = [i for ids in given_.turns for i in ids]
    solution = asyncio.run(resolver.task_help(Task("lookup", 1))).solution
    total = sum(
        len(world.renderer.encode_turn(world.renderer.turn_text(text, world.env_spec.tools))) for text in solution
    )
    assert len(flat) + len(given_.start) == min(int(share * total), total - 1)
    context = list(played.turns[0].context)
    assert context[len(context) - len(given_.start) :] == list(given_.start)
    for ids in given_.turns:
        assert any(context[k : k + len(ids)] == list(ids) for k in range(len(context)))
    measured, recorded = world.logp(replace(world.grow(Independent(), size=1), trajectories=(played,)))
    torch.testing.assert_close(measured, recorded, rtol=1e-4, atol=1e-4)


def test_hints_in_the_record_or_outside_of_it():
    world = Untrained("keydoor")

    async def run(support):
        request = world.request()
        return (await request.play_all([request.open_session(0)], support=support))[0]

    inside, outside, plain = (asyncio.run(run(s)) for s in (Support(tier=2), Support(tier=2, recorded=False), None))
    assert len(inside.turns[0].context) > len(plain.turns[0].context)
    assert outside.turns[0].context == plain.turns[0].context
    assert inside.guidance and outside.guidance and not plain.guidance


@pytest.mark.parametrize("spec", ["r3l,diagnosis=verifier", "scope,repairs=2,diagnosis=verifier"])
def test_failed_attempts_are_retried_from_a_turn_of_their_own(untrained, spec):
    group = untrained.grow(piece("strategy", spec), size=4)
    assert len(group.trajectories) == 4 and not any(t.status == Status.FAILED for t in group.trajectories)
    by_id = {t.id: t for t in group.trajectories}
    for t in group.trajectories:
        if t.fork is not None:
            assert t.guidance and t.fork.parent in by_id and not t.fork.token


def attempted(remaining, entropies=(), status=Status.FINISHED):
    """An attempt whose turns began so many turns before the end of the solution, with the entropies of their tokens."""
    turns = tuple(Turn((1,), (2,) * 5, (-0.5,) * 5, version=(0,) * 5) for _ in remaining)
    points = [ForkPoint("a", i, None, None, {}, remaining=left) for i, left in enumerate(remaining)]
    return GrownEpisode(Trajectory("a", Task("test", 1), turns, status=status), points, list(entropies))


@pytest.mark.parametrize(
    "remaining, turn",
    [((3, 2, 2, 1), 1), ((3, 4), 0), ((3, 2, 1), 2), ((3, 2, None, 1), 1), ((None, 2), 0), ((3,), 0)],
)
def test_the_verifier_names_the_first_turn_after_which_the_solution_was_not_nearer(remaining, turn):
    assert first_error(attempted(remaining), "verifier").turn == turn


def test_surprise_names_the_turn_with_the_least_likely_first_four_tokens():
    least = [[0.5, 0.5, 0.5, 0.5, 9.0], [0.9], [0.6, 0.6, 0.6, 0.6, 0.0]]
    assert first_error(attempted((3, 2, 1), least), "surprise").turn == 1  # a mean, of four at most
    assert first_error(attempted((3, 2, 1), [[], [0.4] * 5, [0.45] * 5]), "surprise").turn == 0  # −log p where none is reported


def test_an_attempt_without_a_turn_is_not_tried_again():
    assert first_error(attempted((3, 2)), "start").turn == 0
    assert first_error(attempted(()), "start") is None
    assert first_error(attempted((3, 2), status=Status.FAILED), "verifier") is None


@pytest.mark.parametrize(
    "tokens, status, near",
    [((2, 2, 2), Status.FINISHED, True), ((5, 5, 5), Status.FINISHED, False), ((2, 2, 2), Status.FAILED, False)],
)
def test_what_comes_back_to_its_parents_tokens_has_reconverged(tokens, status, near):
    """A fork that broke is no copy of its parent: it stays, as a failure."""
    parent, child = attempted((2, 1)), attempted((1,), status=status)
    turn = replace(child.trajectory.turns[0], tokens=tokens, logp=(-0.5,) * 3, version=(0,) * 3)
    child.trajectory = replace(child.trajectory, id="b", turns=(turn,))
    assert UncertainTokens(look=3)._reconverged(child, parent.points[1], [parent]) is near


def test_a_fork_by_replay_is_a_fork_by_snapshot(monkeypatch):
    """The same tree with actions that are played again and with copies of the environment."""
    world = Untrained("keydoor")
    strategy = piece("strategy", "arpo,trunks=2,chance=1")
    tokens = lambda g: [(t.fork, [tuple(turn.tokens) for turn in t.turns], t.reward) for t in g.trajectories]  # noqa: E731
    replayed = tokens(world.grow(strategy))
    names = ("difficulty", "split", "seed", "turns", "done", "success", "layout", "state", "max_turns")
    take = lambda self: {name: getattr(self, name) for name in names}  # noqa: E731
    monkeypatch.setattr(world.env_spec.env_class, "snapshot", take)
    monkeypatch.setattr(world.env_spec.env_class, "restore", lambda self, snapshot: vars(self).update(snapshot))
    assert tokens(world.grow(strategy)) == replayed and any(fork for fork, _, _ in replayed)


def levenshtein(a, b):
    """The textbook recursion, as an oracle."""
    if not a or not b:
        return len(a) + len(b)
    return min(levenshtein(a[1:], b) + 1, levenshtein(a, b[1:]) + 1, levenshtein(a[1:], b[1:]) + (a[0] != b[0]))


@given(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), max_size=5))
def test_edit_distance(a, b):
    assert edit_distance(a, b) == levenshtein(a, b)


def test_nonsense_is_refused():
    trees = ("arpo,trunks=-1", "spo_tree,factors=2/x", "spo_tree,segment=0", "latr,share=2")
    for spec in (*trees, "r3l,diagnosis=x", "scope,repairs=-1", "scope,below=0"):
        with pytest.raises(SettingError):
            piece("strategy", spec)
