"""The KV cache in pages: who holds which page, what the pages hold, and that a generator samples what it samples with rows."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.generators import STEPPED, generator, make
from support.prompting import V, ask, bits, check_logp, dialogues, prompts, run

from turnwise.core.records import Completion, Sampling
from turnwise.engines.generator import model_runner
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.generator.kv_cache import CacheChoice, CacheSlot, PageAllocator, PagedCache, RowCache
from turnwise.engines.kernels import reference
from turnwise.errors import SettingError

CPU = torch.device("cpu")
PAGES = CacheChoice(page=16)

# ---------------------------------------------------------------------- the allocator


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=60))
def test_every_page_is_free_or_held_as_often_as_counted(pages: int, moves: list[tuple[int, int]]):
    allocator, holders = PageAllocator(pages), list[list[int]]()
    for move, number in moves:
        if move == 0 and number <= allocator.free:
            holders.append(allocator.take(number))
        elif move == 1 and holders:
            holders.append(holders[number % len(holders)])
            allocator.share(holders[-1])
        elif move == 2 and holders:
            allocator.drop(holders.pop(number % len(holders)))
        count = Counter(page for held in holders for page in held)
        assert count[0] == 0 and all(allocator.holders[page] == count[page] for page in range(1, pages))
        assert allocator.free + len(count) == pages - 1


def test_a_page_is_found_by_its_ids_until_it_is_free_or_written():
    allocator = PageAllocator(5)
    a, b = allocator.take(2)
    allocator.remember(0, [1, 2], int(a))
    allocator.remember(int(a), [3, 4], int(b))
    assert allocator.prefix([1, 2, 3, 4, 5], 2) == [a, b]
    assert allocator.prefix([1, 2, 3, 5], 2) == [a]
    allocator.forget(int(b))
    assert allocator.prefix([1, 2, 3, 4], 2) == [a]
    allocator.drop([a])
    assert allocator.prefix([1, 2, 3, 4], 2) == []


# ---------------------------------------------------------------------- whose pages a new dialogue begins with


def admitted(cache: PagedCache, *asked: tuple[CacheSlot, list[int]]):
    """Admit these dialogues alone, let them end, and say from which column each of their rows is read."""
    plan = cache.admit([], list(asked))
    rows = {slot.order: slot.row for slot, _ in asked}
    starts = {chunk.row: chunk.start for chunks in plan.rounds for chunk in chunks}
    cache.assign_rows([])
    return {order: starts.get(row) for order, row in rows.items()}


def test_ids_that_are_read_only_now_are_no_prefix_of_a_copied_page():
    cache = PagedCache([((2, 8), (2, 8))], 4, 64, torch.float32, CPU, page=8)
    a, b, ids = CacheSlot(0), CacheSlot(1), list(range(20))
    admitted(cache, (a, ids[:10]))
    assert admitted(cache, (a, ids[:14]), (b, [*ids[:12], 99])) == {0: 10, 1: 8}  # from 12 on a's page is not there yet


def test_a_row_that_another_dialogue_took_is_no_prefix():
    cache = PagedCache([((2, 8), (2, 8))], 3, 64, torch.float32, CPU, page=4)
    p, q, slots = [1, 2, 3, 4], [5, 6, 7, 8], [CacheSlot(n) for n in range(5)]
    for slot, ids in zip(slots, ([*p, 1, 2], [*p, 3, 4], [*q, 9, 9])):
        admitted(cache, (slot, ids))
        cache.release(slot)
    page = int(cache.allocator.prefix(p, 4)[0])
    # the fourth dialogue takes the row of the first, the fifth has that row's ids from the second page on
    assert admitted(cache, (slots[3], [*q, 9, 9]), (slots[4], [*p, 9, 8])) == {3: None, 4: 4}
    assert cache.block_table[slots[4].row, 0] == page


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000))
def test_dialogues_that_begin_alike_get_the_log_probabilities_of_a_plain_forward(seed: int):
    model, dice = make(), random.Random(seed)
    g = generator(model, slots=6, cache=PAGES)
    long = [prompts(1, 60, 60, seed=n)[0] for n in range(2)]
    for _ in range(4):
        asked = [dice.choice(long)[: dice.randint(1, 60)] + prompts(1, 0, 3, dice.randrange(99))[0] for _ in range(8)]
        asked += asked[:2]
        for ids, done in zip(asked, ask(g, asked, Sampling(max_tokens=dice.randint(1, 20)))):
            check_logp(model, ids, done)


# ---------------------------------------------------------------------- what pages hold


class Book:
    """A paged cache whose keys are a digest of all ids up to each column, written as an engine would; and dialogues over it."""

    def __init__(self, rows: int, context: int, pages: int, page: int, seed: int) -> None:
        shapes = [((1, 1), (1, 1))]
        self.cache = PagedCache(shapes, rows, context, torch.float64, CPU, pages=pages, page=page)
        self.dice = random.Random(seed)
        self.running: list[tuple[CacheSlot, list[int]]] = []
        self.idle: list[tuple[CacheSlot, list[int]]] = []
        self.opened = 0

    @staticmethod
    def digest(ids: list[int]) -> float:
        return float(hash(tuple(ids)) % 1_000_003 + 1)

    def write(self, row: int, ids: list[int], start: int, alone: bool) -> None:
        """``alone``: nobody else may hold the page. The pages of a prompt may be shared before they are computed."""
        for column in range(start, len(ids)):
            page, offset = self.cache.places(torch.tensor([row]), torch.tensor([column]))
            assert page[0] > 0 and (not alone or self.cache.allocator.holders[page[0]] == 1), "a shared page is written"
            self.cache.keys[0][page, 0, offset] = self.digest(ids[: column + 1])

    def step(self) -> None:
        move = self.dice.choice(
            ["open", "open", "decode", "decode", "decode", "finish", "fork", "turn", "close", "update"]
        )
        getattr(self, move)()
        self.check()

    def admit(self, wanted: list[tuple[CacheSlot, list[int]]]) -> None:
        wanted = wanted[: self.cache.rows - len(self.running)]
        plan = self.cache.admit([slot for slot, _ in self.running], wanted)
        assert plan.admitted or self.running or not wanted
        for chunks in plan.rounds:
            for chunk in chunks:
                ids = self.cache.cached_ids[chunk.row]
                assert ids[chunk.start :] == chunk.ids
                self.write(chunk.row, ids, chunk.start, False)
        self.running += [(slot, list(ids)) for slot, ids in wanted[: plan.admitted]]
        self.running.sort(key=lambda entry: entry[0].row or 0)
        self.idle = [entry for entry in self.idle if entry[0] not in {slot for slot, _ in self.running}]

    def prompt(self) -> list[int]:
        head = [self.dice.choice([[1] * 9, [2] * 5, []])] * 1
        return [*head[0], *(self.dice.randrange(3) for _ in range(self.dice.randint(0, 12)))]

    def open(self) -> None:
        """A group with one prompt, and one dialogue beside it that continues it."""
        ids = self.prompt()
        group = [ids] * self.dice.randint(1, 3) + [[*ids, 7, 7, 7]]
        self.opened += len(group)
        self.admit([(CacheSlot(self.opened + i), list(x)) for i, x in enumerate(group)])

    def fork(self) -> None:
        if self.idle or self.running:
            _, ids = self.dice.choice(self.idle + self.running)
            self.opened += 1
            cut = self.dice.randint(0, len(ids))
            self.admit([(CacheSlot(self.opened), [*ids[:cut], 5][: self.cache.context - 1])])

    def turn(self) -> None:
        if self.idle:
            slot, ids = self.dice.choice(self.idle)
            keep = len(ids) if self.dice.random() < 0.7 else self.dice.randint(0, len(ids))  # or a rewritten history
            self.admit([(slot, [*ids[:keep], 4, 4][: self.cache.context - 1])])

    def decode(self) -> None:
        more = self.dice.randint(1, 5)
        room = [min(more, self.cache.context - len(ids)) for _, ids in self.running]
        while self.running and not self.cache.hold([(len(i), n) for (_, i), n in zip(self.running, room)]):
            self.leave(self.running[-1])
            room = room[: len(self.running)]
        for (slot, ids), count in zip(self.running, room):
            assert slot.row is not None
            for _ in range(count):
                ids.append(self.dice.randrange(3))
                self.write(slot.row, ids, len(ids) - 1, True)
            self.cache.cached_ids[slot.row] = list(ids)

    def leave(self, entry: tuple[CacheSlot, list[int]]) -> None:
        self.running.remove(entry)
        self.idle.append(entry)
        self.cache.assign_rows([slot for slot, _ in self.running])
        self.running.sort(key=lambda entry: entry[0].row or 0)

    def finish(self) -> None:
        if self.running:
            self.leave(self.dice.choice(self.running))

    def close(self) -> None:
        if self.idle:
            slot, _ = self.idle.pop(self.dice.randrange(len(self.idle)))
            self.cache.release(slot)

    def update(self) -> None:
        if self.dice.random() < 0.2:
            self.cache.invalidate()
            self.idle += self.running
            self.running = []
            self.cache.assign_rows([])

    def check(self) -> None:
        cache, count = self.cache, Counter[int]()
        assert cache.active == len(self.running)
        assert [slot.row for slot, _ in self.running] == list(range(len(self.running)))
        for row in range(cache.rows):
            held, ids = len(cache.paged_rows[row].pages), cache.cached_ids[row]
            pages = cache.block_table[row]
            assert (pages[:held] > 0).all() and (pages[held:] == 0).all() and len(ids) <= held * cache.page
            assert len(set(pages[:held].tolist())) == held
            count.update(pages[:held].tolist())
            found = cache.columns(0, torch.tensor([row]), cache.context)[0][0, 0, : len(ids), 0]
            assert found.tolist() == [self.digest(ids[: n + 1]) for n in range(len(ids))]
            assert cache.owner[row] is None or cache.owner[row].row == row  # type: ignore[union-attr]
        assert all(cache.allocator.holders[page] == count[page] for page in range(1, cache.pages + 1))
        assert cache.allocator.free + len(count) == cache.pages


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([2, 5, 9]), st.sampled_from([2, 4, 8]), st.sampled_from([1, 3, 100]))
def test_rows_hold_the_kv_of_their_ids_whatever_happens(seed: int, rows: int, page: int, spare: int):
    """Groups, forks, turns, rewritten histories, evictions, preemptions, weight updates; pages for one dialogue or many."""
    context = 40
    book = Book(rows, context, -(-context // page) + spare, page, seed)
    for _ in range(40):
        book.step()


def test_the_least_recently_used_lose_their_last_pages_first():
    cache = PagedCache([((1, 1), (1, 1))], 3, 8, torch.float32, CPU, pages=7, page=2)
    slots = [CacheSlot(n) for n in range(3)]
    for n in (0, 1):
        cache.admit([], [(slots[n], [n] * 6)])
        cache.assign_rows([])
    assert cache.allocator.free == 1
    cache.admit([], [(slots[2], [2] * 5)])
    kept = {n: len(cache.cached_ids[s.row]) for n, s in enumerate(slots) if s.row is not None}
    assert kept == {0: 2, 1: 6, 2: 5}  # 0 is the oldest: it lost two of its three pages, from the end


def test_a_group_holds_one_copy_of_its_prompt():
    cache = PagedCache([((1, 1), (1, 1))], 8, 64, torch.float32, CPU, pages=40, page=4)
    slots = [CacheSlot(n) for n in range(8)]
    plan = cache.admit([], [(slot, list(range(30))) for slot in slots])
    assert [len(chunk.ids) for chunks in plan.rounds for chunk in chunks] == [30]
    assert plan.shared == 7 * 30 and 40 - cache.allocator.free == 8
    assert cache.hold([(30, 2)] * 8)  # each writes into the last page, which it copies; one keeps the old one
    assert 40 - cache.allocator.free == 7 + 8


# ---------------------------------------------------------------------- a generator samples the same


async def tree_of_dialogues(g: LocalGenerator, seed: int, n: int = 8) -> list[list[Completion]]:
    """Dialogues of two prompts with turns, tool replies and forks."""
    dice = random.Random(seed)
    heads = [[dice.randrange(V) for _ in range(length)] for length in (37, 5)]
    sessions = [g.open(i) for i in range(n)]

    async def one(i: int) -> list[Completion]:
        own, out, session = random.Random(seed * 100 + i), [], sessions[i]
        ids = [*heads[i % 2], *(own.randrange(V) for _ in range(i // 4))]
        for turn in range(3):
            out.append(await session.generate(ids, Sampling(max_tokens=own.randint(1, 12), top_k=0 if i % 3 else 9)))
            ids = [*ids, *out[-1].tokens, *(own.randrange(V) for _ in range(own.randint(1, 4)))]
            if turn == 1 and i % 3 == 0:
                forked = session.fork(1000 + i)
                session.close()
                session = forked
        session.close()
        return out

    return list(await asyncio.gather(*map(one, range(n))))


def tokens(out: list[list[Completion]]) -> list[list[int]]:
    return [list(c.tokens) for turns in out for c in turns]


def largest_difference(a: list[list[Completion]], b: list[list[Completion]]) -> float:
    pairs = [(x, y) for s, t in zip(a, b) for c, d in zip(s, t) for x, y in zip(c.logp, d.logp)]
    return max(abs(x - y) for x, y in pairs)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "window", "gpt2"])
@pytest.mark.parametrize("fast", [True, False])
def test_pages_of_enough_memory_give_the_bits_of_rows(kind: str, fast: bool):
    model = make(kind)
    rows, pages = (
        run(dialogues(generator(model, fast=fast, cache=cache), None)) for cache in (CacheChoice(page=0), PAGES)
    )
    if fast and kind in STEPPED:
        assert bits(rows) == bits(pages)
    for a, b in zip(
        chain(*rows), chain(*pages), strict=True
    ):  # a stock attention may sum gathered pages in another order
        assert a.tokens == b.tokens and a.logp == pytest.approx(b.logp, abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "llama3", "window"])
@pytest.mark.parametrize("room", [None, 10])
def test_forks_turns_and_evictions_change_no_token(kind: str, room: int | None):
    """Where a prefix is computed in other pieces, sums have another order: log-probabilities agree to 1e-5, tokens exactly."""
    model = make(kind)
    column = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head size, bytes
    choice = CacheChoice(page=16, room=None if room is None else (room + 1) * 16 * column)
    for seed in range(3):
        g = generator(model, slots=6, cache=choice)
        rows = run(tree_of_dialogues(generator(model, slots=6), seed))
        pages = run(tree_of_dialogues(g, seed))
        assert tokens(rows) == tokens(pages)
        assert largest_difference(rows, pages) < 1e-5
        assert room is None or g.stats()["admissions"] > 8  # some had to wait


def test_a_decoder_with_graphs_gives_the_tokens_of_rows(monkeypatch: pytest.MonkeyPatch):
    """The reference kernels, without a GPU."""
    monkeypatch.setattr(model_runner, "decode_ops", lambda device: (reference, ""))
    model = graph_model()
    rows = run(tree_of_dialogues(generator(model, slots=6), 0))
    for room in (None, 11):
        choice = CacheChoice(page=16, room=None if room is None else room * 16 * 2 * 2 * 2 * 16 * 4)
        g = generator(model, slots=6, cache=choice)
        assert g.model_runner.graphs is not None and "pages of 16" in g.describe()
        pages = run(tree_of_dialogues(g, 0))
        assert tokens(rows) == tokens(pages) and largest_difference(rows, pages) < 1e-5


def graph_model():
    from support.prompting import family, peaked

    shape = {
        "vocab_size": V, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    return peaked(family(shape)["qwen3"])


@pytest.mark.parametrize("deterministic", [True, False])
def test_requests_wait_for_pages_and_none_is_lost(deterministic: bool):
    """Pages for one dialogue and a half: requests wait, leave and come back, and all finish."""
    model, asked = make(), prompts(20, 20, 30)
    sampling = [Sampling(max_tokens=40 + 2 * i) for i in range(20)]  # more than a page: more than admission expects
    expected = ask(generator(model, slots=20), asked, sampling)
    room = 13 * 16 * 2 * 2 * 2 * 8 * 4
    g = generator(model, slots=20, deterministic=deterministic, cache=CacheChoice(page=16, room=room))
    found = ask(g, asked, sampling)
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    for ids, done in zip(asked, found):
        check_logp(model, ids, done)
    assert g.stats()["preemptions"] > 0


def test_a_shared_prompt_and_a_fork_are_computed_once():
    g = generator(slots=8, cache=PAGES)
    prompt = list(range(40))

    async def main() -> None:
        sessions = [g.open(i) for i in range(4)]
        done = await asyncio.gather(*(s.generate(prompt, Sampling(max_tokens=6)) for s in sessions))
        assert g.stats()["prefill_tokens"] == 39 and g.stats()["shared_tokens"] == 3 * 39
        for s in sessions[1:]:
            s.park()
        forked = sessions[0].fork(9)
        sessions[0].park()
        await forked.generate([*prompt, *done[0].tokens], Sampling(max_tokens=3))

    run(main())
    assert g.stats()["prefill_tokens"] == 39  # the fork continues the pages of its parent


def test_publish_during_generation_recomputes_with_new_weights():
    old, new = make(seed=0), make(seed=1)
    g, asked = generator(old, slots=4, cache=PAGES), prompts(4, 20, 40)

    async def main() -> list[Completion]:
        sessions = [g.open(i) for i in range(4)]
        tasks = [asyncio.ensure_future(s.generate(i, Sampling(max_tokens=40))) for s, i in zip(sessions, asked)]
        while not g.stats()["tokens"]:
            await asyncio.sleep(0)
        await g.publish(dict(new.named_parameters()), 1)
        return list(await asyncio.gather(*tasks))

    for ids, done in zip(asked, run(main())):
        assert set(done.version) == {0, 1}
        for version, model in enumerate((old, new)):
            with torch.no_grad():
                logp = model(torch.tensor([[*ids, *done.tokens]])).logits[0].log_softmax(-1)
            for n, token in enumerate(done.tokens):
                if done.version[n] == version:
                    assert abs(float(logp[len(ids) - 1 + n, token]) - done.logp[n]) < 1e-4


# ---------------------------------------------------------------------- memory, and the choice


def test_a_thousand_dialogues_take_memory_by_their_lengths():
    """980 dialogues of 20 ids and 20 of 1,000 in a context of 1,024."""
    shapes, context = [((2, 8), (2, 8))] * 2, 1024
    cache = PagedCache(shapes, 1000, context, torch.float32, CPU, page=16)
    dice = random.Random(0)
    lengths = [1000 if n % 50 == 0 else 20 for n in range(1000)]
    plan = cache.admit([], [(CacheSlot(n), [dice.randrange(99) for _ in range(x)]) for n, x in enumerate(lengths)])
    assert plan.admitted == 1000
    column = 2 * 2 * 2 * 8 * 4
    needed = sum(-(-n // 16) * 16 for n in lengths) * column
    used = (cache.allocator.used - 1) * 16 * column
    assert used == needed and cache.nbytes <= 2 * needed + 40 * 16 * column  # the pool doubles
    rows = 1000 * context * column  # what rows take once one dialogue is that long
    assert cache.nbytes < rows / 9


def test_the_layout_is_chosen_by_the_room():
    shapes, column = [((2, 8), (2, 8))], 2 * 2 * 8 * 4
    make_cache = lambda choice: choice.make(shapes, 4, 256, torch.float32, CPU)  # noqa: E731
    assert type(make_cache(CacheChoice())) is RowCache
    assert type(make_cache(CacheChoice(room=4 * 256 * column))) is RowCache
    paged = make_cache(CacheChoice(room=4 * 256 * column - 1))
    assert isinstance(paged, PagedCache) and (paged.pages + 1) * paged.page * column <= 4 * 256 * column - 1
    assert (
        type(make_cache(CacheChoice(room=4 * 64 * column))) is RowCache
    )  # not one dialogue fits: the room is an estimate
    with pytest.raises(SettingError, match="one dialogue of 256 ids needs 5; write a smaller context"):
        make_cache(CacheChoice(room=4 * 64 * column, page=64))
