"""A generator behind HTTP: the tokens and floats of this process, exact versions, and what follows when a server is lost."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch
from support.dialogues import run, two_turns
from support.generator_servers import LIMITS, connected, served, weights_of
from support.generators import generator, make
from support.prompting import prompts

from turnwise.core.records import Completion, Sampling, Stop
from turnwise.engines.remote import remote_generator
from turnwise.engines.remote.http import HttpPool, ServerAddress, fault_words
from turnwise.engines.remote.remote_generator import PolicyProbe, _cut, mean_difference
from turnwise.engines.remote.replica import Replica, ReplicaLost
from turnwise.engines.remote.token_wire import read_part
from turnwise.engines.remote.weight_files import WeightFolder, read_weights
from turnwise.errors import GeneratorLost, ServerFault, SettingError, StoreError
from turnwise.serve import policy_host

SAMPLING = Sampling(max_tokens=12)
LONG = Sampling(max_tokens=100)


def plain(parts):
    return [
        (
            list(p.tokens),
            list(p.logp),
            list(p.mass),
            list(p.version),
            list(p.entropy),
            list(p.confidence),
            list(p.kept),
            p.stop,
        )
        for p in parts
    ]


# ------------------------------------------------------------------ same as a local one


@pytest.mark.parametrize(
    "sampling",
    [SAMPLING, Sampling(temperature=0.7, top_k=9, top_p=0.9, max_tokens=10), Sampling(max_tokens=6, entropy=True)],
    ids=["whole", "cut", "entropy"],
)
def test_tokens_and_floats_equal_those_of_a_local_generator_bit_for_bit(sampling):
    model, asked = make(seed=3), prompts(7)

    async def remote(url):
        g = await connected([url], model)
        await g.publish(weights_of(model), 5)
        return await two_turns(g, asked, sampling)

    async def local():
        g = generator(model)
        await g.publish(weights_of(model), 5)
        return await two_turns(g, asked, sampling)

    with served(make(seed=1)) as server:
        assert plain(run(remote(server.url))) == plain(run(local()))


def test_the_wait_for_another_dialogue_is_not_sampling():
    """The server samples once the other dialogue has closed, and says for how long it waited."""
    model = make()

    async def main(url, host):
        generator = await connected([url], model)
        await generator.publish(weights_of(model), 1)
        asking, idle = generator.open(0), generator.open(1)
        before = time.perf_counter()
        waiting = asyncio.create_task(asking.generate([1, 2, 3], Sampling(max_tokens=4)))
        while host.generator.stats()["seconds_held"] < 0.6:
            await asyncio.sleep(0.05)
        assert not waiting.done()
        idle.close()
        done, whole = await waiting, time.perf_counter() - before
        asking.close()
        return done, whole

    with served(model) as server:
        done, whole = asyncio.run(main(server.url, server.host))
    assert done.tokens and 0 < done.seconds < whole - 0.5


@pytest.mark.parametrize("value", [None, "long", [1.0]])
def test_a_wait_that_is_no_number_is_a_fault_of_the_server(value):
    choice = {
        "token_ids": [],
        "finish_reason": "stop",
        "logprobs": {"content": []},
        "turnwise": {"seconds_held": value},
    }
    with pytest.raises(ServerFault, match="seconds_held that are no numbers"):
        read_part({"choices": [choice]}, frozenset())


def test_a_history_that_is_rewritten_draws_other_numbers_as_in_a_local_generator():
    model, (ids, *_) = make(), prompts(1)

    async def play(g):
        await g.publish(weights_of(model), 1)
        session = g.open(4)
        return [await session.generate(part, SAMPLING) for part in (ids, ids[:-1], ids[:-1])]

    async def remote(url):
        return await play(await connected([url], model))

    with served(make(seed=1)) as server:
        assert plain(run(remote(server.url))) == plain(run(play(generator(model))))


@pytest.mark.thorough
@pytest.mark.parametrize("tied", [False, True])
def test_weights_there_and_back_give_the_greedy_tokens_of_fresh_loads(tied):
    def model(seed):
        made = make(seed=seed)
        embedding = made.model.embed_tokens.weight
        made.config.tie_word_embeddings = tied
        made.lm_head.weight = embedding if tied else torch.nn.Parameter(embedding.detach().flip(0).clone())
        assert ("lm_head.weight" in weights_of(made)) != tied
        return made

    a, b, asked, greedy = model(1), model(2), prompts(4), Sampling(temperature=0, max_tokens=10)

    async def fresh(m):
        return [list(p.tokens) for p in await two_turns(generator(m), asked, greedy)]

    async def updated(url):
        g, out = await connected([url], a), []
        for version, m in enumerate((a, b, a), 1):
            await g.publish(weights_of(m), version)
            assert g.fatal is None
            out.append([list(p.tokens) for p in await two_turns(g, asked, greedy)])
        return out

    with served(model(3)) as server:
        first, second, third = run(updated(server.url))
    assert first == third == run(fresh(a))
    assert second == run(fresh(b)) != first


# ------------------------------------------------------------------ publication


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_a_dialogue_that_ends_while_its_request_waits_for_weights_asks_nothing(end):
    """The server would not know it any longer."""
    model = make()

    async def play(url, host):
        g = await connected([url], model)
        await g.publish(weights_of(model), 1)
        answered, session = host.answered, g.open(3)
        g._ready.clear()  # as during a publication
        task = asyncio.ensure_future(session.generate([1, 2, 3], SAMPLING))
        await asyncio.sleep(0.05)
        getattr(session, end)()
        g._ready.set()
        done = await task
        other = await g.open(4).generate([1, 2, 3], SAMPLING) if end == "close" else done  # the server is still in use
        return done, other, host.answered - answered, g.alive()

    with served(model) as server:
        done, other, asked, alive = run(play(server.url, server.host))
    assert done.stop is Stop.CANCELLED and not done.tokens and alive
    assert asked == (1 if end == "close" else 0) and (other.tokens or end == "cancel")


def test_nobody_waits_for_a_cancelled_request():
    """Its connection ends, so the server can end its work."""
    received, ended = threading.Event(), threading.Event()

    def serve(listener):
        with listener.accept()[0] as connection:
            while connection.recv(4096):
                received.set()
            ended.set()

    async def play(url):
        task = asyncio.ensure_future(HttpPool(ServerAddress(url, "")).call("/", {"a": 1}, None))
        await asyncio.to_thread(received.wait, 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await asyncio.to_thread(ended.wait, 60)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        run(play(f"http://127.0.0.1:{listener.getsockname()[1]}"))


def test_too_many_open_files_are_no_fault_of_the_server():
    fault = OSError(errno.EMFILE, "Too many open files")
    words = fault_words(fault, False, 1.0)
    assert "this process has too many open files" in words and "ulimit -n" in words


def test_a_publication_does_not_wait_for_a_lost_server_that_says_nothing(monkeypatch):
    monkeypatch.setattr(remote_generator, "REJOIN_SECONDS", 0.1)
    model = make()

    async def play(url):
        g = await connected([url], model)
        await g.publish(weights_of(model), 1)
        silent, answer = g.replicas[0], asyncio.Event()

        async def never():
            await answer.wait()

        silent.identify = never
        silent.lose("it is stopped")
        began = time.monotonic()
        assert await g._came_back() == [] and time.monotonic() - began < 30
        answer.set()
        return await g._came_back() == [silent]

    with served(model) as server:
        assert run(play(server.url))


@pytest.mark.thorough
def test_a_request_in_flight_keeps_its_tokens_and_goes_on_with_the_new_weights():
    a, b, (ids, *_) = make(seed=1), make(seed=2), prompts(1)

    async def play(url, host):
        g = await connected([url], a, limits=replace(LIMITS, deterministic=False))
        await g.publish(weights_of(a), 1)
        session = g.open(3)
        task = asyncio.ensure_future(session.generate(ids, LONG))
        while not host.in_flight:
            await asyncio.sleep(0.001)
        await g.publish(weights_of(b), 2)
        return await task, g.stats()

    with served(make(seed=4)) as server:
        make_generator = server.host._make

        def slowly(limits):
            made = make_generator(limits)
            step = made.model_runner.decode_step

            def waiting_step(*args):
                time.sleep(0.01)
                return step(*args)

            made.model_runner.decode_step = waiting_step
            return made

        server.host._make = slowly
        done, stats = run(play(server.url, server.host))
    assert len(done.tokens) == 100 and len(done.logp) == 100
    assert list(done.version) == sorted(done.version) and set(done.version) <= {1, 2} and done.version[-1] == 2
    assert stats["aborted"] <= 1
    split = list(done.version).index(2)
    for model, low, high in ((a, 0, split), (b, split, 100)):
        expected = PolicyProbe(model, 10).logp(weights_of(model), ids, done.tokens)
        assert mean_difference(expected[low:high], list(done.logp)[low:high]) < 1e-4


def test_an_answer_from_other_weights_is_refused():
    model, heard = make(seed=1), []

    async def play(server):
        g = await connected([server.url], model, tell=heard)
        await g.publish(weights_of(model), 1)
        assert g.fatal is None

        async def forgets(weights, version):  # says that it loaded them, and did not
            server.host.generator.version = version

        server.host.generator.publish = forgets
        await g.publish(weights_of(make(seed=2)), 2)
        with pytest.raises(GeneratorLost, match=r"other weights than version 2.*write --mismatch-tolerance"):
            await g.open(1).generate([1, 2], SAMPLING)

    with served(make(seed=3)) as server:
        run(play(server))
    assert "lost the generator" in heard[0] and "none is left" in heard[0]


def test_a_probe_that_names_other_weights_is_not_a_matter_of_tolerance():
    model = make(seed=1)

    async def play(server):
        g = await connected([server.url], model)
        sample = g.replicas[0].sample

        async def mislabelled(*words):
            part = await sample(*words)
            return replace(part, versions=("7",) * len(part.versions))

        g.replicas[0].sample = mislabelled
        await g.publish(weights_of(model), 1)
        return str(g.fatal)

    with served(make(seed=3)) as server:
        told = run(play(server))
    assert "other weights than version 1: a probe says that weights ['7'] sampled" in told
    assert "--mismatch-tolerance" not in told


def test_a_damaged_file_of_weights_is_refused_and_the_weights_stay(tmp_path):
    folder = WeightFolder(str(tmp_path))
    file = folder.write({"a": torch.ones(3), "b": torch.zeros(2)}, 1)
    tensors, digest = read_weights(file.as_dict())
    assert digest == file.sha256 and tensors["a"].tolist() == [1, 1, 1]
    path = tmp_path / folder.path.name / "weights-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(StoreError, match="it was changed or cut"):
        read_weights(file.as_dict())
    with pytest.raises(SettingError, match="no file of weights"):
        read_weights({"path": "/etc/passwd", "sha256": ""})
    for version in range(2, 6):
        folder.write({"a": torch.ones(3)}, version)
    assert sorted(p.name for p in folder.path.iterdir()) == ["weights-4.safetensors", "weights-5.safetensors"]
    folder.close()
    assert not folder.path.exists()


def test_tied_weights_are_written_once_for_each_name(tmp_path):
    shared = torch.arange(4.0)
    folder = WeightFolder(str(tmp_path))
    tensors, _ = read_weights(folder.write({"a": shared, "b": shared}, 1).as_dict())
    assert tensors["a"].tolist() == tensors["b"].tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------ several servers


@pytest.mark.thorough
def test_two_servers_share_the_dialogues_and_draw_the_same_tokens():
    model, asked = make(seed=3), prompts(6)

    async def play(urls):
        g = await connected(urls, model)
        await g.publish(weights_of(model), 1)
        done = await two_turns(g, asked)
        return [list(p.tokens) for p in done], [replica.answered for replica in g.replicas]

    with served(make(seed=1)) as one, served(make(seed=2)) as two:
        tokens, answered = run(play([one.url, two.url]))
        alone, _ = run(play([one.url]))
    assert tokens == alone
    assert answered == [7, 7]  # 12 requests, and a probe each


class Silent:
    """Stands in front of an application and, once told, answers nothing any more."""

    def __init__(self, app):
        self.app, self.deaf = app, False

    async def __call__(self, scope, receive, send):
        if self.deaf:
            await asyncio.sleep(600)
        await self.app(scope, receive, send)


@pytest.mark.thorough
def test_requests_of_a_hanging_server_are_issued_again_to_the_other():
    model, asked, heard, fronts = make(seed=3), prompts(6), [], []

    def front(app):
        fronts.append(Silent(app))
        return fronts[-1]

    async def play(urls):
        g = await connected(urls, model, tell=heard, seconds=60.0)
        await g.publish(weights_of(model), 1)
        g.replicas[0].seconds = 0.5
        for silent in fronts:
            silent.deaf = True
        done = await two_turns(g, asked)
        return [list(p.tokens) for p in done], g

    with served(make(seed=1), wrap=front) as one, served(make(seed=2)) as two:
        tokens, g = run(play([one.url, two.url]))
        fronts.clear()
    told = f"lost the generator {one.url}: it is dead or hangs: /health: no reply within 0.5 s; its requests go to the other"
    assert heard == [told]
    assert g.stats()["reissued"] == 3
    assert tokens == [list(p.tokens) for p in run(two_turns(generator(model), asked))]


@pytest.mark.thorough
def test_a_server_that_hangs_while_it_is_taken_is_lost():
    fronts = []

    def front(app):
        fronts.append(Silent(app))
        return fronts[-1]

    async def play(url):
        replica = Replica(ServerAddress(url, ""), "test", 60.0)
        await replica.identify()
        replica.seconds, fronts[0].deaf = 0.5, True
        with pytest.raises(ReplicaLost, match="dead or hangs"):
            await asyncio.wait_for(replica.post("/turnwise/v1/attach", {}, 600.0), 60)

    with served(wrap=front) as server:
        run(play(server.url))


def test_a_server_that_dies_and_comes_back_takes_part_again():
    model, asked, heard = make(seed=3), prompts(4), []

    async def play(one, two, again):
        g = await connected([one.url, two.url], model, tell=heard)
        await g.publish(weights_of(model), 1)
        await asyncio.to_thread(one.stop)
        while not one.task.done():
            await asyncio.sleep(0.01)
        await two_turns(g, asked)
        assert [replica.lost == "" for replica in g.replicas] == [False, True]
        with again() as back:
            assert back.url == one.url
            await g.publish(weights_of(model), 2)
            assert len(g.alive()) == 2
            done = await two_turns(g, asked)
        return {v for p in done for v in p.version}, g.replicas[0].version

    with served(make(seed=1)) as one, served(make(seed=2)) as two:
        port = int(one.url.rpartition(":")[2])
        versions, back = run(play(one, two, lambda: served(make(seed=5), port=port)))
    assert versions == {2} and back == 2
    assert "lost the generator" in heard[0] and heard[1] == f"the generator {one.url} is back"


def test_with_no_server_left_a_request_says_which_and_why():
    model = make(seed=3)

    async def play(one):
        g = await connected([one.url], model)
        await g.publish(weights_of(model), 1)
        one.stop()
        while not one.task.done():
            await asyncio.sleep(0.01)
        with pytest.raises(GeneratorLost, match=rf"no generator server is left \({one.url}: .*start one again"):
            await g.open(1).generate([1, 2, 3], SAMPLING)
        await g.publish(weights_of(model), 2)  # the step that was trained is complete: the next request raises
        with pytest.raises(GeneratorLost):
            await g.open(1).generate([1, 2, 3], SAMPLING)

    with served(make(seed=1)) as one:
        run(play(one))


def test_a_run_that_lost_its_server_to_another_neither_publishes_there_nor_takes_it_back(monkeypatch):
    monkeypatch.setattr(policy_host, "SILENT_SECONDS", 0.0)  # it says nothing for too long
    model, other = make(seed=3), make(seed=4)

    async def sample(g):
        session = g.open(1)
        done = await session.generate([1, 2, 3], SAMPLING)
        session.close()
        return list(done.tokens), list(done.logp), list(done.version)

    async def play(contested, own):
        first = await connected([contested, own], model)
        await first.publish(weights_of(model), 1)
        second = await connected([contested], other)
        second.replicas[0].client = "other"
        await second.attach()
        await second.publish(weights_of(other), 2)
        expected = await sample(second)
        for version in (2, 3):  # the first time it does not know yet
            await first.publish(weights_of(model), version)
            assert first.replicas[0].lost == "another run took it over" and not first.replicas[1].lost
        assert set((await sample(first))[2]) == {3}
        assert await sample(second) == expected
        await second.publish(weights_of(other), 3)
        assert second.alive()

    with served(make(seed=1)) as contested, served(make(seed=1)) as own:
        run(play(contested.url, own.url))


# ------------------------------------------------------------------ mistakes


def test_nothing_at_the_address_and_a_wrong_token_are_told_with_what_to_write():
    async def nothing():
        await connected(["http://127.0.0.1:9"])

    with pytest.raises(SettingError, match=r"--generator http://127.0.0.1:9: no connection: .*turnwise serve MODEL"):
        run(nothing())
    with served(token="secret") as server:
        for key, said in (("", "wants a token"), ("wrong", "refuses the token")):
            with pytest.raises(SettingError, match=f"the server {said}; write --generator-key-env"):
                run(connected([server.url], key=key))
        run(connected([server.url], key="secret"))


def test_a_server_with_a_shorter_context_is_refused():
    with served(context=64) as server, pytest.raises(SettingError, match="it reads 64 ids, and the run needs 128"):
        run(connected([server.url]))


def test_a_context_that_is_full_samples_nothing_and_asks_nobody():
    async def play(url):
        g = await connected([url])
        return await g.open(1).generate(list(range(1, 40)) * 4, SAMPLING)

    with served() as server:
        assert run(play(server.url)).stop is Stop.LENGTH


def test_a_stop_string_that_an_abort_cut_in_two_still_ends_the_turn():
    texts = {5: "a", 6: "EN", 7: "D", 8: "z"}

    async def play(url):
        g = await connected([url], decode=lambda ids: "".join(texts[i] for i in ids))
        sampling = Sampling(max_tokens=9, stop=("END",))
        first = Completion([5, 6], [-1.0, -1.0], [0.0, 0.0], [1, 1], Stop.CANCELLED)
        rest = Completion([7, 8, 8], [-2.0] * 3, [0.0] * 3, [2] * 3, Stop.LENGTH)
        return g.open(1)._join(first, rest, sampling)

    with served() as server:
        joined = run(play(server.url))
    assert (list(joined.tokens), joined.stop, list(joined.version)) == ([5, 6, 7], Stop.STRING, [1, 1, 2])
    assert _cut(joined, 1).tokens == [5]
