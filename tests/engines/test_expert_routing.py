"""Experts that the sampler's routers chose are recorded with every position and forced in the learner's forward pass."""

from __future__ import annotations

import asyncio
import copy
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.families import make_family
from support.mixtures import TASK, batch_of, make_generator, make_mixture, new_turn, play, without_routes
from support.small_models import Linear, weighted
from torch.nn.functional import linear

from turnwise.core.batch import pack
from turnwise.core.records import Completion, Fork, Group, Origin, Sampling, Stop, Trajectory
from turnwise.core.signals import Signal
from turnwise.engines.experts import attach_routing, forced_routes, free_routing, routing_of
from turnwise.engines.generator.kv_cache import CacheChoice
from turnwise.engines.generator.model_runner import StockRunner
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.engines.remote.remote_generator import _cut as cut_at_stop_string
from turnwise.engines.remote.token_wire import read_part
from turnwise.errors import ServerFault, SettingError
from turnwise.rollout.strategies.tree import first_tokens
from turnwise.serve.generate_api import reply_body
from turnwise.store.trajectory_codec import decode, encode

FAMILIES = ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GraniteMoe", "GptOss", "DeepseekV2", "DeepseekV3", "Dbrx"]
EXACT = LearnerSettings(dtype="float32")


def learner_of(model, **changes):
    return LocalLearner(copy.deepcopy(model), replace(EXACT, **changes))


def logp_of(learner, batch):
    return learner.measure(batch, frozenset({Signal.PROXIMAL}))[Signal.PROXIMAL].x


def difference(learner, batch):
    """Mean |log π of the learner − log π of the sampler|."""
    return float((logp_of(learner, batch) - batch.behaviour.x).abs().mean())


def gradients(learner, batch):
    """The gradient of every trained weight before the optimiser changes it."""
    kept = {}
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p, n=n: kept.update({n: p.grad.clone()}))
        for n, p in learner.trained.items()
    ]
    learner.update(weighted(batch), Linear())
    for hook in hooks:
        hook.remove()
    return kept


# ------------------------------------------------------------------ routers


@pytest.mark.parametrize("family", [*FAMILIES, "Qwen3Next"])
def test_routers_of_every_family_are_recorded_and_forced(family):
    model = make_family(family)
    routing = attach_routing(model)
    assert routing is not None and routing.k == 2
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        with routing.recording() as chosen:
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain)
        routes = chosen()
        assert routes.shape == (14, routing.width) and int(routes.min()) >= 0 and int(routes.max()) < routing.experts
        with routing.forcing(routes):
            torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, plain)
        other = torch.full_like(routes, -1)
        other[3] = (routes[3] + 1) % routing.experts  # one position of the first row chooses other experts
        with routing.forcing(other):
            changed = (model(input_ids=ids, use_cache=False).logits - plain).abs().amax(-1)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain)
    assert changed[0, 3] > 1e-5
    assert max(float(changed[0, :3].max()), float(changed[1].max())) < 1e-6


def test_a_dense_model_and_one_with_free_routes_have_no_routing():
    assert attach_routing(make_family("Llama")) is None
    free = make_mixture()
    free_routing(free)
    assert attach_routing(copy.deepcopy(free)) is None
    assert "experts" not in LocalLearner(free, EXACT).describe()
    assert "experts as recorded" in learner_of(make_mixture()).describe()


def test_copies_have_their_own_state():
    model = make_mixture()
    attach_routing(model)
    twin = copy.deepcopy(model)
    assert routing_of(twin.get_decoder()) is not routing_of(model.get_decoder())
    ids, routes = torch.arange(6)[None], torch.arange(4, dtype=torch.int16).repeat(6, 3)
    with torch.no_grad(), forced_routes(twin.get_decoder(), routes):
        assert not torch.equal(twin(input_ids=ids).logits, model(input_ids=ids).logits)


def test_routes_of_another_model_are_refused():
    model = make_mixture()
    routing = attach_routing(model)
    with (
        pytest.raises(SettingError, match="another model sampled them"),
        routing.forcing(torch.zeros(5, 7, dtype=torch.int16)),
    ):
        pass
    routes = torch.zeros(6, 12, dtype=torch.int16)
    with pytest.raises(SettingError, match="5 positions, and 6 are recorded"), routing.forcing(routes):
        model(input_ids=torch.arange(5)[None])


# ------------------------------------------------------------------ gradients


