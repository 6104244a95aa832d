"""Log-probabilities over the ids a filter kept: against a plain softmax over them, under weights that have moved, from the
sampler through the records to the learner."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.generators import SHAPE, generator, make
from support.prompting import ask, family, peaked, prompts
from support.small_models import make_model

from turnwise.algebra.ratio import behaviour
from turnwise.core.batch import pack
from turnwise.core.kept_sets import KeptSets
from turnwise.core.records import Completion, Group, Sampling, Stop, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.engines.generator import model_runner
from turnwise.engines.kernels import reference, sampling
from turnwise.engines.kernels.sampling import TokenSampler, kept_bytes, kept_ids
from turnwise.engines.learner import learner as learner_module
from turnwise.engines.learner import packed_forward
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.engines.learner.logprobs import logprobs_of, token_logprobs
from turnwise.engines.remote.token_wire import read_sampling_mask
from turnwise.errors import RecordError, ServerFault
from turnwise.serve.generate_api import reply_body
from turnwise.store.trajectory_codec import decode, encode

LOGP = frozenset({Signal.LOGP})
CUTS = [{"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "temperature": 1.5}]


def as_row(ids) -> bytes:
    return torch.tensor(sorted(ids), dtype=torch.int32).numpy().tobytes()


def ids_of(row: bytes) -> list[int]:
    return torch.frombuffer(bytearray(row), dtype=torch.int32).tolist() if row else []


def oracle(logits, token, kept, temperature=1.0):
    """log of the softmax over the kept ids alone (over all where there are none), one token at a time."""
    z = (logits.double() / (temperature or 1.0)).tolist()
    ids = kept or range(len(z))
    return z[token] - torch.logsumexp(torch.tensor([z[i] for i in ids], dtype=torch.float64), 0).item()


# ---------------------------------------------------------------------- the head


def rows_with_sets(n, v, seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    h, w, b = (
        torch.randn(*s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in ((n, 4), (v, 4), (v,))
    )
    y = torch.randint(v, (n,), generator=g)
    t = torch.tensor([1.0, 0.5, 0.0, 1.7], dtype=dtype).repeat(n)[:n]
    rows = []
    for i in range(n):
        size = int(torch.randint(v + 1, (1,), generator=g))
        rows.append(sorted({int(y[i]), *torch.randperm(v, generator=g)[:size].tolist()}) if size else [])
    flat, sizes = [i for r in rows for i in r], [len(r) for r in rows]
    sets = KeptSets(torch.tensor(flat, dtype=torch.int32), torch.tensor(sizes, dtype=torch.int64))
    return h, w, b, y, t, rows, sets


def with_masks(sets, rows, v):
    """The same sets, every other one as bits instead of a list. The last id has no bit: it is not allowed."""
    width = -(-(v - 1) // 8)
    masked = [i for i, row in enumerate(rows) if i % 2 and row and max(row) < 8 * width]
    lists = [[] if i in masked else row for i, row in enumerate(rows)]
    masks, mask_of = torch.zeros(len(masked), width, dtype=torch.uint8), torch.full((len(rows),), -1)
    for k, i in enumerate(masked):
        mask_of[i] = k
        for token in rows[i]:
            masks[k, token // 8] |= 1 << token % 8
    ids = torch.tensor([i for row in lists for i in row], dtype=torch.int32)
    return KeptSets(ids, torch.tensor([len(row) for row in lists], dtype=torch.int64), masks, mask_of)


def masked_softmax(h, w, b, y, t, rows):
    z = (h @ w.T + (0 if b is None else b)) / torch.where(t == 0, 1.0, t)[:, None]
    keep = torch.zeros_like(z, dtype=torch.bool)
    for i, r in enumerate(rows):
        keep[i, r or slice(None)] = True
    whole = torch.log_softmax(z, 1)
    logp = torch.log_softmax(z.masked_fill(~keep, -torch.inf), 1).gather(1, y[:, None]).squeeze(1)
    return logp, -(whole.exp() * whole).sum(1)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 9), v=st.integers(1, 12), chunk=st.sampled_from([None, 1, 2, 3, 100]), bias=st.booleans(),
    entropy=st.booleans(), seed=st.integers(0, 999), own=st.booleans(), masks=st.booleans(),
)  # fmt: skip
@example(n=1, v=1, chunk=None, bias=False, entropy=False, seed=0, own=False, masks=True)  # no row has a mask
def test_values_and_gradients_are_those_of_a_softmax_over_the_set(n, v, chunk, bias, entropy, seed, own, masks):
    h, w, b, y, t, rows, sets = rows_with_sets(n, v, seed)
    sets = with_masks(sets, rows, v) if masks else sets
    b = b if bias else None
    leaves = [x for x in (h, w, b) if x is not None]
    g = torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = masked_softmax(h, w, b, y, t, rows)
    if own:
        logits = lambda x: x @ w.T + (0 if b is None else b)  # noqa: E731
        found = logprobs_of(logits, h, w, y, t, entropy, sets)
    else:
        found = token_logprobs(h, w, b, y, t, want_entropy=entropy, chunk=chunk, sets=sets)
    pairs = list(zip(expected, found)) if entropy else [(expected[0], found[0])]
    loss = lambda side: sum((g[k] * pair[side]).sum() for k, pair in enumerate(pairs))  # noqa: E731
    grads = [torch.autograd.grad(loss(side), leaves, allow_unused=True) for side in (0, 1)]
    for a, c in [*pairs, *zip(*grads)]:
        if a is None or c is None:  # nothing depends on it
            assert not any(x is not None and x.any() for x in (a, c))
            continue
        torch.testing.assert_close(a, c, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("masks", [False, True])
def test_the_same_in_float32_with_the_kernels_of_this_machine(bias, chunk, masks):
    h, w, b, y, t, rows, sets = rows_with_sets(8, 40, 5, torch.float32)
    sets = with_masks(sets, rows, 40) if masks else sets
    b = b if bias else None
    leaves = [x for x in (h, w, b) if x is not None]
    expected, found = masked_softmax(h, w, b, y, t, rows)[0], token_logprobs(h, w, b, y, t, chunk=chunk, sets=sets)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for a, c in zip(*(torch.autograd.grad((x * torch.arange(8)).sum(), leaves) for x in (expected, found))):
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)


def test_a_set_of_the_whole_vocabulary_is_no_set():
    h, w, b, y, t, _, _ = rows_with_sets(6, 11, 3)
    every = KeptSets(torch.arange(11, dtype=torch.int32).repeat(6), torch.full((6,), 11))
    a, c = token_logprobs(h, w, b, y, t)[0], token_logprobs(h, w, b, y, t, sets=every)[0]
    torch.testing.assert_close(a, c, rtol=1e-12, atol=1e-12)


def test_a_set_that_lost_its_mass_does_not_underflow():
    w = torch.eye(3)[:, :3].contiguous()
    h = torch.tensor([[500.0, 1.0, 0.0]])
    sets = KeptSets(torch.tensor([1, 2], dtype=torch.int32), torch.tensor([2]))
    found = token_logprobs(h, w, None, torch.tensor([1]), 1.0, sets=sets)[0]
    torch.testing.assert_close(found, torch.log_softmax(torch.tensor([1.0, 0.0]), 0)[:1])


# ---------------------------------------------------------------------- the sampler


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), cut=st.sampled_from(CUTS))
def test_the_sampler_names_exactly_the_ids_it_may_draw(seed, cut):
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, 50, generator=g)
    sampler = TokenSampler([Sampling(**cut), Sampling()], torch.device("cpu"))
    drawn = {
        int(sampler(logits, torch.full((2,), u, dtype=torch.float64))[0][0]) for u in torch.linspace(0, 0.9999999, 300)
    }
    _, _, mass = sampler(logits, torch.rand(2, generator=g).double())
    kept, whole = (ids_of(r) for r in kept_bytes(sampler.kept))
    assert drawn <= set(kept) and kept == sorted(set(kept)) and whole == []
    p = (logits[0] / cut.get("temperature", 1.0)).softmax(-1)
    assert p[kept].sum().log().item() == pytest.approx(float(mass[0]), abs=1e-5)
    assert p[kept].min() >= p[[i for i in range(50) if i not in kept]].max()


def test_a_set_beyond_the_limit_and_entries_without_weight_are_left_out(monkeypatch):
    monkeypatch.setattr(sampling, "KEPT_LIMIT", 3)
    weight = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.4, 0.3, 0.2, 0.1], [0.5, 0.5, 0.0, 0.0]])
    rows = kept_bytes(kept_ids(weight, torch.tensor([[False], [False], [True]])))
    assert [ids_of(r) for r in rows] == [[0, 2, 3], [], []]


def test_nothing_is_recorded_without_a_filter():
    for done in ask(generator(), prompts(3), Sampling(max_tokens=4)) + ask(
        generator(), prompts(3), Sampling(0.0, top_k=3)
    ):
        assert not done.kept and not any(done.mass)


@pytest.mark.parametrize("cut", CUTS)
def test_both_decoders_record_the_same_sets(monkeypatch, cut):
    kinds = [Sampling(max_tokens=11, **cut), Sampling(max_tokens=6), Sampling(temperature=0, max_tokens=9)]
    asked, chosen = prompts(6), [kinds[i % 3] for i in range(6)]
    model = make_model_for_graphs()
    eager = ask(generator(model, slots=6, fast=False), asked, chosen)
    monkeypatch.setattr(model_runner, "decode_ops", lambda device: (reference, ""))
    graphs = generator(model, slots=6)
    assert graphs.model_runner.graphs is not None
    stepped = ask(graphs, asked, chosen)
    for a, c, kind in zip(eager, stepped, chosen):
        assert list(a.tokens) == list(c.tokens) and list(a.kept) == list(c.kept)
        assert len(a.kept) == (len(a.tokens) if kind is kinds[0] else 0)
        for token, row in zip(a.tokens, a.kept):
            assert token in ids_of(row)


def make_model_for_graphs():
    return peaked(family({**SHAPE, "hidden_size": 64, "head_dim": 16})["llama"])


# ---------------------------------------------------------------------- records and batches


def sampled_groups(model, cut, n=5, tokens=9):
    asked = prompts(n)
    done = ask(generator(model), asked, Sampling(max_tokens=tokens, **cut))
    task = Task("random", 0)
    turns = [
        Turn(ids, d.tokens, d.logp, d.mass, d.version, kept=tuple(d.kept), temperature=cut.get("temperature", 1.0))
        for ids, d in zip(asked, done)
    ]
    return [Group("g", task, tuple(Trajectory(f"t{i}", task, (turn,)) for i, turn in enumerate(turns)))]


def without_sets(groups):
    strip = lambda t: replace(t, turns=tuple(replace(turn, kept=()) for turn in t.turns))  # noqa: E731
    return [replace(g, trajectories=tuple(map(strip, g.trajectories))) for g in groups]


def test_a_turn_with_another_number_of_sets_is_refused():
    with pytest.raises(RecordError, match="2 tokens but 1 values of kept"):
        Turn((1,), (2, 3), (-1.0, -1.0), kept=(b"",))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), order=st.permutations(range(4)), count=st.integers(0, 4))
def test_sets_follow_their_tokens_through_every_split(seed, order, count):
    g = torch.Generator().manual_seed(seed)
    draw = lambda high: int(torch.randint(high, (1,), generator=g))  # noqa: E731

    def turn():
        tokens = [draw(9) for _ in range(draw(4))]
        kept = [as_row({t, *(draw(9) for _ in range(draw(5)))}) if draw(3) else b"" for t in tokens]
        return Turn([1], tokens, [-1.0] * len(tokens), [-0.5] * len(tokens), kept=kept if draw(4) else ())

    task = Task("random", 0)
    members = [Trajectory(f"t{i}", task, (turn(), turn())) for i in range(4)]
    batch = pack([Group("g", task, tuple(members))])
    chosen = [order[i] for i in range(count)]
    part = batch.select(chosen) if chosen else batch
    chosen = chosen or list(range(4))
    expected = [row for i in chosen for t in members[i].turns for row in (t.kept or [b""] * len(t.tokens))]
    if part.sequences.kept is None:
        assert not any(expected)
        return
    found = [x.tolist() for x in part.sequences.kept.ids.split(part.sequences.kept.size.tolist())]
    assert found == [ids_of(row) for row in expected]
    assert part.mass.x.tolist() == [0.0 if row else -0.5 for row in expected]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.sets(st.one_of(st.integers(0, 300), st.integers(0, 2**31 - 1)), max_size=5), max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_sets_survive_the_ledger(sets):
    turns = tuple(Turn((1,), (2,) * len(rows), (-1.0,) * len(rows), kept=tuple(map(as_row, rows))) for rows in sets)
    trajectory = Trajectory("t", Task("random", 0), turns)
    assert decode(*encode(trajectory)) == trajectory
    record, _ = encode(Trajectory("t", Task("random", 0), (Turn((1,), (2,), (-1.0,)),)))
    assert "kept" not in record and decode(record, None).turns[0].kept == ()


def test_turns_without_log_probabilities_have_no_sampler_to_follow():
    groups = sampled_groups(make(), {"top_k": 5})

    def blind(t):
        return replace(t, origin="expert", turns=tuple(replace(u, logp=(), mass=(), version=()) for u in t.turns))

    assert pack([replace(g, trajectories=tuple(map(blind, g.trajectories))) for g in groups]).sequences.kept is None


# ---------------------------------------------------------------------- sampler against learner


def moved(model, seed=1):
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def expected_logp(learner, kind, groups):
    """By Transformers alone, with the learner's weights."""
    model, out = make(kind), []
    model.load_state_dict(learner.model.state_dict())
    for t in groups[0].trajectories:
        turn = t.turns[0]
        with torch.no_grad():
            logits = model(torch.tensor([[*turn.context, *turn.tokens]])).logits[0]
        for i, (token, row) in enumerate(zip(turn.tokens, turn.kept or [b""] * len(turn.tokens))):
            out.append(oracle(logits[len(turn.context) + i - 1], token, ids_of(row), turn.temperature))
    return torch.tensor(out)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_ratio_is_one_before_the_policy_moves_and_exact_after(cut, kind):
    model = make(kind)
    groups = sampled_groups(model, cut)
    batch = pack(groups)
    assert batch.sequences.kept is not None and not batch.mass.x.any()
    learner = LocalLearner(model)
    before = learner.measure(batch, LOGP)[Signal.LOGP].x
    torch.testing.assert_close(before, behaviour(batch).x, atol=2e-5, rtol=0)
    moved(learner.model)
    after = learner.measure(batch, LOGP)[Signal.LOGP].x
    assert (after - before).abs().max() > 0.01
    torch.testing.assert_close(after, expected_logp(learner, kind, groups).float(), atol=2e-5, rtol=0)


