"""A generator in a process of its own: the tokens and floats of this process, exact versions, and no process left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from support.dialogues import run, two_turns
from support.generators import generator, make
from support.prompting import prompts

from turnwise.core.records import Sampling, Stop
from turnwise.engines.remote import replica, weight_files
from turnwise.engines.remote.generator_process import GeneratorSpec, start_generator
from turnwise.errors import GeneratorLost, RequestRefused, SettingError, StoreError
from turnwise.training.engines import GENERATOR_PROGRAM

SAMPLING = Sampling(max_tokens=12)
LONG = Sampling(max_tokens=100)


class Tokenizer:
    """Decodes ids to letters."""

    def decode(self, ids, **_):
        return "".join(chr(97 + i % 26) for i in ids)


def in_process(model, seconds=30.0, **options):
    limits = {"slots": 4, "context": 128, "stop_ids": (), "deterministic": True, "device": "cpu", "dtype": None}
    spec = GeneratorSpec(**{**limits, "threads": 1, **options})
    return run(start_generator(GENERATOR_PROGRAM, spec, model, Tokenizer(), Tokenizer().decode, seconds))


def process_of(g):
    return g.replicas[0].process


def plain(parts):
    """What was sampled, without its seconds."""
    return [(list(p.tokens), list(p.logp), list(p.mass), list(p.version), p.stop) for p in parts]


def weights_of(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def exists(pid):
    """Whether the process runs. One that ended and that nobody has waited for yet does not."""
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
    return bool(state) and not state.startswith("Z")


@pytest.fixture
def own():
    """A generator over one small model, closed at the end."""
    g = in_process(make(seed=3), deterministic=False)
    yield g
    g.close()
    assert not exists(process_of(g))


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SAMPLING, id="whole"),
        pytest.param(Sampling(temperature=0.7, top_k=9, top_p=0.9, max_tokens=10), id="cut", marks=pytest.mark.thorough),
        pytest.param(Sampling(max_tokens=9, stop=("ab", "c")), id="stop strings", marks=pytest.mark.thorough),
    ],
)
def test_tokens_and_floats_equal_those_of_this_process_bit_for_bit(sampling):
    model, asked = make(seed=3), prompts(7)

    async def sampled(g):
        await g.publish(weights_of(make(seed=4)), 5)
        return await two_turns(g, asked, sampling)

    g = in_process(model)
    try:
        there = run(sampled(g))
    finally:
        g.close()
    here = run(sampled(generator(model, Tokenizer().decode, threads=1)))
    assert plain(there) == plain(here) and {v for part in there for v in part.version} == {5}


def test_a_request_survives_a_publication_and_every_token_has_its_version(own):
    async def work():
        await own.publish(weights_of(make(seed=1)), 1)
        task = asyncio.ensure_future(own.open(7).generate([1, 2, 3], LONG))
        for version in (2, 3, 4):
            await asyncio.sleep(0.01)
            await own.publish(weights_of(make(seed=2)), version)
        return await task

    done = run(work())
    assert len(done.tokens) == len(done.version) == 100 and sorted(done.version) == list(done.version)
    assert own.version == 4


def test_cancel_returns_the_tokens_so_far_and_a_cancelled_caller_frees_the_dialogue(own):
    async def work():
        session = own.open(1)
        task = asyncio.ensure_future(session.generate([1, 2], LONG))
        await asyncio.sleep(0.05)
        session.cancel()
        cut = await task
        again = asyncio.ensure_future(session.generate([1, 2], LONG))
        await asyncio.sleep(0.05)
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)
        return cut, await session.generate([1, 2], SAMPLING)

    cut, after = run(work())
    assert cut.stop in (Stop.CANCELLED, Stop.LENGTH) and len(after.tokens) == 12


def test_misuse_is_refused_in_words(own):
    async def work():
        session = own.open(1)
        task = asyncio.ensure_future(session.generate([1, 2], LONG))
        await asyncio.sleep(0)
        with pytest.raises(SettingError, match="already generating"):
            await session.generate([1], LONG)
        await task
        with pytest.raises(RequestRefused, match="at least one token id"):
            await session.generate([], LONG)
        session.close()
        with pytest.raises(SettingError, match="was closed"):
            await session.generate([1], LONG)

    run(work())
    assert (own.stats()["tokens"], own.stats()["open"]) == (100.0, 0.0)


@pytest.mark.slow
def test_parking_and_cancelling_a_closed_dialogue_does_nothing(own):
    async def work():
        session = own.open(1)
        session.close()
        session.park()
        session.cancel()
        return await own.open(2).generate([1, 2], SAMPLING)

    assert len(run(work()).tokens) == 12


@pytest.mark.slow
def test_a_killed_process_is_named_and_nothing_waits_for_it(own):
    async def work():
        os.kill(process_of(own), signal.SIGSTOP)  # so that no request ends before the kill
        tasks = [asyncio.ensure_future(own.open(n).generate([1, 2], LONG)) for n in range(8)]
        await asyncio.sleep(0.02)
        os.kill(process_of(own), signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await own.publish(weights_of(make()), 9)  # the step that was trained is complete
        return results

    lost = [r for r in run(work()) if isinstance(r, GeneratorLost)]
    assert lost and str(own.fatal) == "the generator process was ended by SIGKILL"


@pytest.mark.slow
def test_a_stopped_process_is_given_up_after_its_time(monkeypatch):
    monkeypatch.setattr(replica, "HEALTH_SECONDS", 0.1)
    g = in_process(make(), seconds=0.5)

    async def work():
        os.kill(process_of(g), signal.SIGSTOP)
        with pytest.raises(GeneratorLost, match=r"it is dead or hangs: /health: no reply within 0\.5 s"):
            await g.open(1).generate([1, 2], SAMPLING)

    run(work())
    assert not exists(process_of(g))


@pytest.mark.slow
def test_a_stopped_process_is_given_up_when_a_message_does_not_fit_its_pipe():
    g = in_process(make(), seconds=0.5)

    async def work():
        os.kill(process_of(g), signal.SIGSTOP)
        with pytest.raises(
            replica.ReplicaLost, match=r"has read nothing for 0 s: it is stopped or stuck|no reply within"
        ):
            await asyncio.gather(
                *(g.replicas[0].post("/abort_requests", {"x": "x" * 20_000}, None) for _ in range(200))
            )

    run(work())
    assert not exists(process_of(g))


@pytest.mark.slow
def test_a_run_that_stood_still_itself_does_not_give_its_generator_up(own):
    """Seconds in which this event loop slept are not the process's: its answer may wait to be read."""

    async def work():
        call = asyncio.ensure_future(own.replicas[0].pool.call("/health", None, 0.6))
        await asyncio.sleep(0)
        time.sleep(1.0)
        return await call

    assert run(work()).status == 200