def dense_block(block, chosen, renormalise):
    """A slow reference: every expert on every position; the softmax over all experts, masked by the choice."""

    def forward(x):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        scores = torch.softmax(linear(x, block.gate.weight), -1)
        mask = torch.zeros_like(scores).scatter(1, chosen.long(), 1.0)
        gates = scores * mask
        gates = gates / gates.sum(-1, keepdim=True) if renormalise else gates
        out = 0
        for e in range(scores.shape[1]):
            gate, up = linear(x, block.experts.gate_up_proj[e]).chunk(2, -1)
            out = out + gates[:, e, None] * linear(block.experts.act_fn(gate) * up, block.experts.down_proj[e])
        return out.reshape(shape)

    return forward


@pytest.mark.parametrize("renormalise", [True, False])
def test_gradients_equal_a_reference_that_masks_the_softmax(renormalise):
    model = make_mixture(norm_topk_prob=renormalise).double()
    model.set_experts_implementation("eager")  # the grouped product of Transformers knows no float64
    slow, routing = copy.deepcopy(model), attach_routing(model)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (1, 12), generator=generator)
    routes = torch.stack([torch.randperm(32, generator=generator)[:4] for _ in range(36)]).view(12, 12).to(torch.int16)
    for number, layer in enumerate(slow.model.layers):
        layer.mlp.forward = dense_block(layer.mlp, routes.view(12, 3, 4)[:, number], renormalise)
    weight = torch.randn(1, 12, 64, generator=generator).double()
    with routing.forcing(routes):
        logits = model(input_ids=ids, use_cache=False).logits
    expected = slow(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)  # the router's softmax is in float32
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    for (name, p), (_, q) in zip(model.named_parameters(), slow.named_parameters()):
        assert float((p.grad - q.grad).abs().max()) <= 1e-4 * float(q.grad.abs().max()), name
    assert all(float(layer.mlp.gate.weight.grad.abs().sum()) > 0 for layer in model.model.layers)


# ------------------------------------------------------------------ generator


@pytest.mark.parametrize(
    ("family", "page"),
    [("Mixtral", 0), ("Qwen3Moe", 0), ("Qwen3Moe", 8), ("Olmoe", 8), ("DeepseekV3", 0), ("GptOss", 0)],
)
def test_the_sampler_records_what_a_plain_forward_chooses(family, page):
    model = make_family(family)
    generator = make_generator(
        model, slots=3, cache=CacheChoice(page=page)
    )  # fewer rows than dialogues: prefixes are copied, rows move and are evicted
    assert isinstance(generator.model_runner, StockRunner) == (family == "GptOss")
    trajectories = play(generator)
    routing = attach_routing(model)
    for trajectory in trajectories:
        ids = torch.tensor([trajectory.ids()])
        with torch.no_grad(), routing.recording() as chosen:
            model(input_ids=ids, use_cache=False)
        packed = batch_of([trajectory]).sequences.routes
        assert torch.equal(packed[:-1], chosen()[:-1])  # the last token was never read
        assert torch.equal(packed[-1], torch.full_like(packed[-1], -1))


def test_experts_beyond_a_byte_survive_a_bfloat16_cache():
    model = make_mixture(num_experts=300, num_hidden_layers=1)
    trajectory = play(make_generator(model, dtype=torch.bfloat16), dialogues=2)[0]
    assert int(np.frombuffer(b"".join(trajectory.turns[0].routes), "<i2").max()) > 256
    rounded, routing = copy.deepcopy(model).bfloat16(), None
    routing = attach_routing(rounded)
    with torch.no_grad(), routing.recording() as chosen:
        rounded(input_ids=torch.tensor([trajectory.ids()]), use_cache=False)
    packed = batch_of([trajectory]).sequences.routes
    same = (packed[:-1].sort(1).values == chosen()[:-1].sort(1).values).float().mean()
    assert float(same) > 0.9  # bfloat16 has near ties


def test_a_dense_model_records_nothing():
    assert all(turn.routes == () for t in play(make_generator(make_family("Llama"))) for turn in t.turns)


def test_tokens_keep_the_routes_they_were_sampled_with_when_weights_change():
    model = make_mixture()
    generator = make_generator(model, tick=2)
    changed = {n: p.detach() * 1.5 for n, p in make_mixture(1).named_parameters()}

    async def run():
        session = generator.open(0)
        sampling = asyncio.ensure_future(session.generate([3, 5, 7, 9], Sampling(max_tokens=100)))
        while generator.stats()["tokens"] < 12 and not sampling.done():
            await asyncio.sleep(0.0005)
        await generator.publish(changed, 1)
        return await sampling

    done = asyncio.run(run())
    first = sum(version == 0 for version in done.version)
    assert 0 < first < 100 and len(done.routes) == 103
    routing, sampled = attach_routing(model), np.stack([np.frombuffer(row, "<i2") for row in done.routes])
    with torch.no_grad(), routing.recording() as chosen:
        model(input_ids=torch.tensor([[3, 5, 7, 9, *done.tokens]]), use_cache=False)
    before = chosen().numpy()
    assert np.array_equal(sampled[: 3 + first], before[: 3 + first])
    assert not np.array_equal(sampled[3 + first :], before[3 + first : -1])


