"""The generator against plain forwards: what it samples, what it says about it, what it keeps."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from support.generators import MAKERS, STEPPED, generator, make
from support.prompting import ask, bits, check_logp, dialogues, full_logp, prompts, run
from support.small_models import make_model

from turnwise.core.records import Sampling, Stop
from turnwise.engines.generator.attention_layouts import PrefillChunk
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.generator.model_runner import _prefill_batches
from turnwise.errors import SettingError

# ---------------------------------------------------------------------- same as Transformers


@pytest.mark.thorough
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("fast", [True, False])
def test_greedy_equals_transformers(kind: str, fast: bool):
    model = make(kind)
    asked = prompts(9)
    g = generator(model, fast=fast)
    assert bool(g.stats()["decoder"]) == (fast and kind in STEPPED)
    for ids, done in zip(asked, ask(g, asked, Sampling(temperature=0, max_tokens=14))):
        given, mask = torch.tensor([ids]), torch.ones(1, len(ids))
        expected = model.generate(given, attention_mask=mask, max_new_tokens=14, do_sample=False, pad_token_id=0)
        assert list(done.tokens) == expected[0, len(ids) :].tolist()
        assert done.stop is Stop.LENGTH
        check_logp(model, ids, done)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_logp_is_exact_in_double(kind: str):
    model = make(kind).double()
    asked = prompts(6)
    for ids, done in zip(asked, ask(generator(model), asked, Sampling(max_tokens=20))):
        check_logp(model, ids, done, atol=1e-9)


def test_logp_and_mass_of_a_cut_distribution():
    model = make()
    asked = prompts(5)
    for ids, done in zip(asked, ask(generator(model), asked, Sampling(temperature=0.8, top_k=7, max_tokens=12))):
        whole = full_logp(model, ids, done, temperature=0.8)
        torch.testing.assert_close(torch.tensor(done.logp) + torch.tensor(done.mass), whole, atol=1e-4, rtol=0)
        assert max(done.mass) < 0


def test_the_callers_model_stays_untouched():
    model = make()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    implementation = model.config._attn_implementation
    ask(generator(model), prompts(3), Sampling(max_tokens=4))
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


# ---------------------------------------------------------------------- seeds


def test_tokens_do_not_depend_on_batch_order_or_slots():
    model, asked, seeds = make(), prompts(12), list(range(100, 112))
    settings = [Sampling(max_tokens=5 + 3 * i, top_p=0.9 if i % 3 else 1.0) for i in range(12)]
    base = [c.tokens for c in ask(generator(model, slots=12), asked, settings, seeds)]
    for slots, tick, deterministic in ((1, 8, True), (5, 3, True), (4, 8, False)):
        g = generator(model, slots=slots, tick=tick, deterministic=deterministic)
        order = random.Random(slots).sample(range(12), 12)
        again = ask(g, [asked[i] for i in order], [settings[i] for i in order], [seeds[i] for i in order])
        assert [again[order.index(i)].tokens for i in range(12)] == base
    assert len({tuple(c) for c in base}) == 12


@pytest.mark.parametrize("slots", [4, 16])
def test_bit_identical_under_random_delays(slots: int):
    model = make("qwen3")
    base = bits(run(dialogues(generator(model, slots=slots), None)))
    for seed in range(3):
        assert bits(run(dialogues(generator(model, slots=slots), random.Random(seed)))) == base


def test_not_deterministic_still_samples_the_same_tokens():
    model = make("qwen3")
    base = run(dialogues(generator(model), None))
    free = run(dialogues(generator(model, deterministic=False), random.Random(1)))
    assert [[c.tokens for c in turns] for turns in free] == [[c.tokens for c in turns] for turns in base]


# ---------------------------------------------------------------------- limits


def test_stop_id_ends_a_turn_and_is_kept():
    model = make()
    free = ask(generator(model), prompts(6), Sampling(max_tokens=30))
    stop = free[0].tokens[4]
    for before, done in zip(free, ask(generator(model, stop_ids=(stop,)), prompts(6), Sampling(max_tokens=30))):
        tokens = list(before.tokens)
        if stop in tokens:
            assert done.tokens == tokens[: tokens.index(stop) + 1] and done.stop is Stop.TOKEN
        else:
            assert done.tokens == tokens and done.stop is Stop.LENGTH


def test_stop_string_may_span_tokens():
    def decode(ids: list[int]) -> str:
        return "".join(chr(ord("a") + i % 26) for i in ids)

    model = make()
    free = ask(generator(model, decode), prompts(5), Sampling(max_tokens=30))
    string = decode(list(free[0].tokens))[5:8]
    settings = [Sampling(max_tokens=30, stop=(string, "never!")) for _ in free]
    for before, done in zip(free, ask(generator(model, decode), prompts(5), settings)):
        at = decode(list(before.tokens)).find(string)
        assert done.tokens == (before.tokens if at < 0 else before.tokens[: at + 3])
        assert done.stop is (Stop.LENGTH if at < 0 else Stop.STRING)


def test_stop_string_without_tokenizer_is_refused():
    with pytest.raises(SettingError, match="tokenizer"):
        ask(generator(), [[1]], Sampling(stop=("x",)))


def test_the_context_is_a_wall():
    model = make()
    g = generator(model, context=16)
    asked = [list(range(1, 11)), list(range(1, 16)), list(range(1, 17)), [5]]
    done = ask(g, asked, Sampling(max_tokens=50))
    assert [len(c.tokens) for c in done] == [6, 1, 0, 15]
    assert all(c.stop is Stop.LENGTH for c in done)
    for ids, c in zip(asked, done):
        if c.tokens:
            check_logp(model, ids, c)


@pytest.mark.parametrize("context", [4, 5, 11])
def test_a_short_context_is_enough(context: int):
    model = make()
    (done,) = ask(generator(model, context=context), [[1, 2, 3]], Sampling(max_tokens=20))
    assert len(done.tokens) == context - 3 and done.stop == Stop.LENGTH
    check_logp(model, [1, 2, 3], done)


def test_wrong_use_is_refused():
    with pytest.raises(SettingError, match="no ids"):
        ask(generator(), [[]], Sampling())
    with pytest.raises(SettingError, match="slots=0"):
        generator(slots=0)

    async def twice():
        session = generator().open(0)
        first = asyncio.ensure_future(session.generate([1], Sampling()))
        await asyncio.sleep(0)
        with pytest.raises(SettingError, match="already"):
            await session.generate([1], Sampling())
        await first
        session.close()
        with pytest.raises(SettingError, match="closed"):
            await session.generate([1], Sampling())

    run(twice())


# ---------------------------------------------------------------------- reading


@pytest.mark.parametrize("padded", [True, False])
def test_readings_are_bounded_with_their_padding(padded: bool):
    rng = random.Random(0)
    jobs = [PrefillChunk(row, row % 3, list(range(rng.choice([1, 3, 40, 250])))) for row in range(60)]
    parts = _prefill_batches(jobs, 100, padded)
    for part in parts:
        sizes = [len(job.ids) for job in part]
        assert sum(sizes) <= 100 and (not padded or len(part) * max(sizes) <= 200)
        assert len({job.row for job in part}) == len(part)
    for job in jobs:  # every row whole and in order
        mine = [piece for part in parts for piece in part if piece.row == job.row]
        assert [i for piece in mine for i in piece.ids] == job.ids
        assert [piece.start for piece in mine] == [job.start + 100 * k for k in range(len(mine))]


def test_one_long_reply_among_short_ones_is_one_reading_where_nothing_is_padded():
    jobs = [PrefillChunk(row, 0, [1] * (50 if row == 7 else 2)) for row in range(20)]
    assert len(_prefill_batches(jobs, 100, False)) == 1 < len(_prefill_batches(jobs, 100, True))


def test_a_generator_that_shares_weights_samples_what_one_with_a_copy_does():
    """The memory is the model's own, and what is published replaces what was decoded with."""
    model = make_model()
    shared = LocalGenerator(model, slots=2, context=32, stop_ids=(1,), share_weights=True)
    copied = LocalGenerator(model, slots=2, context=32, stop_ids=(1,))
    parameters = list(model.parameters())
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(parameters, shared.model_runner.model.parameters()))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(parameters, copied.model_runner.model.parameters()))
    assert all(p.requires_grad for p in parameters)

    async def sample(sampler):
        session = sampler.open(3)
        done = await session.generate([5, 6, 7], Sampling(max_tokens=8))
        session.close()
        return done.tokens, done.logp

    assert asyncio.run(sample(shared)) == asyncio.run(sample(copied))
    with torch.no_grad():
        for p in parameters:
            p.mul_(1.1)
    for each in (shared, copied):
        asyncio.run(each.publish({n: p.detach() for n, p in model.named_parameters()}, 1))
    assert asyncio.run(sample(shared)) == asyncio.run(sample(copied))
