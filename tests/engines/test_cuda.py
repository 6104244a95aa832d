"""The CUDA-graph decoder against the stock forward: on a GPU with graphs and Triton kernels, elsewhere with the reference kernels
and no graph. The hand-written CPU decoder runs the same tests where they apply, which checks the tests too."""

from __future__ import annotations

import asyncio
import copy
import importlib
import importlib.util
import os
import random
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from support.prompting import V, ask, bits, check_logp, dialogues, family, full_logp, peaked, prompts, run
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from turnwise.config.settings import Settings
from turnwise.core.batch import pack
from turnwise.core.levels import TRAJECTORY
from turnwise.core.records import Completion, Group, Sampling, Stop, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.engines.generator import cuda_graphs, model_runner, scheduler
from turnwise.engines.generator.cuda_graphs import BLOCKS_IN_FLIGHT, SYNC_EVERY, GraphShape, batch_buckets
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.kernels import reference
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.errors import SettingError
from turnwise.training import engines

GPU = torch.cuda.is_available()
SHAPE = {
    "vocab_size": V, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
WIDE = {**SHAPE, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}  # three queries to a key
EQUAL = {**SHAPE, "num_key_value_heads": 4}
MAKERS = family(SHAPE, WIDE, EQUAL)


def make(kind: str = "llama", seed: int = 0) -> PreTrainedModel:
    return peaked(MAKERS[kind], seed)


@dataclass(frozen=True)
class GeneratorFactory:
    """Makes generators with one decode path."""

    device: str
    ahead: bool  # whether they sample on the GPU ahead of the host

    def __call__(self, model: PreTrainedModel, decode: Any = None, **options: Any) -> LocalGenerator:
        options = {"slots": 4, "context": 128, "stop_ids": (), "device": self.device, **options}
        made = LocalGenerator(model, decode, **options)
        assert (made.model_runner.graphs is not None) == self.ahead, made.describe()
        return made


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DECODE_PATHS = ["decoder", "reference", pytest.param("gpu", marks=pytest.mark.skipif(not GPU, reason="no GPU"))]


@pytest.fixture(params=DECODE_PATHS)
def factory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GeneratorFactory:
    if request.param == "reference":
        monkeypatch.setattr(model_runner, "decode_ops", lambda device: (reference, ""))
    return GeneratorFactory("cuda" if request.param == "gpu" else "cpu", request.param != "decoder")


@pytest.fixture
def graph_factory(factory: GeneratorFactory) -> GeneratorFactory:
    if not factory.ahead:
        pytest.skip("for decoders that sample ahead of the host")
    return factory


# ---------------------------------------------------------------------- same as the stock forward


@pytest.mark.parametrize("kind", MAKERS)
def test_greedy_tokens_are_those_of_the_stock_forward(factory: GeneratorFactory, kind: str):
    model, asked = make(kind), prompts(9, 1, 40)
    for ids, done in zip(asked, ask(factory(model), asked, Sampling(temperature=0, max_tokens=14))):
        given, mask = torch.tensor([ids]), torch.ones(1, len(ids))
        expected = model.generate(given, attention_mask=mask, max_new_tokens=14, do_sample=False, pad_token_id=0)
        assert list(done.tokens) == expected[0, len(ids) :].tolist() and done.stop is Stop.LENGTH
        check_logp(model, ids, done, atol=5e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_sampled_log_probabilities_are_those_of_the_stock_forward(factory: GeneratorFactory, temperature: float):
    model, asked = make("qwen3"), prompts(7, 1, 30)
    for ids, done in zip(asked, ask(factory(model, slots=8), asked, Sampling(temperature=temperature, max_tokens=40))):
        expected = full_logp(model, ids, done, temperature)
        torch.testing.assert_close(torch.tensor(done.logp), expected, atol=5e-4, rtol=0)
        assert len(done.tokens) == 40 and not any(done.mass)


def gap(
    model: PreTrainedModel, asked: list[list[int]], done: list[Completion], factory: GeneratorFactory, dtype: str
) -> float:
    """Mean |sampler − learner|."""
    learner = LocalLearner(copy.deepcopy(model), LearnerSettings(dtype=dtype), device=factory.device)
    turns = [Turn(tuple(i), tuple(c.tokens), tuple(c.logp), version=tuple(c.version)) for i, c in zip(asked, done)]
    task = Task("probe", 0)
    batch = pack([Group("0", task, tuple(Trajectory(str(k), task, (t,)) for k, t in enumerate(turns)))])
    logp = learner.measure(batch, frozenset({Signal.LOGP}))[Signal.LOGP].x
    return float((logp - batch.behaviour.x.to(logp.dtype)).abs().mean())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize(
    ("rollouts", "dtype", "limit"),
    [
        (torch.float32, "float32", 1e-4),
        (torch.bfloat16, "bfloat16", 3e-2),
        (torch.float16, "float32", 1e-2),
        (torch.float8_e4m3fn, "float32", 0.4),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_learner_finds_the_probabilities_it_was_told(factory: GeneratorFactory, kind, rollouts, dtype, limit):
    model, asked = make(kind), prompts(6, 60, 90)
    done = ask(factory(model, slots=8, context=256, dtype=rollouts), asked, Sampling(max_tokens=60))
    found = gap(model, asked, done, factory, dtype)
    assert found < limit
    if rollouts == torch.float8_e4m3fn:
        assert found > 1e-3  # something was rounded


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_lower_precision_leaves_rotary_frequencies_alone(factory: GeneratorFactory):
    """Frequencies rounded to bfloat16 turn the heads of a long dialogue to somewhere else."""
    model = make()
    g = factory(model, dtype=torch.bfloat16)
    assert torch.equal(g.model_runner.model.model.rotary_emb.inv_freq.cpu(), model.model.rotary_emb.inv_freq)
    assert {p.dtype for p in g.model_runner.model.parameters()} == {torch.bfloat16}


@pytest.mark.skipif(GPU or not INTERPRETED, reason="for Triton under TRITON_INTERPRET=1")
@pytest.mark.parametrize("kind", ["llama3", "qwen3"])
def test_interpreted_kernels_decode_like_their_twins(monkeypatch: pytest.MonkeyPatch, kind: str):
    """Slow: three lanes of few tokens."""
    model, asked, found = make(kind), prompts(3, 1, 9), []
    settings = [Sampling(max_tokens=6), Sampling(temperature=0, max_tokens=4), Sampling(top_p=0.8, max_tokens=5)]
    for name in ("reference", "triton.decode"):
        module = importlib.import_module(f"turnwise.engines.kernels.{name}")
        monkeypatch.setattr(model_runner, "decode_ops", lambda device, module=module: (module, ""))
        found.append(ask(GeneratorFactory("cpu", True)(model), asked, settings))
    for a, b in zip(*found):
        assert list(a.tokens) == list(b.tokens)
        torch.testing.assert_close(torch.tensor(a.logp), torch.tensor(b.logp), atol=1e-4, rtol=0)


# ---------------------------------------------------------------------- sessions over time


def test_several_turns_of_ragged_dialogues(factory: GeneratorFactory):
    model = make("qwen3")
    for slots in (3, 16):
        for i, turns in enumerate(run(dialogues(factory(model, slots=slots), None))):
            rng, ids = random.Random(i), [1, 2, 3 + i]
            for done in turns:
                rng.randint(1, 25)
                check_logp(model, ids, done, atol=5e-4)
                ids = [*ids, *done.tokens, *(rng.randrange(V) for _ in range(rng.randint(1, 6)))]


def test_the_same_bits_again_whatever_tools_take(factory: GeneratorFactory):
    model = make("qwen3")
    base = bits(run(dialogues(factory(model, slots=6), None)))
    for seed in range(2):
        assert bits(run(dialogues(factory(model, slots=6), random.Random(seed)))) == base


def test_tokens_do_not_depend_on_batch_order_or_slots(factory: GeneratorFactory):
    model, asked, seeds = make(), prompts(12), list(range(100, 112))
    settings = [Sampling(max_tokens=5 + 3 * i, top_p=0.9 if i % 3 else 1.0) for i in range(12)]
    base = [c.tokens for c in ask(factory(model, slots=12), asked, settings, seeds)]
    for slots, tick, deterministic in ((1, None, True), (5, 3, True), (4, 100, False)):
        g = factory(model, slots=slots, tick=tick, deterministic=deterministic)
        order = random.Random(slots).sample(range(12), 12)
        again = ask(g, [asked[i] for i in order], [settings[i] for i in order], [seeds[i] for i in order])
        assert [again[order.index(i)].tokens for i in range(12)] == base
    assert len({tuple(c) for c in base}) == 12


def test_a_shared_prompt_is_read_once(factory: GeneratorFactory):
    model, ids = make(), prompts(1, 30, 30)[0]
    g = factory(model, slots=8)
    done = ask(g, [ids] * 8, Sampling(max_tokens=6))
    assert g.stats()["prefill_tokens"] == 29 and g.stats()["shared_tokens"] == 7 * 29
    assert len({tuple(c.tokens) for c in done}) > 1
    for c in done:
        check_logp(model, ids, c, atol=5e-4)


def test_siblings_look_together(graph_factory: GeneratorFactory, monkeypatch: pytest.MonkeyPatch):
    """Neighbours read what they share once, also when the ranks have closed and some have other neighbours: same tokens."""
    model, (a, b, c) = make("mistral"), prompts(3, 40, 60)
    asked = [a] * 4 + [b] * 5 + [c, b[:20] + c] + [a] * 2
    settings = [Sampling(max_tokens=8 + 5 * i) for i in range(len(asked))]
    found = {}
    for crowd in (0, 10**9):
        monkeypatch.setattr(cuda_graphs, "MIN_PROGRAMS", crowd)
        g = graph_factory(model, slots=16, context=160)
        found[crowd] = ask(g, asked, settings)
        assert g.model_runner.graphs is not None
        assert any(together for _, _, together in g.model_runner.graphs.decode_graphs) == (crowd == 0)
    for x, y in zip(*found.values()):
        assert x.tokens == y.tokens
        torch.testing.assert_close(torch.tensor(x.logp), torch.tensor(y.logp), atol=1e-4, rtol=0)


def test_lanes_look_together_where_it_pays(graph_factory: GeneratorFactory, monkeypatch: pytest.MonkeyPatch):
    g = graph_factory(make(), slots=16).model_runner.graphs
    assert g is not None
    held, common = [40] * 6, [0, 40, 40, 40, 7, 30]
    assert g._shared_prefixes(8, 8, held, common) is None  # a few lanes keep no GPU busy
    monkeypatch.setattr(cuda_graphs, "MIN_PROGRAMS", 16)
    assert g._shared_prefixes(8, 8, held, common) == [[40, 30], [0, 4]]  # not 7: that is what two fours have in common
    assert g._shared_prefixes(8, 500, held, common) is None  # mostly their own columns
    assert g._shared_prefixes(8, 8, held, [0] * 6) is None
    assert g._shared_prefixes(8, 8, [40], [0]) is None
    assert g._shared_prefixes(8, 8, held, ()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_publish_in_the_middle(factory: GeneratorFactory, dtype: torch.dtype):
    old, new = make("qwen3", 0), make("qwen3", 1)
    g = factory(old, context=250, tick=2, dtype=dtype)
    limit = 5e-4 if dtype == torch.float32 else 0.6

    async def main():
        session = g.open(0)
        ids = prompts(1, 9, 9)[0]
        task = asyncio.ensure_future(session.generate(ids, Sampling(max_tokens=100)))
        while g.stats()["tokens"] < 12:
            await asyncio.sleep(0.0005)
        await g.publish(dict(new.named_parameters()), 7)
        done = await task
        session.close()
        return ids, done

    ids, done = run(main())
    assert len(done.tokens) == 100 and set(done.version) == {0, 7}
    change = list(done.version).index(7)
    got = torch.tensor(done.logp)
    for model, part in ((old, slice(0, change)), (new, slice(change, None))):
        assert (got - full_logp(model, ids, done))[part].abs().max() < limit
    assert (got - full_logp(old, ids, done))[change:].abs().mean() > 0.3  # it is another policy


@pytest.mark.parametrize("kind", MAKERS)
def test_published_weights_find_their_places(graph_factory: GeneratorFactory, kind: str):
    """A decoder that was given another model's weights holds what one made of that model holds, in the same tensors."""
    given = make(kind, 1)
    g, expected = (graph_factory(made, dtype=torch.bfloat16).model_runner.graphs for made in (make(kind, 0), given))
    assert g is not None and expected is not None

    def every(decoder):
        parts = [getattr(layer, f.name) for layer in decoder.layers for f in fields(layer)]
        return [decoder.embedding, decoder.norm, decoder.head, *(t for t in parts if t is not None)]

    before = [t.data_ptr() for t in every(g)]
    weights = {name: p.detach().to(graph_factory.device) for name, p in given.named_parameters()}
    with torch.inference_mode():
        g.model.load_state_dict(weights, strict=False)  # a tied head is not published
        g.refresh_weights(weights)
    assert before == [t.data_ptr() for t in every(g)]
    for tensor, right in zip(every(g), every(expected), strict=True):
        assert torch.equal(tensor, right)


@pytest.mark.parametrize("deterministic", [True, False])
def test_cancel_returns_what_there_is(factory: GeneratorFactory, deterministic: bool):
    model = make()
    g = factory(model, deterministic=deterministic, context=2048, tick=2)

    async def main():
        session, other = g.open(0), g.open(1)
        ids = prompts(1, 9, 9)[0]
        task = asyncio.ensure_future(session.generate(ids, Sampling(max_tokens=2000)))
        companion = asyncio.ensure_future(other.generate(ids, Sampling(max_tokens=60)))
        while g.stats()["tokens"] < 40:
            await asyncio.sleep(0.001)
        session.cancel()
        done = await task
        assert done.stop is Stop.CANCELLED and 0 < len(done.tokens) < 2000
        session.park()
        assert len((await companion).tokens) == 60
        other.close()
        past = [*ids, *done.tokens, 5]
        return ids, done, past, await session.generate(past, Sampling(max_tokens=5))

    ids, done, past, again = run(main())
    if len(past) < 500:  # the stock model's own positions end there
        check_logp(model, ids, done, atol=5e-4)
        check_logp(model, past, again, atol=5e-4)


def test_the_context_is_a_wall(factory: GeneratorFactory):
    model = make()
    asked = [list(range(1, 11)), list(range(1, 16)), list(range(1, 17)), [5]]
    done = ask(factory(model, context=16), asked, Sampling(max_tokens=50))
    assert [len(c.tokens) for c in done] == [6, 1, 0, 15] and all(c.stop is Stop.LENGTH for c in done)
    for ids, c in zip(asked, done):
        if c.tokens:
            check_logp(model, ids, c, atol=5e-4)


def test_stop_ids_and_stop_strings(factory: GeneratorFactory):
    def decode(ids: list[int]) -> str:
        return "".join(chr(ord("a") + i % 26) for i in ids)

    model = make()
    free = ask(factory(model, decode), prompts(6), Sampling(max_tokens=30))
    stop = free[0].tokens[4]
    for before, done in zip(free, ask(factory(model, stop_ids=(stop,)), prompts(6), Sampling(max_tokens=30))):
        tokens = list(before.tokens)
        assert done.tokens == (tokens[: tokens.index(stop) + 1] if stop in tokens else tokens)
    string = decode(list(free[0].tokens))[5:8]
    settings = Sampling(max_tokens=30, stop=(string, "never!"))
    for before, done in zip(free, ask(factory(model, decode), prompts(6), settings)):
        at = decode(list(before.tokens)).find(string)
        assert done.tokens == (before.tokens if at < 0 else before.tokens[: at + 3])
        assert done.stop is (Stop.LENGTH if at < 0 else Stop.STRING)


# ---------------------------------------------------------------------- drawing from a part


CUTS = [{"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "temperature": 1.5}]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_cut_distributions_draw_what_the_plain_sampler_draws(graph_factory: GeneratorFactory, cut: dict[str, float]):
    model, asked, sampling = make(), prompts(5), Sampling(**cut, max_tokens=20)  # type: ignore[arg-type]
    plain = LocalGenerator(model, slots=4, context=128, stop_ids=(), fast=False)
    for ids, a, b in zip(asked, ask(graph_factory(model), asked, sampling), ask(plain, asked, sampling)):
        assert list(a.tokens) == list(b.tokens)
        for mine, theirs in ((a.logp, b.logp), (a.mass, b.mass)):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), atol=5e-4, rtol=0)
        whole = full_logp(model, ids, a, sampling.temperature)
        torch.testing.assert_close(torch.tensor(a.logp) + torch.tensor(a.mass), whole, atol=5e-4, rtol=0)
        assert min(a.mass) < 0


def test_a_cpu_draws_the_same_tokens(graph_factory: GeneratorFactory):
    """One rule and the same random numbers everywhere: only rounding can tell two devices apart."""
    model, asked, sampling = make(), prompts(8), Sampling(temperature=1.3, max_tokens=30)
    plain = LocalGenerator(model, slots=4, context=128, stop_ids=(), fast=False)
    same = [
        a.tokens == b.tokens for a, b in zip(ask(graph_factory(model), asked, sampling), ask(plain, asked, sampling))
    ]
    assert sum(same) >= 7


def test_a_whole_lane_ignores_a_cut_neighbour(graph_factory: GeneratorFactory):
    model, asked = make(), prompts(4)
    settings = [Sampling(max_tokens=20), Sampling(top_p=0.7, max_tokens=20), Sampling(temperature=0, max_tokens=20)]
    together = ask(graph_factory(model), asked[:3], settings, [5, 6, 7])
    for i in range(3):
        (alone,) = ask(graph_factory(model), [asked[i]], settings[i], [5 + i])
        assert list(alone.tokens) == list(together[i].tokens)
        torch.testing.assert_close(torch.tensor(alone.mass), torch.tensor(together[i].mass), atol=1e-4, rtol=0)
    assert any(together[1].mass) and not any(together[0].mass) and not any(together[2].mass)


def test_frequencies_match_the_distribution(graph_factory: GeneratorFactory):
    model, n = make(), 3000
    g = graph_factory(model, slots=250, context=16)
    drawn = torch.tensor([c.tokens[0] for c in ask(g, [[3, 9, 27]] * n, Sampling(temperature=2.0, max_tokens=1))])
    with torch.no_grad():
        p = (model(torch.tensor([[3, 9, 27]])).logits[0, -1] / 2).softmax(-1)
    chi2 = ((torch.bincount(drawn, minlength=V) - n * p) ** 2 / (n * p)).sum()
    assert n * p.min() > 5 and chi2 < 63 + 5 * (2 * 63) ** 0.5


# ---------------------------------------------------------------------- reading


def test_a_reading_whose_size_comes_again_is_told_in_the_same_place(graph_factory: GeneratorFactory):
    """Longer, then shorter, from other rows: nothing of what was read before is left in it."""
    model, g = make("llama3"), graph_factory(make("llama3"), slots=6)
    for turn, most in enumerate((60, 60, 9, 40, 1, 60)):
        asked = (
            prompts(6, 1, most, seed=turn) if turn % 2 else [[V - 1, *ids] for ids in prompts(3, 1, most, seed=turn)]
        )
        for ids, done in zip(asked, ask(g, asked, Sampling(max_tokens=5))):
            check_logp(model, ids, done, atol=5e-4)
    decoder = g.model_runner.graphs
    assert (
        decoder is not None and list(decoder.prefill_graphs) == [GraphShape(256, 16, 64)] and not decoder.capture_errors
    )


def test_a_large_reading_is_not_kept(graph_factory: GeneratorFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_graphs, "MAX_CAPTURED_TOKENS", 300)
    model = make()
    g = graph_factory(model, slots=2, context=400)
    for factor in (1, 3, 5):
        ids = [factor * k % V for k in range(1, 340 + factor)]
        (done,) = ask(g, [ids], Sampling(max_tokens=3))
        check_logp(model, ids, done, atol=5e-4)
    decoder = g.model_runner.graphs
    assert decoder is not None and not decoder.prefill_graphs


# ---------------------------------------------------------------------- when to look up


def test_drawing_ends_early_when_a_quarter_is_done(graph_factory: GeneratorFactory):
    """Else newcomers would wait for the whole tick; and nothing that was drawn is drawn again."""
    g = graph_factory(make(), slots=4, context=256)
    settings = [Sampling(max_tokens=m) for m in (3, 60, 60, 60)]
    ask(g, prompts(4), settings)
    stats = g.stats()
    assert g.tick == 64 and stats["tokens"] == 183
    assert stats["steps"] == 60
    # of the first run; the second ends with its last answer, before it adds its own
    assert stats["lane_steps"] == 4 * BLOCKS_IN_FLIGHT * SYNC_EVERY


def test_a_tick_may_be_longer_than_the_decoders_memory(graph_factory: GeneratorFactory, monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_STEPS", 64)
    model = make()
    (done,) = ask(graph_factory(model, tick=1000, context=256), [[1, 2]], Sampling(max_tokens=150))
    assert len(done.tokens) == 150
    check_logp(model, [1, 2], done, atol=5e-4)


def test_while_everybody_lives_drawing_goes_on(graph_factory: GeneratorFactory):
    """A tick is when newcomers may come; as long as nobody's place can be taken there is nothing to stop for."""
    g = graph_factory(make(), slots=4, context=256, tick=8)
    runs, real = [], g.scheduler._decode_batch
    g.scheduler._decode_batch = lambda *args: runs.append(1) or real(*args)
    done = ask(g, prompts(4), Sampling(max_tokens=100))
    assert len(runs) == 1 and [len(c.tokens) for c in done] == [100] * 4
    assert g.stats()["tokens"] == 400


def test_after_a_death_drawing_ends_with_the_tick(graph_factory: GeneratorFactory):
    g = graph_factory(make(), slots=8, context=256, tick=32)
    runs, real = [], g.scheduler._decode_batch
    g.scheduler._decode_batch = lambda *args: runs.append(1) or real(*args)
    done = ask(g, prompts(8), [Sampling(max_tokens=m) for m in (9, *[100] * 7)])
    assert len(runs) == 2 and [len(c.tokens) for c in done] == [9, *[100] * 7]


def test_buckets_reach_every_number_of_lanes():
    for most in (1, 3, 16, 100, 256, 1000):
        sizes = batch_buckets(most)
        assert sizes[-1] == most and sizes == sorted(set(sizes))
        assert all(next(s for s in sizes if s >= n) < 2 * n for n in range(1, most + 1))


# ---------------------------------------------------------------------- which path, and the ways back


def test_a_generator_says_which_path_it_takes(factory: GeneratorFactory):
    text = factory(make()).describe()
    assert "float32" in text
    assert ("grouped-query kernel" if factory.ahead else "hand-written decoder") in text
    if factory.device == "cuda":
        assert text.startswith("CUDA graphs, float32, grouped-query kernel")


def test_fp8_is_said_too(factory: GeneratorFactory):
    assert "fp8" in factory(make(), dtype=torch.float8_e4m3fn).describe()


def test_the_stock_forward_says_why():
    torch.manual_seed(0)
    other = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=32, n_layer=1, n_head=2, n_positions=64)).eval()
    text = LocalGenerator(other, slots=2, context=32, stop_ids=()).describe()
    assert text.startswith("stock forward, float32") and "model type gpt2" in text
    assert "fast is off" in LocalGenerator(make(), slots=2, context=32, stop_ids=(), fast=False).describe()


class Broken:
    """Kernels that do not compile."""

    def __getattr__(self, name: str) -> Any:
        def kernel(*args: Any) -> Any:
            raise RuntimeError(f"no compiler for {name}\nand a long trace")

        return kernel


def test_kernels_that_do_not_compile_are_done_without(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(model_runner, "decode_ops", lambda device: (Broken(), ""))
    model = make()
    g = LocalGenerator(model, slots=2, context=64, stop_ids=(), device="cuda" if GPU else "cpu")
    assert g.describe().startswith("hand-written decoder, ")
    told = "float32; not CUDA graphs, because of RuntimeError: no compiler for add_norm; KV cache in 2 rows of 64 ids"
    assert g.describe().endswith(told)
    assert "no compiler" in caplog.text
    (done,) = ask(g, [[1, 2, 3]], Sampling(max_tokens=9))
    check_logp(model, [1, 2, 3], done, atol=5e-4)


def test_other_head_sizes_are_done_without(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_runner, "decode_ops", lambda device: (reference, ""))
    odd = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "head_dim": 24})).eval()
    text = LocalGenerator(odd, slots=2, context=64, stop_ids=()).describe()
    assert "hand-written decoder" in text and "head size 24" in text


@pytest.mark.skipif(not GPU, reason="no GPU")
def test_a_graph_that_cannot_be_captured_is_done_without(monkeypatch: pytest.MonkeyPatch):
    def fails(*args: Any, **options: Any) -> Any:
        raise RuntimeError("capture refused")

    monkeypatch.setattr(torch.cuda, "graph", fails)
    model = make()
    g = LocalGenerator(model, slots=2, context=64, stop_ids=(), device="cuda")
    (done,) = ask(g, [[1, 2, 3]], Sampling(max_tokens=9))
    check_logp(model, [1, 2, 3], done, atol=5e-4)
    assert "without CUDA graphs" in g.describe() and "capture refused" in g.describe()


@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("deterministic", [True, False])
def test_other_families_step_on_a_gpu_by_their_stock_forward(deterministic: bool):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=128)).eval()
    g = LocalGenerator(model, slots=4, context=100, stop_ids=(), device="cuda", deterministic=deterministic)
    asked = prompts(6)
    settings = [Sampling(max_tokens=m, top_p=p) for m, p in zip((3, 30, 11, 25, 8, 17), (1, 0.9) * 3)]
    for ids, sampling, done in zip(asked, settings, ask(g, asked, settings)):
        assert len(done.tokens) == sampling.max_tokens
        whole = torch.tensor(done.logp) + torch.tensor(done.mass)
        torch.testing.assert_close(whole, full_logp(model, ids, done), atol=5e-4, rtol=0)