# ------------------------------------------------------------------ sampler and learner


def test_same_weights_and_dtype_give_the_samplers_log_probabilities():
    model = make_mixture()
    batch = batch_of(play(make_generator(model)))
    replayed, free = (difference(learner_of(model), b) for b in (batch, without_routes(batch)))
    assert replayed < 2e-6 and replayed <= free + 1e-7


def test_replay_shrinks_the_difference_of_a_sampler_in_half_precision():
    model = make_mixture()
    batch = batch_of(play(make_generator(model, dtype=torch.bfloat16), size=24))
    replayed, free = (difference(learner_of(model), b) for b in (batch, without_routes(batch)))
    assert replayed < free / 1.5


def test_replay_shrinks_the_difference_of_noisy_routers():
    """Noise at the routers' inputs only, as another kernel would make it."""
    model = make_mixture()
    batch = batch_of(play(make_generator(model), size=24))
    learner, noise = learner_of(model), torch.Generator().manual_seed(0)

    def disturb(router, args):
        return (args[0] + 0.003 * args[0].std() * torch.randn(args[0].shape, generator=noise),)

    for layer in learner.model.model.layers:
        layer.mlp.gate.register_forward_pre_hook(disturb)
    replayed, free = (difference(learner, b) for b in (batch, without_routes(batch)))
    assert 0 < replayed < free / 5


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_packing_and_micro_batches_do_not_matter(family):
    model = make_family(family)
    batch = batch_of(play(make_generator(model)))
    whole, parts = learner_of(model), learner_of(model, positions=40)
    torch.testing.assert_close(logp_of(whole, batch), logp_of(parts, batch), rtol=1e-5, atol=1e-6)
    order = [3, 0, 4, 2, 1]
    turned, tokens = batch.select(order), [batch.select([k]).token.x.numel() for k in range(5)]
    expected = logp_of(whole, batch).split(tokens)
    torch.testing.assert_close(logp_of(whole, turned), torch.cat([expected[k] for k in order]), rtol=1e-5, atol=1e-6)
    found, wanted = gradients(parts, batch), gradients(whole, batch)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-5, msg=name)