def mean_ratio(learner, turns):
    """Σ over the kept ids of μ(a) π(a)/μ(a), as the objective sees the ratio."""
    task = Task("random", 0)
    batch = pack([Group("g", task, tuple(Trajectory(f"t{i}", task, (turn,)) for i, turn in enumerate(turns)))])
    log_ratio = learner.measure(batch, LOGP)[Signal.LOGP].x - behaviour(batch).x
    return float((batch.behaviour.x.double().exp() * log_ratio.double().exp()).sum())


def test_the_mean_ratio_under_the_sampler_is_one_with_the_set_and_not_with_its_mass():
    model, context = make_model(), [3, 1, 4, 1, 5]
    with torch.no_grad():
        p = model(torch.tensor([context])).logits[0, -1].double().softmax(-1)
    kept = p.topk(6).indices.tolist()
    mass = p[kept].sum().log().item()
    turns = [Turn(context, [a], [p[a].log().item() - mass], [mass], [0], kept=[as_row(kept)]) for a in kept]
    alone = [replace(turn, kept=()) for turn in turns]
    learner = LocalLearner(model)
    assert mean_ratio(learner, turns) == pytest.approx(1, abs=1e-5) == mean_ratio(learner, alone)
    moved(learner.model)
    assert mean_ratio(learner, turns) == pytest.approx(1, abs=1e-5)
    assert abs(mean_ratio(learner, alone) - 1) > 0.02  # what the mass alone gets wrong


