"""The oracles against the golden numbers and the reductions that the specification cards state."""

from __future__ import annotations

import math

import pytest
import torch

from .objectives import (
    bilevel_gae,
    dapo,
    dr_grpo,
    gae,
    grpo,
    gspo,
    gspo_token,
    overlong,
    ppo,
    reinforce,
    rloo,
    token_rewards,
    turn_ppo,
)
from .records import Batch, Trajectory, Turn, gradients, random_batch, sampled, token, tokens, total, trajectories

METHODS = [reinforce, rloo, grpo, dr_grpo, dapo, gspo, gspo_token, ppo, turn_ppo]


def one_turn(reward: float, log_ratios: list[float]) -> Trajectory:
    return Trajectory([Turn([token(-2.0 + ratio, behaviour=-2.0) for ratio in log_ratios], reward)])


def near(numbers: list[float], tolerance: float = 1e-9):
    return pytest.approx(numbers, abs=tolerance, rel=tolerance)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "flat"),
    [(1.5, 1, -1.2, True), (0.5, 1, -0.5, False), (0.5, -1, 0.8, True), (4, -1, 3.0, True)],
)
def test_ppo_golden(side, ratio, advantage, expected, flat):
    # A batch of one token is not whitened, so with old_value 0 the advantage is the reward.
    batch = [[one_turn(advantage, [math.log(ratio)])]]
    advantages, loss = side(ppo, batch, clip=0.2, dual=3.0, value_weight=0.0)
    assert advantages == near([advantage])
    assert loss.item() == near(expected)
    assert gradients(batch, loss) == near([0.0 if flat else -advantage * ratio])


def test_dual_clip_golden_without_dual(side):
    assert side(ppo, [[one_turn(-1, [math.log(4)])]], value_weight=0.0)[1].item() == near(4.0)


def test_grpo_golden(side):
    batch = [[one_turn(reward, [0.0]) for reward in (1, 0, 0, 0)]]
    for method in (grpo, dapo, gspo, gspo_token):
        assert side(method, batch)[0] == near([1.5, -0.5, -0.5, -0.5], 1e-5)


def test_k3_golden(side):
    # pi(y)=.5, ref(y)=.8 -> k3 = .13; a group of one has no policy term.
    batch = [[Trajectory([Turn([token(math.log(0.5), reference=math.log(0.8))], 1.0)])]]
    assert side(grpo, batch, beta=1.0)[1].item() == near(0.13000, 1e-5)


def test_rloo_golden(side):
    assert side(rloo, [[one_turn(reward, [0.0]) for reward in (1, 0, 0, 0)]])[0] == near([1, -1 / 3, -1 / 3, -1 / 3])


