"""Weights by NCCL and CUDA IPC: vLLM's trainer side gets the weights and the server's routes, and a refusal ends what waits for
it. Both sides are stand-ins; no GPU ran here. With vLLM installed, its signatures are compared with those that are relied on."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys

import pytest
import torch
from support.dialogues import run, two_turns
from support.generators import generator, make
from support.prompting import prompts

from turnwise.engines.remote import device_weights
from turnwise.engines.remote.device_weights import DeviceWeights, check_device_weights, cuda_device, is_this_machine
from turnwise.engines.remote.http import ServerAddress
from turnwise.engines.remote.replica import Replica, start_options
from turnwise.errors import SettingError

kit = pytest.importorskip("support.generator_servers")
fakes = pytest.importorskip("support.fake_weight_transfer")

URL = "http://127.0.0.1:1"


@pytest.fixture
def wire(monkeypatch):
    shared = fakes.Wire()
    fakes.install(monkeypatch, shared)
    yield shared
    shared.released.set()  # threads that wait for a server end with the test


async def attached(urls, model, backend, heard=None, key=""):
    from turnwise.engines.remote.remote_generator import PolicyProbe, RemoteGenerator
    from turnwise.engines.remote.weight_files import WeightFolder

    turn, cpu = asyncio.Lock(), torch.device("cpu")
    replicas = [Replica(ServerAddress(url, key), "test", 20.0, backend) for url in urls]
    probe = PolicyProbe(model, model.config.vocab_size, 1e-3)
    g = RemoteGenerator(replicas, kit.LIMITS, WeightFolder(), probe, str, (heard if heard is not None else []).append)
    for replica in replicas:
        replica.device_weights = DeviceWeights(backend, cpu, turn)
        await replica.identify()
    await g.attach()
    return g


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_each_version_goes_through_vllms_trainer_side_and_no_file_is_written(wire, backend):
    """The tokens are those of a generator in this process with the same weights: the server samples with what was sent."""
    models, asked = {1: make(seed=3), 2: make(seed=4), 3: make(seed=3)}, prompts(3)
    fake = fakes.FakeVllmServer(wire, backend)

    async def play(url):
        g, out = await attached([url], models[1], backend, key="secret"), []
        for version, model in models.items():
            await g.publish(kit.weights_of(model), version)
            assert g.fatal is None and g.replicas[0].version == version
            parts = await two_turns(g, asked)
            assert {v for part in parts for v in part.version} == {version}
            out.append([list(part.tokens) for part in parts])
        return out, g.publisher.written, list(g.publisher.folder.path.iterdir())

    async def here(model):
        g = generator(model)
        await g.publish(kit.weights_of(model), 1)
        return [list(part.tokens) for part in await two_turns(g, asked)]

    with kit.served(make(seed=1), wrap=fake.wrap, token="secret") as server:
        out, written, files = run(play(server.url))
    assert out == [run(here(model)) for model in models.values()] and out[0] != out[1]
    assert (written, files) == (0, [])
    update = ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]
    begin = ["v1/load_lora_adapter", "shutdown_weight_transfer_engine", "init_weight_transfer_engine"]
    assert fake.calls == begin + 3 * update
    for model, told in zip(models.values(), fake.told, strict=True):
        assert {n: t.tolist() for n, t in told.items()} == {n: t.tolist() for n, t in kit.weights_of(model).items()}


def test_every_server_has_a_group_of_its_own_and_one_that_is_lost_leaves_the_others(wire):
    model, heard = make(seed=3), []
    one, two = fakes.FakeVllmServer(wire, "nccl", workers=2), fakes.FakeVllmServer(wire, "nccl")

    async def play(urls):
        g = await attached(urls, model, "nccl", heard)
        one.refuses = "/update_weights"
        await g.publish(kit.weights_of(model), 1)
        assert [bool(replica.lost) for replica in g.replicas] == [True, False]
        one.refuses = ""
        await g.publish(kit.weights_of(make(seed=4)), 2)
        return [replica.version for replica in g.alive()]

    with kit.served(make(seed=1), wrap=one.wrap) as first, kit.served(make(seed=2), wrap=two.wrap) as second:
        assert run(play([first.url, second.url])) == [2, 2]
        url = first.url
    lost = "it answers /update_weights with 500: the worker ran out of memory"
    assert heard == [
        f"lost the generator {url}: {lost}; its requests go to the other",
        f"the generator {url} is back",
    ]
    assert len(wire.groups) == 3  # two at first, and a new one for the server that came back
    assert wire.closed == ["nccl"]


@pytest.mark.parametrize(("asked", "started"), [("nccl", "ipc"), ("ipc", "nccl")])
def test_a_server_that_was_started_for_another_way_is_refused_with_its_words(wire, asked, started):
    """vLLM's trainer side would wait minutes for the server to join; the refusal does not."""
    model, fake = make(seed=3), fakes.FakeVllmServer(wire, started)
    with kit.served(make(seed=1), wrap=fake.wrap) as server, pytest.raises(SettingError) as refused:
        run(attached([server.url], model, asked))
    text = str(refused.value)
    assert not wire.released.is_set()
    assert f"it answers /init_weight_transfer_engine with 500: Invalid init_info for the engine of {started}" in text
    assert text.endswith(f"start vLLM with {start_options(asked)}")
    assert f'--weight-transfer-config \'{{"backend": "{asked}"}}\'' in text
    assert ("VLLM_ALLOW_INSECURE_SERIALIZATION=1" in text) == (asked == "ipc")