@pytest.mark.skipif(not GPU, reason="no GPU")
def test_a_graph_is_captured_while_another_thread_allocates():
    """A learner computes beside a generator that need not be deterministic."""
    model = make("qwen3")
    g = LocalGenerator(model, slots=32, context=128, stop_ids=(), device="cuda", deterministic=False)

    async def main():
        async def allocate() -> None:
            for n in range(200):
                torch.ones(
                    1 << 18, n + 1, device="cuda"
                ).sum().item()  # no random numbers: a capture owns the generator
                await asyncio.sleep(0)

        sessions = [g.open(i) for i in range(32)]
        beside = asyncio.ensure_future(allocate())
        asked = prompts(32)
        done = [await s.generate(ids, Sampling(max_tokens=5)) for s, ids in zip(sessions[:2], asked)]
        done += await asyncio.gather(
            *(s.generate(ids, Sampling(max_tokens=30)) for s, ids in zip(sessions[2:], asked[2:]))
        )
        await beside
        return asked, done

    for ids, done in zip(*run(main())):
        check_logp(model, ids, done, atol=5e-4)
    assert g.describe().startswith("CUDA graphs")


@pytest.mark.parametrize(
    ("device", "dtype", "rollouts", "expected", "tolerance"),
    [
        ("cpu", "auto", "auto", None, 1e-3),
        ("cpu", "bfloat16", "auto", None, 3e-2),
        ("cpu", "auto", "bfloat16", torch.bfloat16, 3e-2),
        ("cuda", "auto", "auto", torch.bfloat16, 3e-2),
        ("cuda", "float32", "auto", None, 1e-3),
        ("cuda", "auto", "float32", None, 3e-2),
        ("cuda", "float32", "float16", torch.float16, 3e-2),
        ("cuda", "auto", "fp8", torch.float8_e4m3fn, 0.3),
        ("cuda", "fp8", "auto", torch.float8_e4m3fn, 3e-2),
        ("cpu", "fp8", "auto", torch.float8_e4m3fn, 1e-3),
        ("cpu", "fp8", "float32", None, 0.3),
    ],
)
def test_rollouts_are_as_precise_as_the_learner_unless_told(monkeypatch, device, dtype, rollouts, expected, tolerance):
    monkeypatch.setattr(engines, "select_device", lambda settings: torch.device(device))
    chosen = Settings(dtype=dtype, rollout_dtype=rollouts)
    assert engines.rollout_dtype(chosen) == expected and engines.policy_check_tolerance(chosen) == tolerance
    assert engines.policy_check_tolerance(replace(chosen, mismatch_tolerance=0.5)) == 0.5