def test_overlong_golden(side):
    assert [overlong(n, 20480, 4096) for n in (16384, 18432, 20480, 21000)] == [0.0, -0.5, -1.0, -1.0]
    # The same four steps scaled down: limit 10, cache 4, through the advantages of one group.
    lengths = [6, 8, 10, 11]
    batch = [[one_turn(1.0, [0.0] * n) for n in lengths]]
    shaped = torch.tensor([1.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    z = (shaped - shaped.mean()) / (shaped.std() + 1e-6)
    assert side(dapo, batch, limit=10, cache=4)[0] == near([float(z[i]) for i in range(4) for _ in range(lengths[i])])


def test_gspo_golden(side):
    for method in (gspo, gspo_token):
        batch = [[one_turn(1.0, [0.1, -0.1, 0.3]), one_turn(0.0, [0.0])]]
        advantages, loss = side(method, batch, low=0.5, high=0.5)
        assert (-2 * loss.item() - advantages[3]) / advantages[0] == near(1.10517, 1e-5)
        assert gradients(batch, loss)[:3] == near([-math.exp(0.1) * advantages[0] / 6] * 3)


def test_turn_ppo_golden(side):
    # gamma = lambda = 1 and no reward: raw advantage = -old_value = [1, 1, 1, -1], whitened [.5, .5, .5, -1.5].
    log_ratios, values = [0.2, 0.0, 0.6, 0.2], [-1.0, -1.0, -1.0, 1.0]
    made = [token(-2.0 + ratio, behaviour=-2.0, value=value) for ratio, value in zip(log_ratios, values)]
    batch = [[Trajectory([Turn(made[:2], 0.0), Turn(made[2:], 0.0)])]]
    advantages, loss = side(turn_ppo, batch, clip=10.0, value_weight=0.0, ours={"clip": 1.0, "value_weight": 0.0})
    assert advantages == near([0.5, 0.5, 0.5, -1.5], 1e-7)
    ratios = [-4 * gradient / advantage for gradient, advantage in zip(gradients(batch, loss), advantages)]
    assert ratios == near([1.10517, 1.10517, 1.49182, 1.49182], 1e-5)
    _, loss = side(turn_ppo, batch, clip=0.2, value_weight=0.0)
    assert [gradient == 0.0 for gradient in gradients(batch, loss)] == [False, False, True, False]  # B = {token 3}


def test_gae_golden(side):
    assert gae([0, 0, 1], [0.2, 0.5, 0.8], 1.0, 0.95) == near([0.7655, 0.49, 0.2])
    made = [token(-1.0, value=value) for value in (0.2, 0.5, 0.8)]
    # The same tokens over two turns with empty turns between and after: the next value skips whatever lies between.
    batch = [[Trajectory([Turn(made[:1], 0.0), Turn([], 0.0), Turn(made[1:], 0.25), Turn([], 0.75)])]]
    assert gae(token_rewards(batch[0][0]), [0.2, 0.5, 0.8], 1.0, 0.95) == near([0.7655, 0.49, 0.2])
    raw = torch.tensor([0.7655, 0.49, 0.2], dtype=torch.float64)
    white = (raw - raw.mean()) / torch.sqrt(raw.var() + 1e-8)
    advantages, loss = side(ppo, batch)
    assert advantages == near(white.tolist())
    assert loss.item() == near(float(-white.mean() + 0.5 * (raw**2).mean()))  # v = v_old: (v - Ret)^2 = A_raw^2
    assert gradients(batch, loss, "value") == near((-raw / 3).tolist())


def test_bilevel_reductions():
    batch = random_batch(3)
    plain = [
        advantage
        for trajectory in trajectories(batch)
        for advantage in gae(
            token_rewards(trajectory), [one.old_value for one in sampled(trajectory)], gamma=1.0, lam=1.0
        )
    ]
    assert bilevel_gae(batch, gamma=1.0, lam=1.0, turn_gamma=1.0) == near(plain)
    made = [token(-1.0, value=value) for value in (0.2, 0.5, 0.8)]
    assert bilevel_gae([[Trajectory([Turn(made, 1.0)])]]) == near([0.7655, 0.49, 0.2])  # one turn: ordinary GAE


def test_token_rewards_of_empty_turns():
    def paid(*turns: tuple[int, float]) -> list[float]:
        return token_rewards(Trajectory([Turn([token(-1.0) for _ in range(n)], reward) for n, reward in turns]))

    assert paid((0, 1.0), (0, 2.0), (2, 4.0), (0, 8.0), (1, 16.0), (0, 32.0)) == [0.0, 15.0, 48.0]
    assert paid((0, 1.0), (0, 2.0)) == []


def test_value_clip(side):
    # Ret = reward = 1; v = 2 is clipped to 0.5: errors 1 and .25, the larger one has the gradient.
    batch = [[Trajectory([Turn([token(-1.0, value=2.0, old_value=0.0)], 1.0)])]]
    _, loss = side(ppo, batch)
    assert loss.item() == near(-1.0 + 0.5 * 1.0)
    assert gradients(batch, loss, "value") == near([1.0])
    # v = 0.9 is clipped to 0.5: errors .01 and .25, the larger one is constant.
    batch = [[Trajectory([Turn([token(-1.0, value=0.9, old_value=0.0)], 1.0)])]]
    _, loss = side(ppo, batch)
    assert loss.item() == near(-1.0 + 0.5 * 0.25)
    assert gradients(batch, loss, "value") == near([0.0])


@pytest.mark.parametrize("seed", range(8))
def test_reductions(seed):
    batch = random_batch(seed, tokenless=seed % 2 == 0)
    sizes = [len(group) for group in batch for trajectory in group for _ in sampled(trajectory)]
    # Dr.GRPO: "A = ((G-1)/G) x RLOO advantage"
    assert dr_grpo(batch)[0] == near([(n - 1) / n * one for n, one in zip(sizes, rloo(batch)[0])])
    # GSPO: "A constant in the row -> GSPO-token gradient equals GSPO gradient", at narrow and wide clips
    for low, high in ((3e-4, 4e-4), (0.2, 0.28), (0.9, 50.0)):
        ours, theirs = gspo(batch, low, high)[1], gspo_token(batch, low, high)[1]
        assert ours.item() == near(theirs.item())
        assert gradients(batch, ours) == near(gradients(batch, theirs))
    # Turn-PPO: "one token per turn -> token PPO" (here also one token per trajectory, so both aggregations agree)
    single = [
        [one_turn(total(row), [row.turns[0].tokens[0].logp.item() + 2.0])]
        for row in trajectories(batch)
        if row.turns[0].tokens
    ]
    ours, theirs = ppo(single, lam=1.0)[1], turn_ppo(single)[1]
    assert gradients(single, ours) == near(gradients(single, theirs))
    # Flat group: zero advantage
    assert grpo([batch[2]])[0] == near([0.0] * len(list(tokens([batch[2]]))))


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_finite_and_deterministic(method, overflow):
    first, second = (random_batch(11, groups=10, overflow=overflow) for _ in range(2))
    advantages, loss = method(first)
    again, same = method(second)
    assert advantages == again and loss.item() == same.item()
    assert loss.dtype == torch.float64 and loss.shape == ()
    assert len(advantages) == len(list(tokens(first)))
    found = gradients(first, loss)
    assert all(math.isfinite(one) for one in [*advantages, loss.item(), *found]) and any(found)
    assert gradients(second, same) == found


@pytest.mark.parametrize("method", METHODS)
def test_no_tokens(method):
    empty: list[Batch] = [[], [[]], [[Trajectory([])]], [[Trajectory([Turn([], 1.0)]), Trajectory([Turn([], 0.0)])]]]
    for batch in empty:
        advantages, loss = method(batch)
        assert advantages == [] and loss.item() == 0.0


@pytest.mark.parametrize("method", [reinforce, rloo, grpo, dr_grpo, dapo, gspo, ppo])
def test_gradient_by_differences(method):
    """Methods whose loss has no stop-gradient: the gradient is the slope of the loss."""
    hyper = {"low": 0.3, "high": 0.4} if method is gspo else {}
    batch = random_batch(5)
    for field in ("logp", "value"):
        found = gradients(batch, method(batch, **hyper)[1], field)
        for one, gradient in zip(tokens(batch), found):
            held, step = getattr(one, field), 1e-6
            losses = []
            for sign in (1, -1):
                setattr(one, field, held.detach() + sign * step)
                losses.append(method(batch, **hyper)[1].item())
            setattr(one, field, held)
            assert gradient == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-4, abs=1e-6)


def test_random_batch_has_its_edges():
    batch = random_batch(0)
    lengths = [len(sampled(row)) for row in trajectories(batch)]
    assert 0 in lengths and 1 in lengths and len(batch[1]) == 1
    assert any(not turn.tokens and turn.reward for row in trajectories(batch) for turn in row.turns)
    assert len({total(row) for row in batch[2]}) == 1
    assert any(abs(one.logp.item() - one.behaviour) > 2 for one in tokens([batch[3]]))
    assert all(max(one.logp.item(), one.behaviour, one.reference) < 0 for one in tokens(random_batch(0, overflow=True)))
