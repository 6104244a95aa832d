"""Sessions over time: KV kept, copied, cut and re-read; new weights; cancellation; faults."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
import torch
from support.generators import generator, make
from support.prompting import V, ask, check_logp, dialogues, prompts, run

from turnwise.core.records import Sampling, Stop
from turnwise.engines.generator import model_runner
from turnwise.engines.generator.generator import LocalSession
from turnwise.errors import SettingError


def test_kv_is_kept_across_turns_and_equals_a_fresh_read():
    model, g = make("qwen3"), generator(make("qwen3"), slots=16)
    out = run(dialogues(g, None))
    read = g.stats()["prefill_tokens"]
    for i, turns in enumerate(out):
        rng, ids = random.Random(i), [1, 2, 3 + i]
        for done in turns:
            rng.randint(1, 25)
            check_logp(model, ids, done)
            ids = [*ids, *done.tokens, *(rng.randrange(V) for _ in range(rng.randint(1, 6)))]
    assert read < 9 * (3 + 2 * 8)  # prompts, replies and the last sampled token of a turn; never a whole dialogue


def test_the_wait_for_another_session_is_not_sampling():
    """A deterministic generator samples the second turn once the other session has closed."""
    g, ids = generator(deterministic=True), prompts(1, 20, 20)[0]

    async def main():
        asking, idle = g.open(0), g.open(1)
        before = time.perf_counter()
        waiting = asyncio.create_task(asking.generate(ids, Sampling(max_tokens=4)))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        idle.close()
        done, whole = await waiting, time.perf_counter() - before
        asking.close()
        return done.seconds, whole

    seconds, whole = run(main())
    held = g.stats()["seconds_held"]
    assert 0.1 < held < whole and 0 < seconds < whole - 0.1


def test_a_rewritten_history_truncates_the_slot():
    model, g = make(), generator()

    async def main():
        session = g.open(0)
        ids = prompts(1, 20, 20)[0]
        await session.generate(ids, Sampling(max_tokens=10))
        for changed in ([*ids[:7], 3, 1, 4], ids[:5], [9, *ids], [*ids, 1]):
            check_logp(model, changed, await session.generate(changed, Sampling(max_tokens=10)))
        session.close()

    run(main())
    assert g.stats()["prefix_hits"] >= 7 + 4


def test_a_dialogue_that_begins_afresh_draws_afresh():
    """Else a policy that sees a state again would repeat what it did there, however unlikely, for ever."""
    g, ids = generator(), prompts(1, 20, 20)[0]

    async def main(seed):
        session = g.open(seed)
        drawn = [(await session.generate(ids, Sampling(max_tokens=6))).tokens for _ in range(4)]
        session.close()
        return drawn

    drawn = run(main(0))
    assert len(set(map(tuple, drawn))) == 4
    assert run(main(0)) == drawn  # and still depends on the seed alone


def test_a_shared_prompt_is_read_once():
    model, g, ids = make(), generator(slots=8), prompts(1, 30, 30)[0]

    async def main():
        sessions = [g.open(i) for i in range(8)]
        return await asyncio.gather(*(s.generate(ids, Sampling(max_tokens=6)) for s in sessions))

    out = run(main())
    assert g.stats()["prefill_tokens"] == 29 and g.stats()["shared_tokens"] == 7 * 29
    assert len({tuple(c.tokens) for c in out}) > 1
    for done in out:
        check_logp(model, ids, done)


def test_fork_copies_kv():
    model, g, ids = make(), generator(slots=4), prompts(1, 20, 20)[0]

    async def main():
        root = g.open(0)
        done = await root.generate(ids, Sampling(max_tokens=10))
        children = [root.fork(seed) for seed in (1, 2)]
        root.close()
        past = [*ids, *done.tokens, 7]
        return past, await asyncio.gather(*(c.generate(past, Sampling(max_tokens=8)) for c in children))

    past, out = run(main())
    assert g.stats()["prefill_tokens"] == 19 + 1  # the prompt, and for both children the last sampled token
    assert out[0].tokens != out[1].tokens
    for done in out:
        check_logp(model, past, done)


@pytest.mark.parametrize("deterministic", [True, False])
def test_more_sessions_than_slots(deterministic: bool):
    model = make("qwen3")
    g = generator(model, slots=2, deterministic=deterministic)
    wide = generator(model, slots=32)
    tokens = [[[c.tokens for c in turns] for turns in run(dialogues(x, None, n=7))] for x in (g, wide)]
    assert tokens[0] == tokens[1]


def test_parked_sessions_are_not_waited_for():
    """Two agents taking turns: while one speaks the other rests."""
    g = generator(patience=30.0)

    async def main():
        a, b = g.open(0), g.open(1)
        b.park()
        ids = [1, 2]
        for speaker in (a, b, a, b):
            done = await speaker.generate(ids, Sampling(max_tokens=3))
            speaker.park()
            ids = [*ids, *done.tokens]
        return ids

    assert len(run(main())) == 14
    assert g.stats()["patience_timeouts"] == 0


def test_a_forgotten_session_delays_but_does_not_hang():
    g = generator(patience=0.05)

    async def main():
        g.open(0)
        return await g.open(1).generate([1], Sampling(max_tokens=20))

    assert len(run(main()).tokens) == 20
    assert g.stats()["patience_timeouts"] == 1


@pytest.mark.parametrize("deterministic", [True, False])
def test_cancel_returns_what_there_is(deterministic: bool):
    model, g = make(), generator(deterministic=deterministic, context=4096, tick=2)

    async def main():
        session, other = g.open(0), g.open(1)
        ids = prompts(1, 9, 9)[0]
        task = asyncio.ensure_future(session.generate(ids, Sampling(max_tokens=4000)))
        companion = asyncio.ensure_future(other.generate(ids, Sampling(max_tokens=200)))
        while g.stats()["tokens"] < 40:
            await asyncio.sleep(0.001)
        session.cancel()
        done = await task
        assert done.stop is Stop.CANCELLED and 0 < len(done.tokens) < 4000
        check_logp(model, ids, done)
        ids = [*ids, *done.tokens, 5]
        session.park()
        assert len((await companion).tokens) == 200
        other.close()
        again = await session.generate(ids, Sampling(max_tokens=5))  # its KV survived
        check_logp(model, ids, again)

    run(main())


def test_a_cancelled_caller_frees_its_lane():
    g = generator(context=4096)

    async def main():
        session = g.open(0)
        task = asyncio.ensure_future(session.generate([1], Sampling(max_tokens=4000)))
        while not g.stats()["steps"]:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len((await session.generate([1], Sampling(max_tokens=3))).tokens) == 3

    run(main())
    assert g.stats()["tokens"] < 3900


def test_closing_during_generation_ends_it():
    g = generator(context=4096)

    async def main():
        session = g.open(0)
        task = asyncio.ensure_future(session.generate([1], Sampling(max_tokens=4000)))
        while not g.stats()["steps"]:
            await asyncio.sleep(0)
        session.close()
        assert (await task).stop is Stop.CANCELLED

    run(main())


# ---------------------------------------------------------------------- weights


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_publish_during_generation(kind: str):
    old, new = make(kind, 0), make(kind, 1)
    g = generator(old, context=250, tick=2)

    async def main():
        session, idle = g.open(0), g.open(1)
        idle_ids = prompts(1, 12, 12, seed=5)[0]
        one = Sampling(max_tokens=1)
        await asyncio.gather(idle.generate(idle_ids, one), session.generate([1], one))
        idle.park()
        ids = prompts(1, 9, 9)[0]
        task = asyncio.ensure_future(session.generate(ids, Sampling(max_tokens=240)))
        while g.stats()["tokens"] < 12:
            await asyncio.sleep(0.0005)
        await g.publish(dict(new.state_dict()), 7)
        assert g.version == 7
        done = await task
        session.close()
        return ids, done, idle_ids, await idle.generate(idle_ids, Sampling(max_tokens=5))

    ids, done, idle_ids, later = run(main())
    assert len(done.tokens) == 240
    assert set(done.version) == {0, 7} and list(done.version) == sorted(done.version)
    change = list(done.version).index(7)
    got = torch.tensor(done.logp)
    for model, part in ((old, slice(0, change)), (new, slice(change, None))):
        with torch.no_grad():
            logp = model(torch.tensor([[*ids, *done.tokens]])).logits[0].log_softmax(-1)
        expected = logp[torch.arange(len(ids) - 1, len(ids) + 239), torch.tensor(done.tokens)]
        torch.testing.assert_close(got[part], expected[part], atol=1e-4, rtol=0)
    assert set(later.version) == {7}
    check_logp(new, idle_ids, later)


def test_publish_when_nothing_runs_and_weights_are_copied():
    new = make(seed=1)
    g = generator(make())
    weights = {name: p.detach().clone() for name, p in new.named_parameters()}  # a tied head has no name of its own

    async def main():
        await g.publish(weights, 3)
        for w in weights.values():
            w.zero_()
        return await g.open(0).generate([1, 2], Sampling(max_tokens=9))

    done = run(main())
    assert set(done.version) == {3}
    check_logp(new, [1, 2], done)


def test_wrong_weights_are_refused_and_the_old_ones_hold():
    model = make()
    g = generator(model)

    async def main():
        with pytest.raises(SettingError, match="nonsense"):
            await g.publish({"nonsense": torch.zeros(1)}, 1)
        with pytest.raises(SettingError, match="shape"):
            await g.publish({"model.norm.weight": torch.zeros(1)}, 1)
        return await g.open(0).generate([1, 2], Sampling(max_tokens=9))

    done = run(main())
    assert set(done.version) == {0}
    check_logp(model, [1, 2], done)


# ---------------------------------------------------------------------- faults


def test_a_fault_reaches_every_caller_and_the_generator_recovers(monkeypatch: pytest.MonkeyPatch):
    model = make()
    g = generator(model, slots=2)
    step, count = g.model_runner.decode_step, iter(range(10**9))

    def broken(*args):
        if next(count) == 5:
            raise RuntimeError("the device is on fire")
        return step(*args)

    monkeypatch.setattr(g.model_runner, "decode_step", broken)

    async def main():
        sessions = [g.open(i) for i in range(4)]
        calls = (s.generate([1, 2], Sampling(max_tokens=20)) for s in sessions)
        out = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(x) for x in out] == ["the device is on fire"] * 4
        return await asyncio.gather(*map(once, sessions))

    async def once(session: LocalSession):
        done = await session.generate([1, 2], Sampling(max_tokens=20))
        session.close()
        return done

    for done in run(main()):
        check_logp(model, [1, 2], done)


def test_one_generator_serves_several_event_loops():
    g = generator(context=4096)

    async def abandon():
        asyncio.ensure_future(g.open(0).generate([1], Sampling(max_tokens=4000)))  # noqa: RUF006
        await asyncio.sleep(0.02)

    async def ask():
        g.sessions.clear()
        return await g.open(1).generate([1], Sampling(max_tokens=4))

    asyncio.run(abandon())
    assert len(run(ask()).tokens) == 4
    assert len(run(ask()).tokens) == 4


def test_every_forward_pass_is_counted_when_it_is_done(monkeypatch):
    """A server whose model is slow shows progress inside a batch; else it would be taken for one that hangs."""
    monkeypatch.setattr(model_runner, "PREFILL_BUDGET", 8)
    g, passes = generator(make(), fast=False), []
    counted = lambda call: lambda *a, **k: (passes.append(g.stats()["forward_passes"]), call(*a, **k))[1]  # noqa: E731
    runner = g.model_runner
    monkeypatch.setattr(runner, "decode_step", counted(runner.decode_step))
    monkeypatch.setattr(runner.model.base_model, "forward", counted(runner.model.base_model.forward))
    ask(g, [[1] * 9, [2] * 9, [3] * 9], Sampling(max_tokens=5))
    assert {n - passes[0] for n in passes} == {*range(3 + 5)}  # three prefills of 8 ids, then five steps
    assert g.stats()["forward_passes"] - passes[0] == 3 + 5 == 3 + g.stats()["steps"]
