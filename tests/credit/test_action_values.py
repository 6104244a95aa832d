"""Values of tokens: Q from logits with its fixed policy's operator, Q of a head with an output for each token, what they rank,
and how they steer decoding."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import records
from oracles import values as oracle
from safetensors.torch import load_file
from support.batches import from_oracle, oracle_name
from support.generators import generator, make
from support.segment_helpers import close, slopes

from turnwise import recipes
from turnwise.core.batch import pack
from turnwise.core.levels import TOKEN, Field
from turnwise.core.records import Group, Sampling, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.engines.generator.logit_shift import steered, with_value_rows
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.errors import RecipeError, SettingError
from turnwise.evaluation.evaluator import Evaluation
from turnwise.evaluation.policy_metrics import reranked
from turnwise.recipes.families.values import ConservativeQError
from turnwise.rollout.strategies import ValueSteered
from turnwise.training import api
from turnwise.training.loop import update_policy

SEEDS = st.integers(0, 10**6)
UNIT = st.floats(0.0, 1.0)
TASK = Task("test", 0)


def drawn(seed: int):
    """Oracle records and our batch, with a mode and a gap of each token."""
    reference = records.random_batch(seed)
    batch, policy = from_oracle(reference)
    rng, flat = random.Random(seed), list(records.tokens(reference))
    mode = {id(t): torch.tensor(t.logp.item() + rng.random(), dtype=torch.float64, requires_grad=True) for t in flat}
    gap = {id(t): -rng.random() for t in flat}

    def column(values) -> Field:
        numbers = [float(torch.as_tensor(values[id(t)], dtype=torch.float64).detach()) for t in flat]
        return Field(batch.tree, TOKEN, torch.tensor(numbers, dtype=torch.float64))

    policy[Signal.MODE_LOGP] = column(mode).map(lambda x: x.requires_grad_())
    return reference, flat, mode, gap, batch.put({Signal.REFERENCE_MODE_GAP: column(gap)}), policy


@settings(deadline=None, max_examples=40)
@given(SEEDS, st.floats(0.05, 4.0), UNIT, st.floats(0.0, 2.0))
def test_b_coder(seed, alpha, gamma, imitation):
    reference, flat, mode, gap, batch, policy = drawn(seed)
    expected = oracle.b_coder(reference, mode, gap, alpha, gamma, imitation)
    recipe = recipes.build("b_coder", alpha=alpha, gamma=gamma, imitation=imitation)
    loss, found = slopes(recipe.objective, batch, policy)
    close(loss.detach(), expected.loss.detach())
    for signal in (Signal.LOGP, Signal.VALUE):
        close(found[signal], records.gradients(reference, expected.loss, oracle_name(signal)))
    by_mode = torch.autograd.grad(expected.loss, [mode[id(t)] for t in flat], allow_unused=True) if flat else ()
    close(found[Signal.MODE_LOGP], [0.0 if g is None else g.item() for g in by_mode])
    signals = {s: policy[s].detach() for s in (Signal.LOGP, Signal.MODE_LOGP, Signal.VALUE)}
    close(ConservativeQError(alpha, gamma).rank(batch.put(signals)).x, expected.extra["rank"])


@settings(deadline=None, max_examples=15)
@given(SEEDS, st.floats(0.1, 3.0))
def test_b_coder_reduces_to_reward_regression_and_to_q_learning(seed, alpha):
    """Card: γ = 0 → reward regression; q = argmax Q → DQN: the target is r + γ max Q(s'), and max Q = V."""
    reference, flat, _, _, batch, policy = drawn(seed)
    rewards = [r for one in records.trajectories(reference) for r in oracle.paid(one)]
    q = alpha * (policy[Signal.LOGP] - policy[Signal.MODE_LOGP]).x + policy[Signal.VALUE].x
    _, found = slopes(recipes.build("b_coder", alpha=alpha, gamma=0.0, imitation=0.0).objective, batch, policy)
    count = max(1, len(flat))
    close(found[Signal.VALUE], 2 * (q.detach() - torch.tensor(rewards, dtype=torch.float64)) / count)
    same = batch.put({Signal.REFERENCE_MODE_GAP: batch[Signal.REFERENCE_MODE_GAP] * 0.0})
    _, found = slopes(recipes.build("b_coder", alpha=alpha, gamma=0.7, imitation=0.0).objective, same, policy)
    best: list[float] = []
    for one in records.trajectories(reference):
        tokens = records.sampled(one)
        best += [*(t.old_value for t in tokens[1:]), 0.0][: len(tokens)]
    target = torch.tensor(rewards, dtype=torch.float64) + 0.7 * torch.tensor(best, dtype=torch.float64)
    close(found[Signal.VALUE], 2 * (q.detach() - target) / count)


@settings(deadline=None, max_examples=40)
@given(SEEDS, UNIT, UNIT)
def test_vas(seed, gamma, lam):
    reference, flat, mode, gap, batch, policy = drawn(seed)  # any numbers serve as values
    expected = oracle.vas(reference, mode, gap, gamma, lam)
    policy[Signal.ACTION_VALUE] = policy[Signal.MODE_LOGP]
    batch = batch.put({Signal.OLD_ACTION_VALUE: batch[Signal.REFERENCE_MODE_GAP]})
    loss, found = slopes(recipes.build("vas", gamma=gamma, lam=lam).objective, batch, policy)
    close(loss.detach(), expected.loss.detach())
    by_value = torch.autograd.grad(expected.loss, [mode[id(t)] for t in flat]) if flat else ()
    close(found[Signal.ACTION_VALUE], [g.item() for g in by_value])
    assert not found[Signal.LOGP].any()


@given(
    st.lists(
        st.tuples(st.integers(-40, 40).map(lambda x: x / 8), st.integers(-8, 8).map(lambda x: x / 4)),
        min_size=3,
        max_size=12,
        unique_by=lambda x: x[0],
    ),
    st.floats(0.0, 9.0),
    st.integers(1, 14),
)
def test_steered_logits(rows, weight, candidates):
    logits, values = ([row[k] for row in rows] for k in (0, 1))
    found = steered(torch.tensor(logits).double(), torch.tensor(values).double(), weight, candidates)
    close(found, oracle.steered(logits, values, weight, candidates))
    if weight == 0:  # Card: β = 0 → base
        assert found.tolist() == torch.tensor(logits).double().tolist()
    sure = steered(torch.tensor(logits).double(), torch.tensor(values).double(), 1e9, candidates)
    top = sorted(range(len(logits)), key=lambda a: -logits[a])[:candidates]
    assert values[int(sure.argmax())] == max(values[a] for a in top) or candidates == 1  # β → ∞: greedy by value


def packed(rows: list[tuple[list[int], list[int]]], temperature: float = 1.0):
    turns = [
        Turn(tuple(c), tuple(t), (-1.0,) * len(t), version=(0,) * len(t), temperature=temperature) for c, t in rows
    ]
    return pack([Group("0", TASK, tuple(Trajectory(str(i), TASK, (turn,)) for i, turn in enumerate(turns)))])


def test_signals_are_those_of_the_models():
    model, other = make(seed=1), make(seed=2)
    learner = LocalLearner(model, LearnerSettings(positions=16), critic=1)
    learner.reference()
    with torch.no_grad():
        for p, q in zip(learner.model.parameters(), other.parameters()):
            p.copy_(q)
    rows = [([1, 2], [3, 4, 5]), ([6], [7]), ([2, 2, 2], [8, 9])]
    batch = packed(rows, temperature=0.7)
    found = learner.measure(batch, frozenset({Signal.LOGP, Signal.MODE_LOGP, Signal.REFERENCE_MODE_GAP}))
    first = make(seed=1)
    mode, gap, logp = [], [], []
    for context, tokens in rows:
        ids = torch.tensor([[*context, *tokens]])
        now, then = (torch.log_softmax(m(input_ids=ids).logits[0].float() / 0.7, -1) for m in (other, first))
        for k, token in enumerate(tokens):
            at = len(context) + k - 1
            mode.append(now[at].max()), logp.append(now[at, token])
            gap.append(now[at, then[at].argmax()] - now[at].max())
    for signal, wanted in ((Signal.MODE_LOGP, mode), (Signal.REFERENCE_MODE_GAP, gap), (Signal.LOGP, logp)):
        torch.testing.assert_close(found[signal].x.float(), torch.stack(wanted), rtol=1e-4, atol=1e-4)
    assert (found[Signal.REFERENCE_MODE_GAP].x <= 1e-6).all()


def learner_with_values(seed: int = 0) -> LocalLearner:
    learner = LocalLearner(make(), LearnerSettings(lr=1e-2, value_lr=1e-2), critic=-1)
    with torch.no_grad():
        learner.token_value_head.weight.copy_(
            torch.randn(learner.token_value_head.weight.shape, generator=torch.Generator().manual_seed(seed))
        )
    return learner


def sample(learner: LocalLearner, steering: ValueSteered | None, sampling: Sampling, count: int = 4):
    """Completions of a generator with the learner's weights; every other session is steered."""

    async def run():
        g = generator(with_value_rows(make()), slots=count)
        await g.publish(learner.weights(), 0)
        sessions = [g.open(i) for i in range(count)]
        for session in sessions[::2] if steering else ():
            steering.steer(session)
        return await asyncio.gather(*(s.generate([1, 2, 3 + i], sampling) for i, s in enumerate(sessions)))

    return asyncio.run(run())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_steered_tokens_have_the_log_probability_of_the_steered_distribution(temperature):
    learner, model, sampling = learner_with_values(), make(), Sampling(temperature=temperature, max_tokens=6)
    steering = ValueSteered(2.0, 5)
    for i, completion in enumerate(sample(learner, steering, sampling)):
        ids = torch.tensor([[1, 2, 3 + i, *completion.tokens]])
        with torch.no_grad():
            states = model.model(input_ids=ids).last_hidden_state[0]
            logits, values = model.lm_head(states), states @ learner.token_value_head.weight.detach().T
        for k, (token, logp) in enumerate(zip(completion.tokens, completion.logp)):
            row = logits[2 + k]
            row = steered(row, values[2 + k], 2.0, 5) if i % 2 == 0 else row
            assert logp == pytest.approx(float(torch.log_softmax(row / temperature, -1)[token]), abs=1e-4)


def test_values_of_zero_and_a_weight_of_zero_change_nothing():
    """Card: β = 0 → base."""
    sampling = Sampling(max_tokens=8)
    tokens = lambda learner, steering: [list(c.tokens) for c in sample(learner, steering, sampling)]  # noqa: E731
    base = LocalLearner(make(), LearnerSettings(), critic=-1)
    assert tokens(base, ValueSteered(5.0)) == tokens(base, None) == tokens(learner_with_values(), ValueSteered(0.0))
    assert tokens(learner_with_values(), ValueSteered(5.0)) != tokens(base, None)


def test_the_value_of_a_token_learns_and_the_policy_does_not():
    recipe = recipes.build("vas", passes=4)
    learner = LocalLearner(make(), LearnerSettings(lr=1e-2, value_lr=3e-2, weight_decay=0.1), critic=recipe.critics)
    before = {n: p.clone() for n, p in learner.model.named_parameters()}
    turns = [Turn((1, 2), (t,), (-1.0,), version=(0,), reward=float(t == 5)) for t in (5, 6, 5, 7)]
    groups = [Group("0", TASK, tuple(Trajectory(str(i), TASK, (turn,)) for i, turn in enumerate(turns)))]
    objective = recipe.objective
    for _ in range(40):
        update_policy(learner, recipe, groups, 0, objective)
    values = learner.measure(pack(groups), frozenset({Signal.ACTION_VALUE}))[Signal.ACTION_VALUE].x
    assert values.tolist() == pytest.approx([1, 0, 1, 0], abs=0.1)
    assert all(torch.equal(p, before[n]) for n, p in learner.model.named_parameters())


def test_the_answer_that_is_ranked_first():
    model = make()
    learner = LocalLearner(model, LearnerSettings(), critic=1)
    recipe = recipes.build("b_coder")
    rows = [
        [Trajectory(f"{n}.{i}", TASK, (Turn((1,), (2 + i + n, 3), (-1.0, -1.0)),), success=i == 2) for i in range(3)]
        for n in range(4)
    ]
    evaluation = Evaluation((TASK,) * 4, tuple(map(tuple, rows)))
    found = reranked(recipe, learner, evaluation)
    piece = recipe.penalties[0].penalty
    taken = []
    for samples in rows:
        batch = pack([Group("0", TASK, tuple(samples))])
        scores = piece.rank(batch.put(learner.measure(batch, piece.ranks_by))).x.tolist()
        taken.append(samples[scores.index(max(scores))])
    assert found["reranked_success"] == sum(t.success for t in taken) / 4
    assert (
        reranked(recipe, learner, Evaluation((TASK,), ((rows[0][0],),)))
        == {}
        == reranked(recipes.build("grpo"), learner, evaluation)
    )


def test_nonsense_is_refused():
    for wrong in ({"weight": -1.0}, {"candidates": 0}):
        with pytest.raises(RecipeError, match=r"write a number >= [01]"):
            ValueSteered(**wrong)
    with pytest.raises(RecipeError, match="alpha is 0"):
        recipes.build("b_coder", alpha=0.0)
    with pytest.raises(SettingError, match="write critic=-1"):
        LocalLearner(make(), LearnerSettings(), critic=1).measure(
            packed([([1], [2])]), frozenset({Signal.ACTION_VALUE})
        )
    with pytest.raises(SettingError, match="leave --critic separate out"):
        api.train(method="vas", env="guess", critic="separate", steps=1, out="unused")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, extra",
    [
        ("vas", {"eval_tasks": 4}),
        ("b_coder", {"eval_tasks": 4, "eval_samples": 2, "method_options": {"warm": 1}}),
        ("props", {"eval_tasks": 0}),
    ],
)
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, name, extra):
    small = {
        "env": "guess", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 3, "cold_batch": 4,
        "steps": 3, "groups": 2, "group_size": 4, "max_turns": 2, "context": 320, "checkpoint_every": 1, "warmup": 0,
        "schedule": "constant", "trackers": (), **extra,
    }  # fmt: skip
    api.train(**small, method=name, out=str(tmp_path), name="whole")
    api.train(**{**small, "steps": 2}, method=name, out=str(tmp_path), name="half")
    api.resume(tmp_path / "half", steps=3)
    one, two = (load_file(tmp_path / n / "model" / "model.safetensors") for n in ("whole", "half"))
    assert all(torch.equal(one[k], two[k]) for k in one)
    first = load_file(tmp_path / "whole" / "initial" / "model.safetensors")
    if name != "props":  # nothing is paid here, so it learns nothing
        assert all(torch.equal(one[k], first[k]) for k in one) == (name == "vas")
