"""The option ``cache`` of a model: rows or pages wherever the policy samples, the same tokens, and what is said and refused."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.generators import make

from turnwise import recipes
from turnwise.config.settings import Settings
from turnwise.config.values import ModelName
from turnwise.core.records import Sampling
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.generator.kv_cache import CacheChoice
from turnwise.engines.remote.replica import OURS, VLLM
from turnwise.errors import SettingError
from turnwise.models.tiny import tiny_model
from turnwise.rollout.renderer import Renderer
from turnwise.serve.policy_host import HostLimits, PolicyHost
from turnwise.store.ledger import SqliteLedger
from turnwise.training import api, build, engines, remote_generators, serve

SMALL = {
    "env": "guess", "difficulty": (1,), "steps": 3, "groups": 2, "group_size": 3, "max_tokens": 12, "context": 320,
    "eval_tasks": 4, "checkpoint_every": 2, "trackers": (), "threads": 1, "hidden": 32, "layers": 2, "vocabulary": 320,
    "cold_steps": 4, "cold_batch": 8, "device": "cpu",
}  # fmt: skip
CONTEXT, COLUMN = 320, 2 * 2 * 16 * 4  # ids of a dialogue; bytes of one id in the cache of two layers
PATHS = ("run", "own process", "serve")


# ---------------------------------------------------------------------- the same tokens everywhere


def chosen(layout: str) -> Settings:
    return Settings(model=f"tiny,cache={layout}", context=CONTEXT, slots=6, device="cpu", eval_tasks=0, threads=1)


def sampler(path: str, layout: str):
    """The generator that a run, a process of its own or a server has."""
    s, renderer = chosen(layout), Renderer(build.byte_tokenizer())
    model = tiny_model(len(renderer.tokenizer), 0, hidden=32, layers=2, context=CONTEXT)
    if path == "serve":
        limits = HostLimits(s.slots, CONTEXT, tuple(renderer.stop_ids), True, 1)
        return engines.make_served_generator(s, model, renderer, limits, engines.sampling_cache(s, model))
    s = replace(s, generator=("local",)) if path == "own process" else s
    return engines.make_generator(s, recipes.build("grpo"), model, renderer, True, 0, print)


@pytest.fixture(scope="module")
def samplers():
    """A generator for every path and layout."""
    made = {(path, layout): sampler(path, layout) for path in PATHS for layout in ("rows", "pages")}
    yield made
    for generator in made.values():
        getattr(generator, "close", lambda: None)()


async def talk(generator, groups):
    """Two turns of every dialogue, all at once; those of a group begin with the same ids."""

    async def one(number, prompt, turns):
        session = sessions[number]
        ids, told = list(prompt), []
        for length in turns:
            done = await session.generate(ids, Sampling(max_tokens=length))
            told.append(done)
            ids = [*ids, *done.tokens, 5 + number, 7]
        session.close()
        return told

    dialogues = [(prompt, turns) for prompt, members in groups for turns in members]
    sessions = [generator.open(seed) for seed in range(len(dialogues))]
    return await asyncio.gather(*(one(n, *dialogue) for n, dialogue in enumerate(dialogues)))


def prompt_of(length: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, 200) for _ in range(length)]


PROMPTS = st.builds(prompt_of, st.integers(1, 200), st.integers(0, 3))
TURNS = st.tuples(st.integers(1, 30), st.integers(1, 20))
GROUPS = st.lists(st.tuples(PROMPTS, st.lists(TURNS, min_size=1, max_size=4)), min_size=1, max_size=3)


@pytest.mark.parametrize("path", PATHS)
def test_both_layouts_sample_the_same_tokens(path, samplers):
    """Nine dialogues for six rows: some wait for others in both layouts."""
    assert "KV cache in 36 pages of 64 ids" in samplers[path, "pages"].describe()
    assert "KV cache in 6 rows of 320 ids" in samplers[path, "rows"].describe()
    loop = asyncio.new_event_loop()

    @settings(max_examples=12, deadline=None)
    @given(GROUPS)
    def law(groups):
        rows, pages = (loop.run_until_complete(talk(samplers[path, layout], groups)) for layout in ("rows", "pages"))
        for a, b in zip([t for told in rows for t in told], [t for told in pages for t in told], strict=True):
            assert list(a.tokens) == list(b.tokens)
            assert torch.tensor(a.logp) == pytest.approx(torch.tensor(b.logp), abs=1e-5)

    law()
    loop.close()


# ---------------------------------------------------------------------- whole runs


def groups_of(run):
    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        return [ledger.group(summary.group_id) for summary in ledger.groups()]


def sampled(run):
    """What every turn of every trained episode sampled."""
    return {t.id: [tuple(turn.tokens) for turn in t.turns] for group in groups_of(run) for t in group.trajectories}


def largest_difference(run, other):
    one, two = (load_file(path / "model" / "model.safetensors") for path in (run, other))
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def trained(tmp_path_factory, layout, **values):
    out = tmp_path_factory.mktemp(layout)
    summary = api.train(quiet=True, out=str(out), name="run", model=f"tiny,cache={layout}", **{**SMALL, **values})
    return out / "run", summary["engines"]["generator"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return trained(tmp_path_factory, "rows")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    return trained(tmp_path_factory, "pages")


def test_a_run_with_pages_ends_with_the_weights_of_one_with_rows(rows, pages):
    assert "KV cache in 6 rows of 320 ids" in rows[1] and "pages of 64 ids" in pages[1]
    assert sampled(rows[0]) == sampled(pages[0]) and len(sampled(rows[0])) == 3 * 2 * 3
    assert largest_difference(rows[0], pages[0]) == 0.0


@pytest.mark.slow
def test_a_process_of_its_own_has_the_pages_of_the_run(pages, tmp_path_factory):
    run, told = trained(tmp_path_factory, "pages", generator=("local",))
    assert "pages of 64 ids" in told and "in a process of its own" in told
    assert largest_difference(run, pages[0]) == 0.0


LONG = {"max_tokens": 150, "max_turns": 2, "steps": 2, "eval_tasks": 0}


@pytest.fixture(scope="module")
def long_rows(tmp_path_factory):
    return trained(tmp_path_factory, "rows", **LONG)


@pytest.mark.slow
@pytest.mark.parametrize("values", [{}, {"generator": ("local",)}, {"staleness": 1}])
def test_no_episode_is_lost_where_pages_are_few(values, long_rows, tmp_path_factory, monkeypatch):
    """Eight pages for six dialogues of up to five: requests wait, and running ones are sent back and read again."""
    made = []

    def note(*args, **kwargs):
        made.append(LocalGenerator(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(engines, "TOLD_FROM", 0)
    monkeypatch.setattr(engines, "cache_room", lambda plan, room: 9 * 64 * COLUMN)
    monkeypatch.setattr(engines, "LocalGenerator", note)
    run, told = trained(tmp_path_factory, "pages", **{**LONG, **values})
    assert "KV cache in 8 pages of 64 ids" in told
    found = [group for group in groups_of(run) if len(group.trajectories) == 3]  # one under way at the end has fewer
    assert len(found) >= 2 * 2 and all(t.turns and t.status != "failed" for g in found for t in g.trajectories)
    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        assert ledger.group_counts().trained == 2 * 2
    if "staleness" not in values:
        assert sampled(run) == sampled(long_rows[0]) and len(found) == len(groups_of(run)) == 4
        assert largest_difference(run, long_rows[0]) < 1e-5
    if "generator" not in values:
        assert made[0].stats()["preemptions"] > 0


@pytest.mark.slow
def test_older_policies_get_the_layout_too(tmp_path_factory):
    game = {"env": "support.two_seats:Longer", "opponents": "past,keep=2,every=1", "steps": 2, "eval_tasks": 0}
    _, told = trained(tmp_path_factory, "pages", cold_demos=8, **game)
    assert told.count("pages of 64 ids") == 2 and "older policies of this run, KV cache in" in told


# ---------------------------------------------------------------------- the choice by the room


@pytest.mark.parametrize(
    ("layout", "dialogues", "told"),
    [
        ("", 7, "KV cache in 6 rows of 320 ids"),
        ("", 3, "pages of 64 ids, because 6 rows of 320 ids would take"),
        (",cache=pages", 8, "KV cache in 36 pages of 64 ids"),
        (",cache=rows", 3, "KV cache in 6 rows of 320 ids, which may not fit: 6 rows of 320 ids would take"),
        ("", 0, "KV cache in 6 rows of 320 ids, which may not fit"),
    ],
)
def test_a_server_chooses_by_what_the_weights_leave(layout, dialogues, told, monkeypatch):
    s = replace(chosen("rows"), model=f"tiny{layout}")
    model = tiny_model(320, 0, hidden=32, layers=2, context=CONTEXT)
    beside = 2**40 - memory_left(monkeypatch, s, model, 2**40)
    assert beside >= 2 * 4 * sum(p.numel() for p in model.parameters())
    room = (dialogues * CONTEXT + 64) * COLUMN
    assert abs(memory_left(monkeypatch, s, model, beside + room) - room) < COLUMN
    renderer, limits = Renderer(build.byte_tokenizer()), HostLimits(6, CONTEXT, (), True, 1)
    served = engines.make_served_generator(s, model, renderer, limits, engines.sampling_cache(s, model))
    assert told in served.describe()


def memory_left(monkeypatch, s, model, usable):
    """The room of a server on a machine of which so many bytes may be used."""
    monkeypatch.setattr(engines, "device_memory", lambda device: int(usable / engines.USABLE) + 1)
    return engines.sampling_cache(s, model).room


def test_pages_that_hold_no_dialogue_are_refused_and_no_slower_path_is_taken():
    with pytest.raises(SettingError, match="one dialogue of 128 ids needs 3; write a smaller context"):
        LocalGenerator(make(), slots=2, context=128, stop_ids=(), cache=CacheChoice(room=0, page=64))


def test_a_model_with_a_cache_of_its_own_says_that_the_option_has_no_effect(monkeypatch):
    from turnwise.engines.generator import model_runner

    def unserved(*args):
        raise ValueError("attention with sinks")

    monkeypatch.setattr(model_runner, "ModelRunner", unserved)
    options = {"slots": 2, "context": 128, "stop_ids": ()}
    told = LocalGenerator(make(), cache=CacheChoice(page=64), **options).describe()
    assert told.endswith("attention with sinks; cache=pages has no effect on such a model")
    assert "no effect" not in LocalGenerator(make(), cache=CacheChoice(room=1), **options).describe()


def test_a_server_gives_its_generator_up_before_it_makes_another():
    alive, made = [], []

    def generator(limits):
        gc.collect()
        alive.append(sum(ref() is not None for ref in made))
        out = LocalGenerator(make(), slots=limits.slots, context=limits.context, stop_ids=limits.stop_ids)
        made.append(weakref.ref(out))
        if limits.slots == 3:
            raise SettingError("no room")  # with what was made in its frame
        return out

    host = PolicyHost(generator, lambda told: ({}, ""), {"weights": {}}, HostLimits(4, 64, ()))

    async def use():
        await host.attach("a", HostLimits(2, 64, ()))
        host.apply("a", 1, [["open", "s", 3]])
        await host.sessions["s"].generate([1, 2], Sampling(max_tokens=3))
        with pytest.raises(SettingError, match="no room"):
            await host.attach("a", HostLimits(3, 64, ()))
        assert host.limits.slots == 2 and not host.paused  # as it was before
        await host.generator.open(0).generate([1, 2], Sampling(max_tokens=3))

    asyncio.run(use())
    assert alive == [0, 0, 0, 0]


# ---------------------------------------------------------------------- the option


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("tiny,cache=page", "the model's option cache is 'page'; write rows or pages"),
        ("tiny,cache=", "the model's option cache is ''; write rows or pages"),
        ("tiny,cache=64 GiB", "the model's option cache is '64 GiB'; write rows or pages"),
        ("tiny,caches=pages", "'caches' is no option of a model; did you mean 'cache'"),
        ("tiny,cache", "'tiny,cache' is no folder, and 'cache' after its comma is no option; write NAME,cache=rows"),
        ("tiny, cache=rows", "' cache=rows' after its comma is no option; write NAME,cache=rows .*without spaces"),
        ("tiny,cache=rows,", "'' after its comma is no option"),
        ("tiny,cache=rows,cache=pages", "option cache is given twice: rows, then pages; write it once"),
    ],
)
def test_wrong_options_are_refused_before_anything_begins(model, words, tmp_path):
    with pytest.raises(SettingError, match=words):
        api.train(quiet=True, out=str(tmp_path), name="run", model=model, **SMALL)
    assert not any(tmp_path.iterdir())


def test_a_teacher_has_no_cache(tmp_path):
    with pytest.raises(SettingError, match="the teacher samples nothing"):
        api.train(quiet=True, out=str(tmp_path), teacher="tiny,cache=pages", method="opd", **SMALL)


def test_options_stand_beside_each_other_and_the_later_one_wins():
    both = ModelName.parse("a/b,routes=free,cache=pages")
    assert both == ModelName("a/b", "free", "pages") and str(both) == "a/b,routes=free,cache=pages"
    rows = ModelName.parse("a/b,routes=free").with_options(ModelName.parse("x,cache=rows"))
    assert str(rows) == "a/b,routes=free,cache=rows" and str(both.with_options(rows)).endswith("cache=rows")
    tiny = [ModelName.parse(name).tiny for name in ("tiny", "tiny,cache=pages", "tinys", "a/tiny,cache=rows")]
    assert tiny == [True, True, False, False]


def test_a_run_directory_is_served_with_the_option(rows):
    served, folder = serve._select(f"{rows[0]},cache=pages", {})
    assert str(served.model) == "tiny,cache=pages" and folder == rows[0] / "model"
    assert serve._select(str(rows[0]), {})[0].model == ModelName("tiny", cache="rows")


@pytest.mark.parametrize(
    ("kind", "theirs", "words"),
    [
        (VLLM, None, "is vLLM, whose KV cache a run cannot lay out; leave cache=pages out: --model a/b"),
        (OURS, "", "was not started with cache=pages; start it with turnwise serve a/b,cache=pages"),
        (OURS, "rows", "was not started with cache=pages"),
        (OURS, "pages", ""),
    ],
)
def test_a_server_with_another_layout_is_refused(kind, theirs, words):
    replica = SimpleNamespace(kind=kind, url="http://127.0.0.1:1", facts={"cache": theirs})
    assert not remote_generators._other_cache(Settings(model="a/b"), replica)
    if not words:
        remote_generators._refuse(replica, remote_generators._other_cache(Settings(model="a/b,cache=pages"), replica))
        return
    with pytest.raises(SettingError, match=words):
        remote_generators._refuse(replica, remote_generators._other_cache(Settings(model="a/b,cache=pages"), replica))