def test_siblings_with_other_routes_do_not_share_their_prompt():
    """Two siblings read one prompt through other experts: each keeps its own, although prefixes are computed once."""
    model = make_mixture()
    a, b, c = play(make_generator(model), dialogues=3, turns=1)
    turn = b.turns[0]
    shifted = [((np.frombuffer(row, "<i2") + 1) % 32).astype("<i2").tobytes() for row in turn.routes]
    b = replace(b, turns=(replace(turn, routes=tuple(shifted)),))
    learner = learner_of(model)
    together = logp_of(learner, batch_of([a, b, c]))
    alone = torch.cat([logp_of(learner, batch_of([t])) for t in (a, b, c)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    same = logp_of(learner, batch_of([a, replace(b, turns=(turn,)), c]))
    assert float((together - same).abs().max()) > 1e-3


def test_recomputed_layers_are_forced_too():
    model = make_mixture()
    batch = batch_of(play(make_generator(model)))
    batch.sequences.routes.copy_((batch.sequences.routes + 1) % 32)  # not what the routers would choose
    plain, recomputed = (gradients(learner_of(model, recompute=flag), batch) for flag in (False, True))
    for name, grad in plain.items():
        torch.testing.assert_close(recomputed[name], grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
def test_a_fork_carries_the_routes_of_its_prefix():
    model = make_mixture()
    generator = make_generator(model)

    async def run():
        session = generator.open(0)
        first = await session.generate([3, 5, 7, 9, 2, 4, 6, 8, 1], Sampling(max_tokens=12))
        branch = session.fork(7)
        start = [3, 5, 7, 9, 2, 4, 6, 8, 1, *first.tokens[:5]]
        return first, await branch.generate(start, Sampling(max_tokens=10))

    first, second = asyncio.run(run())
    parent = Trajectory("a", TASK, (new_turn([3, 5, 7, 9, 2, 4, 6, 8, 1], first),), {})
    fork = Trajectory("b", TASK, (new_turn([], second, all_routes=True),), {}, fork=Fork("a", 0, 5))
    batch = pack([Group("g", TASK, (parent, fork))])
    rows = batch.sequences.routes
    assert torch.equal(rows[:13], rows[21:34]) and int((rows == -1).all(1).sum()) == 2
    assert difference(learner_of(model), batch) < 2e-6


# ------------------------------------------------------------------ records


def test_routes_survive_the_ledger_exactly():
    trajectory = play(make_generator(make_mixture()))[1]
    assert decode(*encode(trajectory)) == trajectory
    wide = play(make_generator(make_mixture(num_experts=300, num_hidden_layers=1)))[1]
    assert decode(*encode(wide)) == wide
    assert decode(encode(trajectory)[0], None).turns[0].routes == ()


def test_routes_survive_the_wire():
    done = asyncio.run(make_generator(make_mixture()).open(0).generate([3, 5, 7], Sampling(max_tokens=6)))
    body = reply_body("r", done, {})
    assert read_part(body, frozenset()).completion.routes == list(done.routes)
    for routes in ({"rows": 3, "data": "AAA="}, {"rows": 8}, {"rows": 1, "data": "?"}):
        body["choices"][0]["turnwise"]["routes"] = routes
        with pytest.raises(ServerFault, match="routes"):
            read_part(body, frozenset())


@pytest.mark.parametrize("shorten", [first_tokens, cut_at_stop_string])
def test_a_shortened_completion_keeps_the_routes_of_what_remains(shorten):
    done = Completion([7, 8, 9], [-1.0] * 3, [0.0] * 3, [0] * 3, Stop.LENGTH, routes=[b"p1", b"p2", b"t7", b"t8"])
    assert list(shorten(done, 1).tokens) == [7] and list(shorten(done, 1).routes) == [b"p1", b"p2"]
    assert list(shorten(replace(done, routes=()), 1).routes) == []


def test_a_batch_without_routes_trains_and_says_so_once(caplog):
    model = make_mixture()
    batch = weighted(without_routes(batch_of(play(make_generator(model)))))
    learner = learner_of(model)
    with caplog.at_level(logging.WARNING):
        assert learner.update(batch, Linear())["skipped"] == 0
        learner.update(batch, Linear())
    assert [r.message for r in caplog.records].count(caplog.records[-1].message) == 1
    assert "do not say which experts" in caplog.text


def test_demonstrations_need_no_routes(caplog):
    model = make_mixture()
    turns = play(make_generator(model), dialogues=1)[0].turns
    shown = Trajectory("d", TASK, tuple(replace(t, routes=()) for t in turns), {}, origin=Origin.EXPERT)
    with caplog.at_level(logging.WARNING):
        learner_of(model).update(weighted(batch_of([shown])), Linear())
    assert "experts" not in caplog.text


def test_some_records_without_routes_beside_others():
    model = make_mixture()
    a, b = play(make_generator(model), dialogues=2)
    b = replace(b, turns=tuple(replace(turn, routes=()) for turn in b.turns))
    batch, learner = batch_of([a, b]), learner_of(model)
    assert int((batch.sequences.routes == -1).all(1).sum()) == len(b.ids()) + 1
    assert difference(learner, batch) < 2e-6


def test_the_reference_reads_the_recorded_experts_too():
    """Otherwise the divergence from the reference would begin with the noise of its routers."""
    model = make_mixture()
    batch = batch_of(play(make_generator(model, dtype=torch.bfloat16)))
    learner = learner_of(model)
    measured = learner.measure(batch, frozenset({Signal.PROXIMAL, Signal.REFERENCE}))
    assert torch.equal(measured[Signal.PROXIMAL].x, measured[Signal.REFERENCE].x)


def test_a_resumed_learner_repeats_bit_for_bit():
    model = make_mixture()
    batch = weighted(batch_of(play(make_generator(model))))
    straight, before, resumed = (learner_of(model) for _ in range(3))
    for _ in range(3):
        straight.update(batch, Linear())
    before.update(batch, Linear())
    resumed.load_state_dict(before.state_dict())
    for _ in range(2):
        resumed.update(batch, Linear())
    for name, p in straight.model.named_parameters():
        assert torch.equal(p, dict(resumed.model.named_parameters())[name]), name


def test_the_balancing_loss_of_a_configuration_is_not_added():
    """``output_router_logits`` makes a plain forward add a load-balancing loss; the learner optimises its objective alone."""
    model = make_mixture()
    batch = batch_of(play(make_generator(model)))
    balanced = copy.deepcopy(model)
    balanced.config.output_router_logits, balanced.config.router_aux_loss_coef = True, 10.0
    plain, other = gradients(learner_of(model), batch), gradients(learner_of(balanced), batch)
    assert all(torch.equal(other[name], grad) for name, grad in plain.items())