@pytest.mark.parametrize("entropy", [False, True])
def test_micro_batches_change_neither_values_nor_steps(kit, entropy):
    groups = sampled_groups(make(), {"top_p": 0.8}, n=7)
    signals = LOGP | ({Signal.ENTROPY} if entropy else frozenset())
    batch, learners = kit.weighted(pack(groups)), [
        LocalLearner(make(), LearnerSettings(lr=1e-3, positions=n)) for n in (8, 4096)
    ]  # fmt: skip
    one, two = (x.measure(batch, LOGP)[Signal.LOGP].x for x in learners)
    torch.testing.assert_close(one, two, atol=1e-5, rtol=0)
    losses = [[x.update(batch, kit.Linear(signals))["grad_norm"] for _ in range(2)] for x in learners]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    plain = LocalLearner(make(), LearnerSettings(lr=1e-3))
    other = plain.update(kit.weighted(pack(without_sets(groups))), kit.Linear(signals))["grad_norm"]
    assert other != pytest.approx(losses[0][0], rel=1e-3)


def test_a_head_of_its_own_does_the_same(monkeypatch):
    model = make()
    groups = sampled_groups(model, {"top_k": 6})
    learner = LocalLearner(model)
    moved(learner.model)
    monkeypatch.setattr(packed_forward, "has_own_head", lambda model: True)
    monkeypatch.setattr(packed_forward, "own_logits", lambda model, h: model.get_output_embeddings()(h))
    found = learner.measure(pack(groups), LOGP)[Signal.LOGP].x
    torch.testing.assert_close(found, expected_logp(learner, "llama", groups).float(), atol=2e-5, rtol=0)


