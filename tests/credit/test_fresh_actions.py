"""Fresh actions at recorded states: the three losses against the oracle, the fixed point of a tabular problem, and how a
generator samples the turns."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import credit_segments as oracle
from oracles import records
from support.batches import oracle_name
from support.generators import generator, make
from support.segment_helpers import close, criticised, made, slopes, told

from turnwise import recipes
from turnwise.core.batch import pack
from turnwise.core.levels import TRAJECTORY, TURN, Field
from turnwise.core.records import Fork, Group, Origin, Sampling, Task, Trajectory, Turn
from turnwise.core.signals import TURN_CRITIC, TURN_CRITIC_TARGET, Signal
from turnwise.data.mixing import TurnResampler
from turnwise.data.replay import FreshActions, RecentBuffer
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.errors import RecipeError, SettingError
from turnwise.recipes.families.segment_credit import PresentActions
from turnwise.training import api

TASK = Task("test", 0)
SOME = Sampling(temperature=0.7, top_k=5, max_tokens=6)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    gamma=st.floats(0.0, 1.0),
    weight=st.floats(0.1, 3.0),
    baseline=st.booleans(),
    data=st.data(),
)
def test_losses_of_recorded_and_fresh_turns(seed, gamma, weight, baseline, data):
    reference = made(seed)
    rows = list(records.trajectories(reference))
    for one in rows:
        one.facts["fresh"] = float(data.draw(st.booleans()))
        if not one.facts["fresh"] and data.draw(st.booleans()):
            one.facts["origin"] = "replay"
    batch, policy = criticised(reference)
    batch = told(batch, fresh=(TRAJECTORY, [one.facts["fresh"] for one in rows]))
    expected = oracle.archer_fresh(reference, gamma, weight, baseline)
    recipe = recipes.build("archer", gamma=gamma, value_weight=weight, baseline=baseline)
    _, found = slopes(recipe.objective, batch, policy)
    for signal in (Signal.LOGP, Signal.VALUE):
        close(found[signal], records.gradients(reference, expected.loss, oracle_name(signal)))
    for j, signal in enumerate(TURN_CRITIC):
        close(found[signal], [slope[j] for slope in expected.extra["slopes"]])


def chain(
    count: int, behaviour: float, target: float, rewards: torch.Tensor, fresh: bool, seed: int = 0
) -> list[Group]:
    """Replayed episodes of three turns with two actions, of which 1 had the chance ``behaviour``; with ``fresh`` also one action
    of the policy, whose chance is ``target``, at each state."""
    draw, members = random.Random(seed), []
    for i in range(count):
        taken = [int(draw.random() < behaviour) for _ in range(3)]
        turns = tuple(
            Turn((9,), (a,), (-0.7,), version=(0,), reward=float(rewards[k, a]), state=str(k))
            for k, a in enumerate(taken)
        )
        members.append(Trajectory(str(i), TASK, turns, origin=Origin.REPLAY))
        for k in range(3 if fresh else 0):
            turn = replace(turns[k], context=(), tokens=(int(draw.random() < target),), reward=0.0)
            members.append(Trajectory(f"{i}/{k}", TASK, (turn,), fork=Fork(str(i), k), facts={"fresh": 1.0}))
    return [Group("0", TASK, tuple(members))]


def test_values_of_a_tabular_problem_are_those_of_the_policy():
    """Card: a tabular three-turn problem, V converges to the true values: of the policy, though another one took the actions."""
    gamma, target, rewards = 0.8, 0.9, torch.tensor([[0.0, 1.0], [0.5, -1.0], [2.0, 1.0]])
    batch = pack(chain(600, 0.3, target, rewards, fresh=True))
    state, action = batch.state.x, batch.token.x  # one token in every turn
    tables = {s: torch.zeros(3, 2, dtype=torch.float64, requires_grad=True) for s in TURN_CRITIC}
    slow = {s: torch.zeros(3, 2, dtype=torch.float64) for s in TURN_CRITIC}
    of_state = {Signal.V, Signal.SECOND_V}
    read = lambda table, s: table[state, 0 if s in of_state else action]  # noqa: E731
    objective = recipes.build("archer", gamma=gamma).objective
    logp = Field(batch.tree, TURN, torch.zeros(batch.tree.count(TURN), dtype=torch.float64)).at(batch.token.level)
    for _ in range(400):
        step = batch.put(
            {t: Field(batch.tree, TURN, read(slow[s], s)) for s, t in zip(TURN_CRITIC, TURN_CRITIC_TARGET)}
        )
        step = objective.plan(objective.credit(step))
        live = {s: Field(batch.tree, TURN, read(tables[s], s)) for s in TURN_CRITIC}
        gradients = torch.autograd.grad(objective(step, {**live, Signal.LOGP: logp}).loss, list(tables.values()))
        for (s, table), g in zip(tables.items(), gradients):
            table.data -= 1.0 * g
            slow[s] = 0.9 * slow[s] + 0.1 * table.detach()
    fresh = batch.facts["fresh"].at(TURN).x > 0
    share = [float(action[fresh & (state == k)].double().mean()) for k in range(3)]  # what was drawn of the policy
    value, values = 0.0, [0.0] * 3
    for k in (2, 1, 0):
        value = sum(p * (float(rewards[k, a]) + gamma * value) for a, p in ((0, 1 - share[k]), (1, share[k])))
        values[k] = value
    assert tables[Signal.V][:, 0].tolist() == pytest.approx(values, abs=0.02)
    assert values[0] != pytest.approx(
        sum(float(rewards[k] @ torch.tensor([0.7, 0.3])) * gamma**k for k in range(3)), abs=0.1
    )


def test_without_fresh_actions_a_replayed_state_teaches_no_value():
    groups = chain(5, 0.5, 0.5, torch.ones(3, 2), fresh=False)
    assert not PresentActions(0).select(pack(groups)).x.any() and not PresentActions(1).select(pack(groups)).x.any()
    with pytest.raises(RecipeError, match="count is -1; write a number >= 0"):
        FreshActions(RecentBuffer(), -1)


def test_turns_are_sampled_again_at_their_states():
    """By the distribution that is recorded: learner and record agree. The recorded trajectories stay as they are."""
    model = make()
    turn = lambda context, tokens: Turn(context, tokens, (-1.0,) * len(tokens), temperature=0.7)  # noqa: E731
    recorded = Trajectory(
        "a", TASK, (turn((1, 2, 3), (4, 5)), turn((6,), ()), turn((7, 8), (9,))), origin=Origin.REPLAY
    )
    fork = Trajectory("b", TASK, (turn((2,), (3, 3)),), fork=Fork("a", 0, 1))
    group = Group("0", TASK, (recorded, fork))

    def again(count: int, step: int) -> Group:
        async def run() -> list[Group]:
            sampler = generator(model, slots=3)  # fewer rows than turns: some wait until others have closed
            grown = await TurnResampler(sampler, SOME, count, 7).add([group], step)
            assert not sampler.sessions and not sampler.stats()["patience_timeouts"]
            return grown

        return asyncio.run(run())[0]

    grown = again(2, 4)
    assert grown.trajectories[:2] == group.trajectories
    more = grown.trajectories[2:]
    assert [(t.fork.parent, t.fork.turn) for t in more] == [("a", 0)] * 2 + [("a", 2)] * 2 + [("b", 0)] * 2
    assert all(t.facts == {"fresh": 1.0} and t.origin == Origin.POLICY and t.reward == 0 for t in more)
    assert len({t.turns[0].tokens for t in more}) > 3
    tokens = lambda g: [t.turns[0].tokens for t in g.trajectories[2:]]  # noqa: E731
    assert tokens(again(2, 4)) == tokens(grown) != tokens(again(2, 5))
    batch = pack([grown])
    logp = LocalLearner(model, LearnerSettings(positions=64)).measure(batch, frozenset({Signal.LOGP}))[Signal.LOGP].x
    fresh = batch.facts["fresh"].at(batch.token.level).x > 0
    torch.testing.assert_close((logp - batch.mass.x)[fresh].float(), batch.behaviour.x[fresh], rtol=1e-4, atol=1e-4)


def test_another_buffer_is_refused():
    with pytest.raises(SettingError, match="and --replay none samples none"):
        api.train(method="archer", env="guess", replay="none", steps=1, out="unused")