def test_a_server_that_was_started_for_files_says_so_without_device_weights(wire):
    """The same words for a run that sends files to a server that waits for NCCL."""
    fake = fakes.FakeVllmServer(wire, "nccl")
    with kit.served(make(seed=1), wrap=fake.wrap) as server, pytest.raises(SettingError) as refused:
        run(kit.connected([server.url], make(seed=3)))
    assert "Invalid init_info" in str(refused.value) and '{"backend": "turnwise_file"}' in str(refused.value)


def test_a_fault_of_vllms_trainer_side_is_told(wire, monkeypatch):
    def broken(self):
        raise RuntimeError("NCCL error: unhandled system error")

    model, heard, fake = make(seed=3), [], fakes.FakeVllmServer(wire, "nccl")
    monkeypatch.setattr(fakes.NcclEngine, "send_weights", broken)

    async def play(url):
        g = await attached([url], model, "nccl", heard)
        await g.publish(kit.weights_of(model), 1)
        return str(g.fatal)

    with kit.served(make(seed=1), wrap=fake.wrap) as server:
        fatal = run(play(server.url))
    assert "vLLM's trainer side cannot send weights by nccl: NCCL error: unhandled system error" in fatal
    assert wire.closed == ["nccl"]


def test_ipc_is_refused_to_a_server_on_several_gpus(wire):
    fake = fakes.FakeVllmServer(wire, "ipc", workers=2)
    told = r"computes on 2 GPUs.*--generator-weights nccl"
    with kit.served(make(seed=1), wrap=fake.wrap) as server, pytest.raises(SettingError, match=told):
        run(attached([server.url], make(seed=3), "ipc"))


def test_a_server_of_ours_takes_files_alone(wire):
    told = r"is `turnwise serve`, which takes weights as files.*write a folder"
    with kit.served(make(seed=1)) as server, pytest.raises(SettingError, match=told):
        run(attached([server.url], make(seed=3), "nccl"))


def test_adapters_that_vllm_loads_by_name_still_go_as_a_folder(wire):
    """Such a server has no other way to adapters, so nothing is sent from GPU to GPU."""
    pytest.importorskip("peft")
    from support.adapted import adapted_model, turn
    from support.fake_vllm import FakeVllm

    model, fake = adapted_model(), FakeVllm(lambda: make(seed=3))

    async def play(url):
        g = await attached([url], make(seed=3), "nccl")
        await g.publish(turn(model, 1), 1)
        return g.fatal, g.replicas[0].version

    with kit.served(make(seed=1), wrap=lambda app: fake.app) as server:
        assert run(play(server.url)) == (None, 1)
    assert [kind for kind, _ in fake.calls] == ["load"] and not wire.groups


