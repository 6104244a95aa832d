"""Corners of pieces that random batches hardly meet: ties, exact limits, tolerances, controllers, and what is logged."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from oracles import records
from oracles.records import Trajectory, Turn, token
from support import forests
from support.batches import from_oracle, records_of

from turnwise import recipes
from turnwise.algebra import diagnostics
from turnwise.algebra.mask import OneSided
from turnwise.algebra.piece import MicroBatchView, StepView
from turnwise.algebra.term import Term
from turnwise.core.batch import pack
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.signals import Signal
from turnwise.credit.metrics import measure_credit
from turnwise.credit.preference import LabelledPairs, LogRatioScore, chosen_and_rejected, ranking_metrics
from turnwise.credit.tracker import Solved
from turnwise.recipes.families.actor_critic import KLController
from turnwise.recipes.families.entropy import DampEntropyChange, FallbackAboveLimit
from turnwise.recipes.families.group_credit import LEVELS, TailRisk
from turnwise.recipes.families.off_policy import TwoSided
from turnwise.recipes.families.segment_credit import AmplifiedPositive, ForkTree
from turnwise.recipes.families.trust_region import BalancedClip, LastTurnFirst
from turnwise.recipes.families.turn_credit import SameRecentStates


@dataclass(frozen=True)
class Given(Term):
    """Numbers of trajectories."""

    values: tuple[float, ...]

    def __call__(self, batch):
        return batch.tree.field(TRAJECTORY, self.values, torch.float64)


def rows_of(*rewards, logp=-1.0):
    rows = [Trajectory([Turn([token(logp), token(logp)], reward)]) for reward in rewards]
    for at, one in enumerate(rows):
        one.lot = (at + 1) / 64
    return from_oracle([rows])


# ----------------------------------------------------------------------- exact limits


def test_a_ratio_at_the_bound_is_kept():
    batch, _ = rows_of(0.0, 0.0, 0.0)
    tokens = lambda *x: batch.tree.field(TOKEN, [v for v in x for _ in range(2)], torch.float64)  # noqa: E731
    rho, mask = tokens(0.5, 0.5 - 1e-9, 1.5), OneSided(0.5, 0.5)
    view = MicroBatchView(batch, {})
    assert mask(rho, tokens(-1, -1, 1), view).x.tolist() == [True, True, False, False, True, True]
    assert mask(rho, tokens(0, 0, 0), view).x.all()


def test_the_ring_around_the_trust_region_leaves_its_edges_in():
    batch, _ = rows_of(0.0)
    view, mask = MicroBatchView(batch, {}), TwoSided(0.5, 0.5, 0.75, 2.0)
    kept = {1.5: "+-", 1.5 + 1e-9: "", 0.5: "+-", 0.5 - 1e-9: "", 0.25: "+", 0.25 + 1e-9: "", 3.0: "-", 3.0 - 1e-9: ""}
    for ratio, signs in kept.items():
        rho = batch.tree.full(TOKEN, ratio, torch.float64)
        for sign in "+-":
            adv = batch.tree.full(TOKEN, float(f"{sign}1"), torch.float64)
            assert bool(mask(rho, adv, view).at(TOKEN).x.all()) == (sign in signs), (ratio, sign)


def test_what_reaches_the_limit_falls_back():
    batch, _ = rows_of(0.0, 0.0)
    for limit, expected in ((2.0, [9.0, 9.0]), (2.0 + 1e-9, [2.0, 1.0])):
        assert FallbackAboveLimit(Given((2.0, 1.0)), limit, Given((9.0, 9.0)))(batch).x.tolist() == expected


def test_a_return_one_and_a_half_millionths_below_the_best_is_not_perfect():
    batch, _ = rows_of(0.0, 0.0, 0.0)
    piece = AmplifiedPositive(Given((0.5, 0.5, -0.5)), Given((1.0 - 5e-7, 1.0 - 1.5e-6, 0.0)))
    assert piece(batch).x.tolist() == [1.0, 1.5, -0.5]


def test_a_score_one_and_a_half_billionths_below_a_quantile_is_below_it():
    batch, _ = rows_of(1.0, 1.0)
    piece = TailRisk(bundle=1, eta=1.0)
    for above, share in ((1.5e-9, 1.0), (0.5e-9, 0.0)):
        state = piece.next_state({"quantiles": [1.0 + above] * len(LEVELS)}, StepView(batch, {}))
        assert state["quantiles"] == pytest.approx([1.0 + level - share for level in LEVELS], abs=1e-6)


def test_a_tie_is_ranked_right_and_not_preferred():
    """Equal scores: the implicit reward prefers neither, and the rejected answer is not the likelier one."""
    pair = [Trajectory([Turn([token(-1.0)], 0.0)], facts={"chosen": side}) for side in (1.0, 0.0)]
    for at, one in enumerate(pair):
        one.lot = (at + 1) / 64
    batch, policy = from_oracle([pair])
    same = {name: Field(batch.tree, TOKEN, torch.full_like(f.x, -1.0)) for name, f in policy.items()}
    view = MicroBatchView(batch, same)
    found = ranking_metrics(view, LabelledPairs(), LogRatioScore(reference=False))
    told = {name: value.at(GROUP).x.tolist() for name, value in found.items()}
    assert told == {"pairs": [1.0], "margin": [0.0], "accuracy": [0.0], "ranking": [1.0], "ranking/mean": [1.0]}


def test_who_is_in_no_pair_counts_on_neither_side():
    batch, _ = rows_of(0.0, 0.0, 0.0, 0.0)
    score = batch.tree.field(TRAJECTORY, (1.0, 2.0, 4.0, 8.0), torch.float64)
    sign = batch.tree.field(TRAJECTORY, (1.0, 0.0, -1.0, 0.0), torch.float64)
    assert [side.x.tolist() for side in chosen_and_rejected(score, sign)] == [[1.0], [4.0]]


def test_without_a_verdict_a_positive_return_is_a_success():
    batch, _ = rows_of(0.0, 0.5, -1.0, 0.0)
    batch = replace(batch, success=batch.tree.field(TRAJECTORY, (math.nan, math.nan, math.nan, 1.0), torch.float64))
    assert Solved()(batch).x.tolist() == [0.0, 1.0, 0.0, 1.0]


def test_a_share_that_is_reached_exactly_widens_no_bound():
    batch, _ = rows_of(0.0, 0.0)
    tokens = lambda value: batch.tree.full(TOKEN, value, torch.float64)  # noqa: E731
    for share, high in ((0.0, 1.2), (0.5, 3.0)):
        piece = BalancedClip(share=share)
        planned = piece.plan(StepView(batch, {}, tokens(1.0), tokens(-1.0)))
        assert float(planned[piece, "high"].item) == pytest.approx(high)


def test_an_unknown_state_has_no_peers():
    def turns(*states):
        made = [Turn([token(-1.0)], 0.0, facts={"state": s} if s else {}) for s in states]
        return Trajectory(made)

    batch, _ = from_oracle([[turns("a", "b", None), turns("a", "b", None)]])
    assert batch.reward.peer_count(SameRecentStates(1)(batch)).x.tolist() == [2, 2, 1, 2, 2, 1]
    assert batch.reward.peer_count(SameRecentStates(2)(batch)).x.tolist() == [1, 2, 1, 1, 2, 1]


@pytest.mark.parametrize("seed", range(30))
def test_sums_over_paths_do_not_depend_on_the_order_of_trajectories(seed):
    """A branch may stand before the one it left, at the first place of the batch, too."""
    dice = random.Random(seed)
    (group,) = forests.forest(seed, groups=1)
    order = dice.sample(range(len(group)), len(group))
    moved = [replace(group[i], parent=None if group[i].parent is None else order.index(group[i].parent)) for i in order]
    values = [dice.uniform(-1, 1) for _ in group]
    sums = []
    for branches, numbers in ((group, values), (moved, [values[i] for i in order])):
        _, batch, _ = forests.owned([branches])
        every = ForkTree(batch).sum_over_paths(torch.tensor(numbers, dtype=torch.float64)).tolist()
        sizes = [sum(len(turn.tokens) for turn in branch.own.turns) for branch in branches]
        sums.append([every[sum(sizes[:k]) : sum(sizes[: k + 1])] for k in range(len(branches))])
    assert [sums[1][order.index(i)] for i in range(len(group))] == [pytest.approx(x) for x in sums[0]]


# ------------------------------------------------------------------------- formulas


@pytest.mark.parametrize("seed", range(5))
def test_exponential_damping_of_entropy_change_by_a_slow_loop(seed):
    batch, policy = from_oracle(records.random_batch(seed, tokenless=False))
    adv = batch.tree.field(TOKEN, torch.randn(batch.tree.count(TOKEN), dtype=torch.float64).tolist(), torch.float64)
    piece = DampEntropyChange(low=0.3, high=0.9, form="exponential")
    planned = piece.plan(StepView(batch, policy, None, adv))[piece].x.tolist()
    columns = (adv.x, batch.behaviour.x, policy[Signal.LOGP].x, policy[Signal.ENTROPY].x)
    sizes = []
    for a, old, logp, entropy in zip(*(c.tolist() for c in columns)):
        p = math.exp(logp)
        sizes.append(abs(a / math.exp(old) * p * (1 - p) * (logp + entropy)))
    k = -math.log(0.3) / max(max(sizes), 0.02)
    assert planned == pytest.approx([min(1.0, max(0.3, math.exp(-k * x))) for x in sizes], rel=1e-9)


def test_turn_by_turn_updates_average_the_credit_of_tokens():
    """With the credit of another method, which may differ from token to token."""
    batch, _ = rows_of(0.0, 0.0)
    credit = batch.tree.field(TOKEN, (1.0, 3.0, -2.0, 0.0), torch.float64)
    (step,) = LastTurnFirst().optimizer_steps(batch.put(advantage=credit), 0, lambda batch, signals: {})
    assert step["advantage"].level == TRAJECTORY and step["advantage"].x.tolist() == [2.0, -1.0]


def test_the_threshold_of_the_kl_follows_the_velocity_of_the_reward():
    """Four batches by hand: error, integral, phase and threshold of the controller."""
    piece = KLController(gains=(0.3, 0.1, 0.05), goal=0.01, warmup=2)
    state, smooth, error, integral = piece.initial_state(), None, 0.0, 0.0
    for steps, rewards in enumerate(((0.0, 1.0), (1.0, 1.0), (1.0, 1.0), (0.0, 0.0))):
        batch, policy = rows_of(*rewards)
        columns = {Signal.REFERENCE: Field(batch.tree, TOKEN, policy[Signal.LOGP].x.detach() + 0.5)}
        state = piece.next_state(dict(state), StepView(batch.put(columns), policy))
        mean = sum(rewards) / 2
        velocity = 0.0 if smooth is None else 0.95 * smooth + 0.05 * mean - smooth
        smooth = mean if smooth is None else 0.95 * smooth + 0.05 * mean
        before, error = error, velocity - 0.01
        integral = min(1.0, max(-1.0, integral + error))
        phase = 1.5 if steps < 2 else 1.2 if velocity > 0.01 else 0.8
        free = (0.3 + 0.3 * error + 0.1 * integral + 0.05 * (error - before)) * phase
        expected = {"reward": smooth, "error": error, "integral": integral, "threshold": min(0.6, max(0.1, free))}
        assert {name: state[name] for name in expected} == pytest.approx(expected, abs=1e-9)
        assert state["kl"] == pytest.approx(0.5**2 / 2)


# --------------------------------------------------------------------- what is logged


def test_logged_divergence_from_the_sampler_is_a_mean_over_tokens():
    batch = pack(records_of([[[2, 1], [3]], [[1], [2, 2]]], 3))
    objective = recipes.build("grpo", beta=0.0).objective
    batch = objective.plan(objective.credit(batch))
    drawn = torch.rand(batch.tree.count(TOKEN), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logp = (-2.0 * drawn).requires_grad_()
    policy = {Signal.LOGP: Field(batch.tree, TOKEN, logp)}
    found = diagnostics.finish({name: float(value) for name, value in objective(batch, policy).stats.items()})
    moved = [a - b for a, b in zip(logp.tolist(), batch.behaviour.x.tolist())]
    mean = lambda f: sum(map(f, moved)) / len(moved)  # noqa: E731
    assert found["mismatch/mean_abs"] == pytest.approx(mean(abs), rel=1e-5)
    assert found["kl/behaviour/k1"] == pytest.approx(mean(lambda d: -d), rel=1e-5)
    assert found["kl/behaviour/k2"] == pytest.approx(mean(lambda d: d * d / 2), rel=1e-5)
    assert found["kl/behaviour"] == pytest.approx(mean(lambda d: math.exp(d) - 1 - d), rel=1e-5)
    weights = [math.exp(d) for d in moved]
    assert found["ratio/ess/token"] == pytest.approx(
        sum(weights) ** 2 / sum(w * w for w in weights) / len(weights), rel=1e-5
    )
    assert found["ratio/over_2/token"] == pytest.approx(sum(w > 2 for w in weights) / len(weights))
    assert found["ratio/under_half/token"] == pytest.approx(sum(w < 0.5 for w in weights) / len(weights))


def test_logged_credit_of_a_turn_is_a_mean_over_its_tokens():
    batch = pack(records_of([[[2, 1], [3, 4]], [[1, 2], [2, 2]]], 5))
    batch = recipes.build("dr_grpo").objective.credit(batch)
    adv, turn = batch["advantage"].at(TOKEN).x.tolist(), batch.tree.index(TURN, TRAJECTORY).at(TOKEN).x.tolist()
    told = measure_credit(batch)
    for k in (0, 1):
        mine = [a for a, t in zip(adv, turn) if t == k]
        assert told[f"credit/mean/turn{k}"] == pytest.approx(sum(mine) / len(mine), abs=1e-9)
        assert told[f"credit/size/turn{k}"] == pytest.approx(sum(map(abs, mine)) / len(mine), abs=1e-9)