def test_an_unknown_precision_is_refused():
    with pytest.raises(SettingError, match=r"rollout_dtype is 'int8'.*fp8"):
        Settings(rollout_dtype="int8")


# ---------------------------------------------------------------------- the learner on a GPU


@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("auto", 0.1)])
@pytest.mark.parametrize("name", ["qwen3", "mistral_window"])
def test_cuda_says_what_the_cpu_says(kit, batch, name, dtype, limit):
    every = frozenset({Signal.LOGP, Signal.ENTROPY, Signal.VALUE})
    here = LocalLearner(kit.make_model(name), critic=True)
    there = LocalLearner(kit.make_model(name), LearnerSettings(dtype=dtype), critic=True, device="cuda")
    for _ in range(2):
        a, b = (x.measure(batch, every) for x in (here, there))
        assert all((a[s].x - b[s].x).abs().mean() < limit and b[s].x.device.type == "cpu" for s in every)
        a, b = (x.update(batch, kit.Linear(every)) for x in (here, there))
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=limit) and b["skipped"] == 0
    other = LocalLearner(kit.make_model(name), LearnerSettings(dtype=dtype), critic=True, device="cuda")
    other.load_state_dict(there.state_dict())
    assert other.update(batch, kit.Linear(every))["loss"] == there.update(batch, kit.Linear(every))["loss"]


@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("separate", [False, True])
def test_every_signal_is_measured_like_on_the_cpu(kit, batch, separate):
    model = kit.make_model()
    make_one = lambda device: LocalLearner(  # noqa: E731
        copy.deepcopy(model),
        LearnerSettings(dtype="float32"),
        critic=2,
        turn_critic=True,
        separate_critic=separate,
        teacher=kit.make_model(seed=1),
        device=device,
    )
    here, there = make_one("cpu"), make_one("cuda")
    batch = replace(batch, success=batch.tree.field(TRAJECTORY, torch.ones(len(batch))))
    live = frozenset({Signal.LOGP, Signal.ENTROPY, Signal.VALUE, Signal.SECOND_VALUE, Signal.CANDIDATE_LOGP})
    every = frozenset(Signal) - {Signal.ACTION_VALUE, Signal.OLD_ACTION_VALUE}  # these need a head of their own kind
    for _ in range(2):
        a, b = (one.measure(batch, every) for one in (here, there))
        for s in every:
            torch.testing.assert_close(b[s].x, a[s].x, rtol=2e-2, atol=2e-2, msg=lambda text, s=s: f"{s}: {text}")
        for one in (here, there):
            one.update(batch.put(a), kit.Linear(live))
