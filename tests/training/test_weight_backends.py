"""``--generator-weights``: a folder, or the name of a way from GPU to GPU, which is refused before a run starts where it cannot
work."""

from __future__ import annotations

import pytest

from turnwise.config.settings import Settings
from turnwise.engines.remote import device_weights
from turnwise.errors import SettingError
from turnwise.training.remote_generators import check_generators, make_replicas, weight_backend

URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("written", "backend"),
    [
        ("", "turnwise_file"),
        ("/shared/nccl", "turnwise_file"),
        ("./nccl", "turnwise_file"),
        ("nccl", "nccl"),
        ("ipc", "ipc"),
    ],
)
def test_a_folder_of_such_a_name_is_written_with_its_path(written, backend):
    settings = Settings(generator=(URL,), generator_weights=written)
    assert weight_backend(settings) == backend
    assert [replica.backend for replica in make_replicas(settings)] == [backend]


@pytest.mark.parametrize(
    ("settings", "on_gpu", "told"),
    [
        (Settings(generator=(URL,), generator_weights="nccl"), False, "this run learns on a CPU"),
        (Settings(generator_weights="nccl"), True, "reaches servers of vLLM; write --generator"),
        (Settings(generator=("local",), generator_weights="ipc"), True, "reaches servers of vLLM; write --generator"),
        (Settings(cluster="local", generator_weights="nccl"), True, "reaches servers of vLLM; write --generator"),
        (Settings(generator=(URL,), generator_weights="ipc", ranks=2), True, "--ranks is 2"),
        (Settings(generator_weights="weights"), False, "a folder for servers, and --generator names none"),
        (Settings(generator=("local",), generator_weights="weights"), False, "a folder for servers"),
        (Settings(generator=(URL,), generator_weights="nccl"), True, f"{URL}: no connection"),  # the next check
    ],
)
def test_a_way_that_cannot_work_is_refused_at_once(monkeypatch, settings, on_gpu, told):
    monkeypatch.setattr(device_weights.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(SettingError, match=told):
        check_generators(settings, on_gpu)


def test_a_server_of_ours_is_refused_at_once(monkeypatch):
    kit = pytest.importorskip("support.generator_servers")
    monkeypatch.setattr(device_weights.importlib.util, "find_spec", lambda name: object())
    with kit.served() as server, pytest.raises(SettingError, match="is `turnwise serve`, which takes weights as files"):
        check_generators(Settings(generator=(server.url,), generator_weights="nccl"), on_gpu=True)