def test_tokens_without_a_set_are_said_once(caplog):
    model = make()
    groups = sampled_groups(model, {"top_k": 6})
    learner_module._say_missing_sets.cache_clear()
    with caplog.at_level(logging.WARNING):
        learner_module.tell_missing_records(model, pack(groups))
        assert not caplog.records
        for _ in range(2):
            learner_module.tell_missing_records(model, pack(without_sets(groups)))
    assert [r.message for r in caplog.records if "ids that were kept" in r.message] == [caplog.records[0].message]


def test_candidates_stay_over_the_whole_vocabulary(kit):
    groups = sampled_groups(make(), {"top_k": 4})
    signals = frozenset({Signal.LOGP, Signal.CANDIDATE_LOGP})
    batches = [pack(x) for x in (groups, without_sets(groups))]
    learner = LocalLearner(make())
    first, second = (learner.measurer.live(b, signals)[1][Signal.CANDIDATE_LOGP].x for b in batches)
    torch.testing.assert_close(first, second, atol=1e-5, rtol=0)
    assert not torch.allclose(*(learner.measure(b, LOGP)[Signal.LOGP].x for b in batches), atol=1e-3)


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_samples_records_and_learns_over_the_sets(cut, dtype):
    """From CUDA graphs through records to the learner's head on the device, whose gradient a CPU confirms."""
    model, asked = make_model_for_graphs(), prompts(6)
    sampler = generator(make_model_for_graphs(), slots=6, device="cuda", dtype=dtype)
    assert sampler.model_runner.graphs is not None
    done = ask(sampler, asked, Sampling(max_tokens=11, **cut))
    temperature, task = cut.get("temperature", 1.0), Task("random", 0)
    turns = [
        Turn(ids, d.tokens, d.logp, d.mass, d.version, kept=tuple(d.kept), temperature=temperature)
        for ids, d in zip(asked, done)
    ]
    batch = pack([Group("g", task, tuple(Trajectory(f"t{i}", task, (turn,)) for i, turn in enumerate(turns)))])
    assert all(turn.kept and all(token in ids_of(row) for token, row in zip(turn.tokens, turn.kept)) for turn in turns)
    name = str(dtype).removeprefix("torch.")
    learner = LocalLearner(model, LearnerSettings(dtype=name), device="cuda")
    on_host = LocalLearner(make_model_for_graphs())
    near = 2e-4 if dtype == torch.float32 else 0.25
    found, expected = (x.measure(batch, LOGP)[Signal.LOGP].x.float().cpu() for x in (learner, on_host))
    torch.testing.assert_close(found, behaviour(batch).x.float().cpu(), atol=near, rtol=0)
    torch.testing.assert_close(found, expected, atol=near, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("chunk", [None, 3])
def test_a_gpu_has_the_gradients_of_a_cpu_over_the_sets(chunk):
    h, w, b, y, t, _, sets = rows_with_sets(8, 40, 5, torch.float32)
    weights = torch.arange(8)
    grads = []
    for device in ("cpu", "cuda"):
        leaves = [x.detach().to(device).requires_grad_() for x in (h, w, b)]
        moved_sets = KeptSets(sets.ids.to(device), sets.size.to(device))
        logp = token_logprobs(*leaves, y.to(device), t.to(device), chunk=chunk, sets=moved_sets)[0]
        grads.append(
            [logp.detach().cpu(), *(g.cpu() for g in torch.autograd.grad((logp * weights.to(device)).sum(), leaves))]
        )
    for a, c in zip(*grads):
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------- the wire


def test_a_reply_names_the_sets_only_where_asked():
    done = Completion([4, 5], [-0.1, -0.2], [-0.3, 0.0], [0, 0], Stop.LENGTH, kept=[as_row({4, 1, 70_000}), b""])
    choice = reply_body("r", done, {}, sampling_mask=True)["choices"][0]
    assert choice["sampling_mask"] == [[1, 4, 70_000], []]
    assert read_sampling_mask(choice["sampling_mask"], done.tokens) == list(done.kept)
    assert "sampling_mask" not in reply_body("r", done, {})["choices"][0]
    assert read_sampling_mask(None, done.tokens) == []


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        ([[4]], "another length"),
        ([[4], 5], "a list of token ids was expected"),
        ([[4], [5, -1]], "a list of token ids was expected"),
        ([[4], [5, True]], "a list of token ids was expected"),
        ([[4], [6]], "does not hold the sampled id 5"),
        ([[4], [5, 6, 6]], "holds an id twice"),
    ],
)
def test_a_mask_that_does_not_fit_its_tokens_is_refused(mask, told):
    with pytest.raises(ServerFault, match=told):
        read_sampling_mask(mask, [4, 5])