# ------------------------------------------------------------------ refused at once


def refused(monkeypatch, backend="nccl", urls=(URL,), ranks=1, on_gpu=True, vllm=True):
    found = object() if vllm else None
    monkeypatch.setattr(device_weights.importlib.util, "find_spec", lambda name: found)
    check_device_weights(backend, urls, ranks, on_gpu)


def test_what_can_work_passes(monkeypatch):
    refused(monkeypatch)
    refused(monkeypatch, "nccl", ("http://192.0.2.7:8000",), ranks=2)
    refused(monkeypatch, "ipc")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"urls": ()}, r"reaches servers of vLLM; write --generator .*--generator-weights ./nccl for a folder"),
        ({"on_gpu": False}, r"this run learns on a CPU; write --generator-weights FOLDER"),
        ({"vllm": False}, r"cannot be imported here \(no package vllm\); install vllm 0.32 in this environment"),
        (
            {"backend": "ipc", "ranks": 2},
            r"needs one learner process, and --ranks is 2; write --generator-weights nccl",
        ),
        ({"backend": "ipc", "urls": ("http://192.0.2.7:8000",)}, r"192.0.2.7:8000 is on another machine; write"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write(monkeypatch, change, told):
    with pytest.raises(SettingError, match=told):
        refused(monkeypatch, **change)


def test_an_old_vllm_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import of it raises
    with pytest.raises(SettingError, match=r"install vllm 0\.32"):
        DeviceWeights("nccl", torch.device("cpu"), asyncio.Lock())._vllm("127.0.0.1", 1)


def test_a_learner_on_the_cpu_is_refused():
    with pytest.raises(SettingError, match="learns on a CPU"):
        cuda_device("ipc", "cpu")


def test_addresses_of_this_machine():
    assert is_this_machine(URL) and is_this_machine("http://localhost:8000")
    assert not is_this_machine("http://192.0.2.7:8000")  # a network for documentation
    assert device_weights.own_address(URL) == "127.0.0.1"


# ------------------------------------------------------------------ the real names


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_has_the_names_and_signatures_that_are_relied_on():
    from vllm.distributed.weight_transfer import (
        ParamMeta,
        TrainerWeightTransferEngine,
        VLLMWeightSyncClient,
        WeightSource,
        WeightTransferTrainerFactory,
    )
    from vllm.distributed.weight_transfer.clients import _json_safe_update_info
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCWeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(WeightTransferTrainerFactory.trainer_init) == ["init_info", "client", "source"]
    assert names(TrainerWeightTransferEngine.send_weights) == ["self"]
    assert names(TrainerWeightTransferEngine.shutdown) == ["self"]
    assert names(ParamMeta) == names(fakes.ParamMeta) == ["name", "dtype", "shape"]
    assert WeightSource.__abstractmethods__ == {"metadata", "__iter__"}
    assert names(NCCLTrainerInitInfo) == names(fakes.NCCLTrainerInitInfo)
    assert names(IPCTrainerInitInfo) == names(fakes.IPCTrainerInitInfo)
    assert (NCCLTrainerInitInfo.backend, IPCTrainerInitInfo.backend) == ("nccl", "ipc")
    assert {"nccl", "ipc"} <= WeightTransferTrainerFactory._registry.keys()
    routes = device_weights._Routes(Replica(ServerAddress(URL), "test", 1.0))
    assert isinstance(routes, VLLMWeightSyncClient)
    for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        assert names(getattr(VLLMWeightSyncClient, name)) == names(getattr(device_weights._Routes, name))
    update = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]], "ipc_handles": [{"GPU-0": (1, b"\xff")}]}
    assert device_weights._as_json(update) == _json_safe_update_info(update)
    assert set(device_weights._as_json(update)) <= set(names(IPCWeightTransferUpdateInfo))
    info, source = DeviceWeights("nccl", torch.device("cpu"), asyncio.Lock())._vllm("127.0.0.1", 2)[2:0:-1]
    assert (info.world_size, info.rank, info.is_sender, info.packed) == (3, 0, True, True)
    assert source.metadata() == [] and list(source) == [] and source.held_names() is None