def test_weights_go_to_the_temporary_folder_where_shared_memory_is_too_small(tmp_path, monkeypatch):
    """Their room is taken at once: a sparse file would end the process by SIGBUS at the first page that cannot be had."""
    shared, temporary = folders = [tmp_path / "shm", tmp_path / "tmp"]
    tensors, full, reserve = {"a": torch.arange(5.0), "b": torch.ones(2, 3)}, {shared}, weight_files.reserve
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(weight_files, "SHARED_MEMORY", shared)
    monkeypatch.setattr(weight_files.tempfile, "tempdir", str(temporary))

    def refuse(path, size):
        assert size == 44
        if path.parent.parent in full:
            raise OSError(28, "No space left on device")
        reserve(path, size)
        assert path.stat().st_size == size

    monkeypatch.setattr(weight_files, "reserve", refuse)
    folder = weight_files.WeightFolder()
    assert folder.path.parent == shared
    file = folder.write(tensors, 1)
    assert file.path.startswith(str(temporary)) and not any(shared.rglob("*.safetensors"))
    received, _ = weight_files.read_weights(file.as_dict())
    assert all(torch.equal(tensors[n], t) for n, t in received.items())
    full.add(temporary)
    with pytest.raises(StoreError, match=r"No space left.*--shm-size"):
        folder.write(tensors, 2)
    del folder
    gc.collect()
    assert not any(path for folder in folders for path in folder.iterdir())


def test_only_files_of_dead_processes_of_this_machine_are_removed(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    own = weight_files.owned_prefix("weights-")
    of_the_dead = own.replace(f"-{os.getpid()}-", f"-{gone.pid}-")
    elsewhere = "weights-" + "0" * 12 + f"-{gone.pid}-"
    for prefix in (own, of_the_dead, elsewhere):
        (tmp_path / f"{prefix}file").write_text("")
        (tmp_path / f"{prefix}folder").mkdir()
    (tmp_path / "weights-of-mine").write_text("")
    weight_files.remove_orphans(tmp_path, "weights-")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"{p}{what}" for p in (own, elsewhere) for what in ("file", "folder")} | {"weights-of-mine"}


@pytest.mark.slow
def test_a_model_that_cannot_be_served_is_refused_and_leaves_no_process():
    with pytest.raises(SettingError, match="context=3"):
        in_process(make(), context=3)


@pytest.mark.slow
def test_the_process_ends_when_its_run_is_killed(tmp_path):
    """The pipe closes with the run, however it ends."""
    code = (
        "import sys, time; sys.path[:0] = {path!r}\n"
        "from test_process_generator import in_process, make, process_of\n"
        "g = in_process(make()); print(process_of(g), flush=True); time.sleep(60)\n"
    )
    here = [os.path.dirname(__file__), *filter(None, sys.path)]
    child = subprocess.Popen([sys.executable, "-c", code.format(path=here)], stdout=subprocess.PIPE, text=True)
    pid = int(child.stdout.readline())
    child.kill()
    child.wait()
    until = time.monotonic() + 10
    while exists(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not exists(pid)
