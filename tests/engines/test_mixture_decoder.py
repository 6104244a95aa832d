"""The graph decoder of mixtures against their stock forward: on a GPU with graphs and Triton kernels, elsewhere with the
reference kernels and no graph. What its routers choose is recorded without the host."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.families import make_family
from support.mixtures import SHAPE, batch_of, make_generator, make_mixture, play

from turnwise.core.records import Sampling
from turnwise.core.signals import Signal
from turnwise.engines import experts
from turnwise.engines.experts import (
    BATCHED,
    GROUPED,
    ExpertRouting,
    attach_routing,
    expert_configs,
    free_routing,
    use,
    using,
)
from turnwise.engines.generator import model_runner
from turnwise.engines.generator.cuda_graphs import MixtureDecoder, RouteCache
from turnwise.engines.generator.kv_cache import CacheChoice, RowCache
from turnwise.engines.kernels import reference
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.errors import SettingError

GPU = torch.cuda.is_available()
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no GPU")]
MIXTURES = {
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [1],
    },
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 3, "mlp_only_layers": [0]},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
}


def make(family, **changes):
    shape = {name: value for name, value in SHAPE.items() if "expert" not in name and name != "norm_topk_prob"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**shape, **MIXTURES[family], **changes})
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(4) if p.dim() > 1 else p.add_(torch.randn_like(p) * 0.1)  # norms that matter
    return model


@pytest.fixture
def reference_kernels(monkeypatch):
    monkeypatch.setattr(model_runner, "decode_ops", lambda device: (reference, ""))


def decoder_of(generator):
    decoder = generator.model_runner.graphs
    assert isinstance(decoder, MixtureDecoder), generator.describe()
    return decoder


def turns_of(trajectories):
    return [turn for trajectory in trajectories for turn in trajectory.turns]


# ------------------------------------------------------------------ on a CPU


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("family", MIXTURES)
def test_tokens_routes_and_log_probabilities_are_those_of_the_stock_forward(
    family, page, reference_kernels, monkeypatch
):
    model, cache = make(family), CacheChoice(page=page)
    generator = make_generator(model, cache=cache)
    assert decoder_of(generator).experts.proven == (GROUPED, BATCHED)
    assert "experts by grouped_mm and batched_mm" in generator.describe()
    found = turns_of(play(generator))
    monkeypatch.setattr(model_runner, "decode_ops", lambda device: (None, "no GPU"))
    stock = make_generator(model, cache=cache)
    assert stock.model_runner.graphs is None
    expected = turns_of(play(stock))
    assert [turn.tokens for turn in found] == [turn.tokens for turn in expected]
    assert all(turn.routes for turn in found) and [t.routes for t in found] == [t.routes for t in expected]
    for a, b in zip(found, expected):
        torch.testing.assert_close(torch.tensor(a.logp), torch.tensor(b.logp), atol=1e-4, rtol=0)


def test_published_weights_of_experts_and_routers_take_effect(reference_kernels):
    model, other = make("Qwen3Moe"), make("Qwen3Moe", initializer_range=0.05)
    generator = make_generator(model)
    before = play(generator)
    asyncio.run(generator.publish({n: p.detach() for n, p in other.named_parameters()}, 1))
    after, fresh = play(generator), play(make_generator(other))
    assert (
        [t.tokens for t in turns_of(after)]
        == [t.tokens for t in turns_of(fresh)]
        != [t.tokens for t in turns_of(before)]
    )
    assert [t.routes for t in turns_of(after)] == [t.routes for t in turns_of(fresh)]


def test_adapters_arrive_merged(reference_kernels):
    model = make_mixture()
    learner = LocalLearner(copy.deepcopy(model), LearnerSettings(dtype="float32", lora_rank=2))
    generator = make_generator(model)
    decoder_of(generator)
    asyncio.run(generator.publish(learner.weights(), 1))
    batch = batch_of(play(generator))
    logp = learner.measure(batch, frozenset({Signal.PROXIMAL}))[Signal.PROXIMAL].x
    torch.testing.assert_close(logp, batch.behaviour.x, atol=1e-4, rtol=0)


def test_free_routers_decode_too_and_record_nothing(reference_kernels):
    model = make_mixture()
    free_routing(model)
    generator = make_generator(model)
    assert decoder_of(generator).route_cache is None
    assert not any(turn.routes for turn in turns_of(play(generator)))


def test_the_implementation_follows_the_rows(reference_kernels, monkeypatch):
    generator = make_generator(make_mixture())
    decoder, seen = decoder_of(generator), []
    limit = 3 * decoder.experts.k * decoder.experts.expert_bytes  # three rows gather, four do not
    monkeypatch.setattr("turnwise.engines.experts.GATHERED_BYTES", limit)
    original = experts.using
    monkeypatch.setattr(experts, "using", lambda configs, name: seen.append(name) or original(configs, name))
    for lanes in (1, 3, 4, 8):
        zeros = torch.zeros(lanes, dtype=torch.int64)
        with torch.inference_mode():
            decoder._logits(zeros, zeros - 1)
    assert seen == [BATCHED, BATCHED, GROUPED, GROUPED]


def test_an_implementation_with_other_logits_is_not_used(reference_kernels, monkeypatch):
    from turnwise.engines.experts import ALL_EXPERTS_FUNCTIONS

    right = ALL_EXPERTS_FUNCTIONS[GROUPED]
    wrong = lambda *args: right(*args) * 1.5  # noqa: E731
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, BATCHED, wrong)
    generator = make_generator(make_mixture())
    assert decoder_of(generator).experts.proven == (GROUPED,)
    assert "not batched_mm: its logits were off by" in generator.describe()


def test_with_no_implementation_left_the_stock_forward_decodes_and_says_why(reference_kernels, monkeypatch):
    monkeypatch.setattr(
        MixtureDecoder, "_capture_fault", lambda self: "operation not permitted when stream is capturing"
    )
    generator = make_generator(make_mixture())
    assert generator.model_runner.graphs is None
    assert "grouped_mm: operation not permitted when stream is capturing" in generator.describe()
    assert len(turns_of(play(generator))[0].routes) > 0


@pytest.mark.parametrize(
    "model, why",
    [
        (lambda: make("Olmoe", clip_qkv=8.0), "clipped queries and keys"),
        (lambda: make("Mixtral", sliding_window=16), "sliding windows"),
        (lambda: make_family("GraniteMoe"), "model type granitemoe"),
    ],
)
def test_a_mixture_that_it_does_not_support_decodes_as_before_and_says_so(model, why, monkeypatch, reference_kernels):
    monkeypatch.setattr(model_runner.ModelRunner, "_tolerance", lambda self: 0.05)
    generator = make_generator(model())
    assert generator.model_runner.graphs is None and why in generator.describe()


def test_fp8_is_not_claimed_for_experts(reference_kernels):
    generator = make_generator(make_mixture(), dtype=torch.float8_e4m3fn)
    assert "not CUDA graphs in fp8, because of experts" in generator.describe()
    assert "with fp8 weights" not in generator.describe()


@pytest.mark.parametrize("fast", [True, False])
def test_the_proof_forces_the_experts_of_the_reference(fast, reference_kernels):
    """So it is about rounding, and not about routers near a tie, which choose others in another order of sums."""
    model = make_mixture()
    runner = make_generator(model, fast=fast).model_runner
    ids = torch.arange(3, 15)
    assert runner._probe_routes.shape == (12, runner.route_cache.routing.width)
    with torch.inference_mode():
        routing = attach_routing(model)
        with routing.recording() as chosen:
            reference = model(input_ids=ids[None], use_cache=False).logits[0]
        runner._probe_routes = chosen()
        assert runner._deviation(ids, reference) < 1e-3
        runner._probe_routes = (chosen() + 1) % routing.experts
        assert runner._deviation(ids, reference) > 0.05


def test_positions_after_the_forced_ones_choose_for_themselves():
    model = make_mixture()
    routing = attach_routing(model)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        with routing.recording() as plain:
            model(input_ids=ids, use_cache=False)
        other = (plain()[:2] + 1) % routing.experts
        with routing.forcing(other, padded=True), routing.recording() as chosen:
            model(input_ids=ids, use_cache=False)
    assert torch.equal(chosen()[:2], other) and not torch.equal(chosen()[2:], other[:1].expand(4, -1))
    assert torch.equal(chosen()[2:, : routing.k], plain()[2:, : routing.k]), "the first layer's reads no other position"


# ------------------------------------------------------------------ recording at fixed addresses


def test_a_given_buffer_receives_the_choices_and_keeps_its_address():
    model = make_mixture()
    routing = attach_routing(model)
    buffer = torch.full((6, routing.routers, routing.k), -7, dtype=torch.int16)
    address = buffer.data_ptr()
    for seed in (0, 1):
        ids = torch.randint(0, 64, (1, 6), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            with routing.recording(buffer) as chosen:
                model(input_ids=ids, use_cache=False)
            with routing.recording() as plain:
                model(input_ids=ids, use_cache=False)
        assert torch.equal(buffer.flatten(1), plain()) and chosen().data_ptr() == address
    with pytest.raises(SettingError, match="reads 5 positions, and 6 are being recorded"), routing.recording(buffer):
        model(input_ids=torch.arange(5)[None])


@settings(deadline=None)
@given(
    st.lists(st.integers(-1, 8), min_size=1, max_size=6),  # columns of lanes: −1 and 8 (the context) are inactive
    st.sampled_from([0, 4]),
    st.integers(0, 2**16),
)
def test_active_lanes_store_their_routes_and_nothing_else_changes(columns, page, seed):
    routing, context, rows = ExpertRouting(2, 300, 3), 8, 6
    routes = RouteCache(routing, 0)
    shapes = [((1, routing.width), (1, routing.width))]
    cache = CacheChoice(page=page).make(shapes, rows, context, torch.bfloat16, torch.device("cpu"))
    cache.allocate_all()
    if page:  # inactive lanes still name pages, which others may own by now
        rng = torch.Generator().manual_seed(seed)
        cache.table[:] = torch.randperm(rows * 2, generator=rng).view(rows, 2).int() + 1
        for lane, column in enumerate(columns):
            if not 0 <= column < context:
                cache.table[lane] = cache.table[(lane + 1) % len(columns)]
    position = torch.tensor(columns)
    chosen = torch.randint(0, 300, (len(columns), 2, 3), generator=torch.Generator().manual_seed(seed)).to(torch.int16)
    expected_keys, expected_values = cache.keys[0].clone(), cache.values[0].clone()
    lanes = torch.arange(len(columns))
    block, offset = cache.places(lanes, position.clamp(0, context - 1))
    for lane in [n for n, column in enumerate(columns) if 0 <= column < context]:
        flat = chosen[lane].flatten()
        expected_keys[block[lane], 0, offset[lane]] = (flat // 256).bfloat16()
        expected_values[block[lane], 0, offset[lane]] = (flat % 256).bfloat16()
    routes.store(cache, chosen, block, position)
    assert torch.equal(cache.keys[0], expected_keys) and torch.equal(cache.values[0], expected_values)


def test_stored_routes_are_read_back():
    routing = ExpertRouting(2, 300, 3)
    routes = RouteCache(routing, 0)
    cache = RowCache([((1, routing.width), (1, routing.width))], 2, 8, torch.bfloat16, torch.device("cpu"))
    cache.allocate_all()
    chosen = torch.tensor([[[1, 2, 299], [4, 5, 6]], [[7, 8, 9], [256, 255, 0]]], dtype=torch.int16)
    routes.store(cache, chosen, torch.tensor([0, 1]), torch.tensor([3, 5]))
    rows = routes.read(cache, [(0, 3, 4), (1, 5, 6)])
    assert [row for part in rows for row in part] == [chosen[n].flatten().numpy().tobytes() for n in range(2)]


# ------------------------------------------------------------------ on a GPU


@pytest.fixture(params=[pytest.param("cuda", marks=on_gpu)])
def device(request):
    return request.param


@pytest.mark.parametrize("page", [0, 64])
@pytest.mark.parametrize("family", MIXTURES)
def test_decode_and_prefill_are_captured_and_sample_the_policy(family, page, device):
    model = make(family, hidden_size=128, head_dim=32)
    generator = make_generator(copy.deepcopy(model), device=device, dtype=torch.bfloat16, cache=CacheChoice(page=page))
    decoder = decoder_of(generator)
    for _ in range(2):  # the second time prefill is captured too
        batch = batch_of(play(generator))
    assert decoder.decode_graphs and decoder.prefill_graphs and not decoder.capture_errors, generator.describe()
    assert batch.sequences.routes is not None
    learner = LocalLearner(model, LearnerSettings(dtype="bfloat16"), device=device)
    logp = learner.measure(batch, frozenset({Signal.PROXIMAL}))[Signal.PROXIMAL].x
    assert float((logp.cpu() - batch.behaviour.x).abs().mean()) < 0.05


@pytest.mark.parametrize("implementation", [GROUPED, BATCHED])
def test_a_replayed_graph_writes_the_routes_of_its_own_inputs(implementation, device):
    model = make_mixture(hidden_size=128, head_dim=32).to(device, torch.bfloat16)
    routing = attach_routing(model)
    ids = torch.zeros(1, 6, dtype=torch.int64, device=device)
    buffer = torch.zeros(6, routing.routers, routing.k, dtype=torch.int16, device=device)
    position = torch.arange(6, device=device)[None]
    later = torch.full((6, 6), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16, device=device).triu(1)[None, None]
    inputs = {
        "input_ids": ids,
        "position_ids": position,
        "attention_mask": later,
        "use_cache": False,
    }  # no mask is made

    def run():
        with routing.recording(buffer), using(expert_configs(model), implementation):
            model(**inputs)

    with torch.no_grad():
        model.set_attn_implementation("eager")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for seed in (1, 2):
            ids.copy_(torch.randint(0, 64, (1, 6), generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            replayed = buffer.clone()
            use(model, implementation)
            with routing.recording() as chosen:
                model(**inputs)
            assert torch.equal(replayed.flatten(1), chosen())


def test_a_step_of_the_learner_multiplies_experts_in_half_precision(device):
    model = make_mixture(hidden_size=128, head_dim=32)
    batch = batch_of(play(make_generator(copy.deepcopy(model), device=device, dtype=torch.bfloat16)))
    exact = LocalLearner(copy.deepcopy(model), LearnerSettings(dtype="float32"), device="cpu")
    half = LocalLearner(model, LearnerSettings(dtype="bfloat16"), device=device)
    assert half.model.config._experts_implementation == "turnwise"
    expected, found = (
        learner.measure(batch, frozenset({Signal.PROXIMAL}))[Signal.PROXIMAL].x.cpu() for learner in (exact, half)
    )
    assert float((found - expected).abs().mean()) < 0.05


def test_greedy_turns_of_many_lanes_equal_those_of_one(device):
    generator = make_generator(make("Mixtral"), device=device, slots=16)
    decoder_of(generator)

    async def greedy(count):
        sessions = [generator.open(n) for n in range(count)]
        turns = [s.generate([3, 5, 7, 9 + n], Sampling(temperature=0, max_tokens=12)) for n, s in enumerate(sessions)]
        return [done.tokens for done in await asyncio.gather(*turns)]

    assert asyncio.run(greedy(1))[0] == asyncio.run(greedy(9))[0]
