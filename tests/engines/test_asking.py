"""Log-probabilities without the environment's feedback, against sequences built by hand for the stock model; the teacher."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch

from turnwise.core.batch import pack
from turnwise.core.records import Fork, Group, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.errors import SettingError

BOTH = frozenset({Signal.LOGP_WITHOUT_FEEDBACK, Signal.LOGP})


def groups_of(kit, seed, forks=False):
    """Ragged groups: turns without tokens, restarts, masked contexts on some later turns, some of them equal to the real ones."""
    rng = random.Random(seed)
    ids = lambda n: tuple(rng.randrange(kit.vocabulary) for _ in range(n))  # noqa: E731

    def turn(k):
        context, n = ids(rng.randint(1, 7)), rng.randint(1 if k == 0 else 0, 5)
        blind = rng.choice([(), context, ids(len(context)), ids(len(context))]) if k else ()
        heat, restart = rng.choice([1.0, 0.7, 0.0]), k > 0 and rng.random() < 0.2
        return Turn(context, ids(n), (-1.0,) * n, masked_context=blind, temperature=heat, restart=restart)

    made = []
    for g in range(3):
        task = Task("random", seed=g)
        members = [
            Trajectory(f"{g}/{i}", task, tuple(turn(k) for k in range(rng.randint(1, 5))))
            for i in range(rng.randint(1, 4))
        ]
        if forks:
            fork = Fork(members[0].id, 0, 1)
            members.append(Trajectory(f"{g}/fork", task, (turn(1), turn(2)), fork=fork))
        made.append(Group(task.key, task, tuple(members)))
    return made


def expected(model, groups):
    """Turn by turn: the history, the masked observation since the last sampled token, then the turn's tokens."""
    out = []
    for group in groups:
        first = group.trajectories[0].turns[0]
        for t in group.trajectories:
            past = [*first.context, *first.tokens[:1]] if t.fork else []
            real, masked = [], []
            for turn in t.turns:
                if turn.restart:
                    past, real, masked = [], [], []
                real, masked = [*real, *turn.context], [*masked, *(turn.masked_context or turn.context)]
                if not turn.tokens:
                    continue
                ids = [*past, *masked, *turn.tokens]
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([ids])).logits[0, len(ids) - len(turn.tokens) - 1 : -1]
                logp = torch.log_softmax(logits / (turn.temperature or 1.0), 1)
                out += logp.gather(1, torch.tensor(turn.tokens)[:, None]).squeeze(1).tolist()
                past, real, masked = [*past, *real, *turn.tokens], [], []
    return out


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize(("positions", "dtype"), [(1, "float32"), (37, "float64"), (10**6, "float32")])
def test_logp_without_feedback(kit, positions, dtype, forks):
    model = kit.make_model()
    stock = copy.deepcopy(model).to(getattr(torch, dtype))
    learner = LocalLearner(model, LearnerSettings(positions=positions, dtype=dtype))
    for seed in (1, 2, 3):
        groups = groups_of(kit, seed, forks)
        found = learner.measure(pack(groups), BOTH)
        assert found[Signal.LOGP_WITHOUT_FEEDBACK].x.tolist() == pytest.approx(expected(stock, groups), abs=2e-4)
        assert not torch.allclose(found[Signal.LOGP_WITHOUT_FEEDBACK].x, found[Signal.LOGP].x, atol=1e-3)


def test_without_masked_ids_it_equals_logp(kit):
    learner = LocalLearner(kit.make_model())
    for batch in (pack([]), kit.make_batch(1)):
        found = learner.measure(batch, BOTH)
        assert torch.equal(found[Signal.LOGP_WITHOUT_FEEDBACK].x, found[Signal.LOGP].x)
    first = replace(groups_of(kit, 1)[0].trajectories[0].turns[0], masked_context=())
    task = Task("x", seed=0)
    alone = pack([Group("g", task, (Trajectory("t", task, (first,)),))])
    found = learner.measure(alone, BOTH)
    assert torch.equal(found[Signal.LOGP_WITHOUT_FEEDBACK].x, found[Signal.LOGP].x)


# -------------------------------------------------------------------- teacher


def test_the_teacher_stays_fixed_while_the_policy_trains(kit, batch):
    teacher = kit.make_model("qwen3", seed=5)
    alone = LocalLearner(copy.deepcopy(teacher)).measure(batch, frozenset({Signal.LOGP}))[Signal.LOGP].x
    learner = LocalLearner(kit.make_model(), LearnerSettings(lr=1e-2), teacher=teacher)
    ask = frozenset({Signal.TEACHER, Signal.LOGP})
    before = learner.measure(batch, ask)
    learner.update(batch, kit.Linear())
    after = learner.measure(batch, ask)
    assert torch.equal(before[Signal.TEACHER].x, alone) and torch.equal(after[Signal.TEACHER].x, alone)
    assert not torch.equal(after[Signal.LOGP].x, before[Signal.LOGP].x)
    other = LocalLearner(kit.make_model(), teacher=kit.make_model("qwen3", seed=6))
    with pytest.raises(SettingError, match="another teacher"):
        other.load_state_dict(learner.state_dict())


def test_a_missing_or_mismatched_teacher_is_refused(kit, batch):
    with pytest.raises(SettingError, match="--teacher"):
        LocalLearner(kit.make_model()).measure(batch, frozenset({Signal.TEACHER}))
    other_vocabulary = kit.make_model()
    other_vocabulary.resize_token_embeddings(kit.vocabulary + 3)
    with pytest.raises(SettingError, match="64 entries, the model's 61"):
        LocalLearner(kit.make_model(), teacher=other_vocabulary)
