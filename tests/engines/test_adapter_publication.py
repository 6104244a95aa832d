"""LoRA runs through another process: the base travels once, then factors alone; tokens and floats are those of this process."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adapted import adapted_model, factor_bytes, turn
from support.dialogues import run, two_turns
from support.generators import generator, make
from support.prompting import prompts

from turnwise.core.records import Sampling
from turnwise.engines.adapters import SentBase, adapted_weights, factors_of
from turnwise.engines.learner import lora
from turnwise.engines.remote.generator_process import GeneratorSpec, start_generator
from turnwise.errors import SettingError
from turnwise.training.engines import GENERATOR_PROGRAM

pytest.importorskip("peft")
SAMPLING, GREEDY = Sampling(max_tokens=12), Sampling(temperature=0, max_tokens=10)


def merged_bytes(weights):
    return sum(t.numel() * t.element_size() for t in weights.values())


def plain(parts):
    return [(list(p.tokens), list(p.logp), list(p.mass), list(p.version), p.stop) for p in parts]


class Letters:
    def decode(self, ids, **_):
        return "".join(chr(97 + i % 26) for i in ids)


# ------------------------------------------------------------------ taking apart


@given(rank=st.integers(1, 5), scale=st.floats(0.01, 8), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_weights_put_together_again_are_those_that_were_merged_bit_for_bit(rank, scale, seed):
    model = make(seed=1)
    lora.inject(model, rank, scale * rank)
    weights = turn(model, seed)
    factors, described = factors_of(weights.adapters)
    again = adapted_weights(weights.base, factors, described)
    assert again.mergeless and set(again) == set(weights)
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    assert {facts["rank"] for facts in described.values()} == {rank}


@pytest.mark.parametrize("damage", ["missing", "rank", "name", "text"])
def test_factors_that_do_not_fit_are_refused(damage):
    weights = turn(adapted_model(), 1)
    factors, described = factors_of(weights.adapters)
    name = next(iter(described))
    if damage == "missing":
        del factors[f"{name}.up"]
    elif damage == "rank":
        described[name]["rank"] += 1
    elif damage == "name":
        described["x"] = described.pop(name)
        factors |= {"x.up": factors.pop(f"{name}.up"), "x.down": factors.pop(f"{name}.down")}
    else:
        described[name] = "8"
    with pytest.raises(SettingError, match=r"factors sent are not those|does not fit a weight|write rank and scale"):
        adapted_weights(weights.base, factors, described)


def test_a_base_is_the_same_while_nothing_was_written_into_it():
    model = adapted_model()
    sent = SentBase(turn(model, 1).base)
    assert sent.is_still(turn(model, 2).base) and not sent.is_still(turn(adapted_model(), 1).base)
    with torch.no_grad():
        model.model.norm.weight += 1
    assert not sent.is_still(turn(model, 2).base)


# ------------------------------------------------------------------ --generator local


@pytest.mark.slow
def test_a_process_gets_the_base_once_and_samples_bit_for_bit_as_this_process():
    model, asked, start = adapted_model(), prompts(6), make(seed=8)
    there, here, sizes = [], [], []
    spec = GeneratorSpec(slots=4, context=128, stop_ids=(), deterministic=True, device="cpu", dtype=None, threads=1)
    g = run(start_generator(GENERATOR_PROGRAM, spec, copy.deepcopy(start), Letters(), Letters().decode))
    local = generator(copy.deepcopy(start), threads=1)

    async def play(target, out):
        for version, seed in enumerate((5, 6, 5), 1):
            await target.publish(turn(model, seed), version)
            sizes.append(target.publisher.written if target is g else 0)
            out.append(plain(await two_turns(target, asked, SAMPLING)))

    try:
        run(play(g, there))
        weights, sent = turn(model, 6), list(sizes)
        run(g.publish(dict(weights.items()), 9))  # all weights, and adapters again
        whole = g.publisher.written
        run(g.publish(weights, 10))
        again = g.publisher.written
    finally:
        g.close()
    run(play(local, here))
    assert there == here
    assert [p[:2] for p in there[0]] == [p[:2] for p in there[2]] != [p[:2] for p in there[1]]  # A, B, A
    header = 200 * len(factors_of(weights.adapters)[0])  # names, shapes and offsets
    assert factor_bytes(weights) < sent[1] <= factor_bytes(weights) + header and abs(sent[2] - sent[1]) < 64
    base = sum(t.numel() * t.element_size() for t in weights.base.values())
    assert sent[0] > sent[1] + base and abs(again - sent[0]) < 64
    assert whole >= merged_bytes(weights) > 2 * sent[1]


# ------------------------------------------------------------------ servers


def servers():
    return pytest.importorskip("support.generator_servers")


def test_a_server_gets_the_base_once_and_samples_bit_for_bit_as_this_process():
    kit, model, asked = servers(), adapted_model(), prompts(6)
    sizes, files = [], []

    async def play(target, out):
        for version, seed in enumerate((5, 6, 5), 1):
            await target.publish(turn(model, seed), version)
            assert getattr(target, "fatal", None) is None
            if hasattr(target, "publisher"):
                sizes.append(target.publisher.written)
                files.append(sorted(p.name for p in target.publisher.folder.path.iterdir()))
            out.append(plain(await two_turns(target, asked, SAMPLING)))

    async def remote(url, out):
        await play(await kit.connected([url], make(seed=3)), out)

    there, here = [], []
    with kit.served(make(seed=1)) as server:
        run(remote(server.url, there))
        needs = server.host.weight_needs()
    run(play(generator(make(seed=1), threads=1), here))
    assert there == here
    assert [p[:2] for p in there[0]] == [p[:2] for p in there[2]] != [p[:2] for p in there[1]]
    weights = turn(model, 6)
    header = 200 * len(factors_of(weights.adapters)[0])  # names, shapes and offsets
    assert factor_bytes(weights) < sizes[1] <= factor_bytes(weights) + header and abs(sizes[2] - sizes[1]) < 64
    assert sizes[0] > sizes[1] + sum(t.numel() * 4 for t in weights.base.values())
    assert files == [["adapters-1.safetensors"], *(
        [f"adapters-{n}.safetensors", f"adapters-{n + 1}.safetensors"] for n in (1, 2)
    )]  # fmt: skip
    assert needs["adapters"] == "merged" and needs["dtypes"] == {} and len(needs["base"]) == 64


def test_greedy_tokens_there_and_back_are_those_of_merged_weights():
    kit, model, asked = servers(), adapted_model(), prompts(4)

    async def fresh(seed):
        g = generator(make(seed=3), threads=1)
        await g.publish({name: value.clone() for name, value in turn(model, seed).items()}, 1)
        return [list(p.tokens) for p in await two_turns(g, asked, GREEDY)]

    async def updated(url):
        g, out = await kit.connected([url], make(seed=3)), []
        for version, seed in enumerate((1, 2, 1), 1):
            await g.publish(turn(model, seed), version)
            out.append([list(p.tokens) for p in await two_turns(g, asked, GREEDY)])
        return out

    with kit.served(make(seed=4)) as server:
        first, second, third = run(updated(server.url))
    assert first == third == run(fresh(1)) and second == run(fresh(2)) != first


@pytest.mark.slow
def test_a_server_that_was_restarted_gets_base_and_adapters_again():
    kit, model, asked, heard = servers(), adapted_model(), prompts(4), []

    async def play(one, two, stop):
        g = await kit.connected([one.url, two.url], make(seed=3), tell=heard, seconds=5.0)
        await g.publish(turn(model, 1), 1)
        port = int(one.url.rsplit(":", 1)[1])
        stop()
        await asyncio.gather(*(g.open(n).generate(ids, SAMPLING) for n, ids in enumerate(asked)))
        with kit.served(make(seed=7), port=port) as again:
            await g.publish(turn(model, 2), 2)
            assert not [r.lost for r in g.replicas if r.lost] and again.host.base is not None
            sizes = [g.publisher.written]
            await g.publish(turn(model, 3), 3)
            sizes.append(g.publisher.written)
            parts = await two_turns(g, asked, SAMPLING)
            return sizes, {v for part in parts for v in part.version}, again.host.answered

    with kit.served(make(seed=5)) as two:
        context = kit.served(make(seed=6))
        one = context.__enter__()
        sizes, versions, answered = run(play(one, two, lambda: context.__exit__(None, None, None)))
    base = sum(t.numel() * 4 for t in turn(model, 1).base.values())
    assert sizes[0] > base > sizes[1] and versions == {3} and answered > 2
    assert any("is back" in text for text in heard)


def test_adapters_without_their_base_are_refused_and_the_weights_stay():
    kit, model = servers(), adapted_model()

    async def play(server):
        g = await kit.connected([server.url], make(seed=3))
        await g.publish(turn(model, 1), 1)
        label = server.host.label
        server.host.base = None  # as in a server that was started again within one publication
        await g.publish(turn(model, 2), 2)
        return label, server.host.label, str(g.fatal)

    with kit.served(make(seed=5)) as server:
        before, after, told = run(play(server))
    assert before == after == "1" and "which is not here; send its file before them" in told


def test_a_server_that_merges_wrongly_is_refused_by_the_probe():
    kit, model = servers(), adapted_model()

    async def play(server):
        g = await kit.connected([server.url], make(seed=3))
        await g.publish(turn(model, 1), 1)
        assert g.fatal is None
        adapt = server.host._adapt

        def twice(base, factors, described):
            return adapt(base, factors, {n: {**facts, "scale": 2 * facts["scale"]} for n, facts in described.items()})

        server.host._adapt = twice
        await g.publish(turn(model, 2), 2)
        return str(g.fatal)

    with kit.served(make(seed=5)) as server:
        assert "other weights than version 2" in run(play(server))


def test_a_server_that_knows_no_adapters_gets_merged_weights():
    kit, model, asked = servers(), adapted_model(), prompts(3)

    def host():
        made = kit.make_host(make(seed=5))
        made._adapt = None
        return made

    async def play(url):
        g = await kit.connected([url], make(seed=3))
        await g.publish(turn(model, 1), 1)
        return g.publisher.written, plain(await two_turns(g, asked, SAMPLING))

    async def local():
        g = generator(make(seed=5), threads=1)
        await g.publish(turn(model, 1), 1)
        return plain(await two_turns(g, asked, SAMPLING))

    with kit.served(own_host=host) as server:
        size, parts = run(play(server.url))
    assert size > merged_bytes(turn(model, 1)) and parts == run(local())


# ------------------------------------------------------------------ dtypes


def test_all_weights_are_written_in_the_dtype_that_the_server_keeps():
    kit, model, asked = servers(), make(seed=3), prompts(3)
    from turnwise.engines.generator.generator import LocalGenerator
    from turnwise.serve.policy_host import HostLimits, PolicyHost

    def half(limits):
        return LocalGenerator(
            make(seed=5), None, slots=limits.slots, context=limits.context, stop_ids=limits.stop_ids,
            deterministic=limits.deterministic, threads=1, dtype=torch.bfloat16,
        )  # fmt: skip

    def host():
        shapes = {name: list(p.shape) for name, p in model.named_parameters()}
        facts = {"model": "small", "vocabulary": model.config.vocab_size, "weights": shapes}
        return PolicyHost(half, kit.read_weights, facts, HostLimits(4, 128, (), True, 1), adapted_weights)

    async def play(urls):
        g = await kit.connected(urls, model, tolerance=0.5)
        await g.publish(kit.weights_of(model), 1)
        assert g.fatal is None
        return g.publisher.written, plain(await two_turns(g, asked, SAMPLING))

    async def local():
        g = half(replace(kit.LIMITS))
        await g.publish(kit.weights_of(model), 1)
        return plain(await two_turns(g, asked, SAMPLING))

    size = sum(p.numel() for p in model.parameters())
    header = 200 * len(dict(model.named_parameters()))
    with kit.served(own_host=host) as narrow, kit.served(make(seed=6)) as wide:
        written, parts = run(play([narrow.url]))
        both, _ = run(play([narrow.url, wide.url]))
    assert 2 * size < written < 2 * size + header and parts == run(local())
    assert 6 * size < both < 6 * size + 2 * header
