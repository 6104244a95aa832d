"""Runs whose generator is behind HTTP: the same weights bit for bit, and what a user reads when servers fail."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from support.generator_servers import served

from turnwise.config.settings import Settings
from turnwise.errors import ServerFault, SettingError
from turnwise.store.ledger import SqliteLedger
from turnwise.training import api
from turnwise.training.remote_generators import check_generators
from turnwise.training.serve import make_policy_host

pytestmark = pytest.mark.thorough

SMALL = {
    "env": "guess", "difficulty": (1,), "steps": 3, "groups": 2, "group_size": 3, "max_tokens": 12, "context": 160,
    "eval_tasks": 4, "checkpoint_every": 2, "trackers": (), "threads": 1,
}  # fmt: skip
TINY = {"hidden": 32, "layers": 1, "vocabulary": 320}
COLD = {**TINY, "cold_steps": 4, "cold_batch": 8, "steps": 1, "eval_tasks": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model in a folder."""
    out = tmp_path_factory.mktemp("model")
    api.train(quiet=True, out=str(out), name="run", **{**SMALL, **COLD})
    return str(out / "run" / "initial")


def server_of(model, wrap=lambda app: app, port=0):
    """The server that ``turnwise serve MODEL`` starts."""
    settings = Settings(model=model, context=160, threads=1)
    return served(own_host=lambda: make_policy_host(settings, None, model, True), wrap=wrap, port=port)


def digest(run):
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def local(model, tmp_path_factory):
    """The weights that a run without a server ends with."""
    out = tmp_path_factory.mktemp("local")
    api.train(quiet=True, out=str(out), name="run", model=model, **SMALL)
    return digest(out / "run")


def test_a_run_through_one_server_is_bit_identical_to_one_in_this_process(model, local, tmp_path):
    with server_of(model) as server:
        summary = api.train(quiet=True, out=str(tmp_path), name="run", generator=(server.url,), model=model, **SMALL)
    assert digest(tmp_path / "run") == local
    assert server.url in summary["engines"]["generator"]


def test_a_server_with_pages_is_bit_identical_too_and_must_have_been_started_with_them(model, local, tmp_path):
    values = {**SMALL, "model": f"{model},cache=pages", "out": str(tmp_path), "quiet": True}
    with server_of(model) as server, pytest.raises(SettingError, match=r"start it with turnwise serve .*,cache=pages"):
        api.train(generator=(server.url,), **values)
    with server_of(f"{model},cache=pages") as server:
        summary = api.train(generator=(server.url,), name="run", **values)
    assert digest(tmp_path / "run") == local
    assert "pages of 64 ids" in summary["engines"]["generator"]


class DiesAfter:
    """Ends the server at the n-th request for tokens."""

    def __init__(self, count):
        self.count, self.server = count, None

    def __call__(self, app):
        async def front(scope, receive, send):
            self.count -= scope.get("path") == "/inference/v1/generate"
            if self.count == 0:
                self.server.stop()
            await app(scope, receive, send)

        return front


def test_a_server_that_dies_stops_the_run_with_a_checkpoint_and_resume_ends_with_the_same_weights(
    model, local, tmp_path
):
    death = DiesAfter(25)
    with server_of(model, death) as server:
        death.server = server
        with pytest.raises(ServerFault, match="no generator server is left") as told:
            api.train(quiet=True, out=str(tmp_path), name="run", generator=(server.url,), model=model, **SMALL)
    message = str(told.value)
    assert server.url in message and f"`turnwise resume {tmp_path / 'run'}` continues it" in message
    with server_of(model) as other:
        api.resume(tmp_path / "run", quiet=True, generator=other.url)
    assert digest(tmp_path / "run") == local
    with SqliteLedger(tmp_path / "run" / "ledger.sqlite", readonly=True) as ledger:
        counts = ledger.group_counts()
    assert counts.trained == SMALL["steps"] * SMALL["groups"]


@pytest.fixture(scope="module")
def with_adapters(model, tmp_path_factory):
    """The weights that a LoRA run without a server ends with."""
    pytest.importorskip("peft")
    out = tmp_path_factory.mktemp("adapters")
    api.train(quiet=True, out=str(out), name="run", model=model, **SMALL, lora_rank=4)
    return digest(out / "run")


def test_a_lora_run_through_one_server_is_bit_identical_and_writes_its_base_once(
    model, with_adapters, tmp_path, monkeypatch
):
    from turnwise.engines.remote.weight_files import WeightFolder

    files, write = [], WeightFolder.write

    def recorded(self, *args, **options):
        files.append(write(self, *args, **options))
        return files[-1]

    monkeypatch.setattr(WeightFolder, "write", recorded)
    values = {**SMALL, "lora_rank": 4}
    with server_of(model) as server:
        api.train(quiet=True, out=str(tmp_path), name="run", generator=(server.url,), model=model, **values)
    assert digest(tmp_path / "run") == with_adapters
    kinds = [file.kind for file in files]
    assert kinds.count("base") == 1 and set(kinds) == {"base", "adapters"} and kinds.count("adapters") >= SMALL["steps"]
    factors = (tmp_path / "run" / "adapter" / "adapter_model.safetensors").stat().st_size
    assert all(abs(file.size - factors) < 4096 for file in files if file.kind == "adapters")


def test_a_lora_run_whose_server_dies_is_resumed_on_another_one_with_the_same_weights(model, with_adapters, tmp_path):
    death, values = DiesAfter(25), {**SMALL, "lora_rank": 4}
    with server_of(model, death) as server:
        death.server = server
        with pytest.raises(ServerFault, match="no generator server is left"):
            api.train(quiet=True, out=str(tmp_path), name="run", generator=(server.url,), model=model, **values)
    with server_of(model) as other:
        api.resume(tmp_path / "run", quiet=True, generator=other.url)
    assert digest(tmp_path / "run") == with_adapters


def test_requests_of_a_server_that_dies_go_to_the_other(model, tmp_path):
    death, heard = DiesAfter(20), []
    with server_of(model, death) as one, server_of(model) as two:
        death.server = one
        api.train(
            lambda name, facts: heard.append(facts.get("text", "")) if name == "message" else None,
            out=str(tmp_path), name="run", generator=(one.url, two.url), model=model, **SMALL,
        )  # fmt: skip
    assert [text for text in heard if text.startswith(f"lost the generator {one.url}: ")]
    with SqliteLedger(tmp_path / "run" / "ledger.sqlite", readonly=True) as ledger:
        counts = ledger.group_counts()
    assert counts.trained == SMALL["steps"] * SMALL["groups"]


def test_stale_rollouts_survive_publications_through_a_server(model, tmp_path):
    values = {**SMALL, "staleness": 2, "steps": 4, "eval_tasks": 0}
    with server_of(model) as server:
        api.train(quiet=True, out=str(tmp_path), name="run", generator=(server.url,), model=model, **values)
    with SqliteLedger(tmp_path / "run" / "ledger.sqlite", readonly=True) as ledger:
        assert ledger.group_counts().trained == values["steps"] * values["groups"]


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"tiny": {"hidden": 48}}, "serves a tiny model with hidden 48, and the run has 32"),
        ({"tiny": {"env": "calculator"}}, "serves a tiny model with env 'calculator', and the run has 'guess'"),
        (
            {"tiny": {"difficulty": [1, 2]}},
            r"with difficulty \[1, 2\], and the run has \[1\]; .*serve tiny --env guess --difficulty 1$",
        ),
        ({}, "which is another model: its weight"),
        ({"tokenizer": "other"}, "whose tokenizer differs from that of tiny: .*turnwise serve tiny --env guess"),
    ],
)
def test_a_server_with_another_tiny_model_is_refused(facts, told, tmp_path):
    with served(context=160, **facts) as server, pytest.raises(SettingError, match=told):
        api.train(quiet=True, out=str(tmp_path), generator=(server.url,), **{**SMALL, **COLD})


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"config": {"hidden_size": 7}}, "with hidden_size 7, and .* has 32; start it with the run's model"),
        ({"tokenizer": "other"}, "whose tokenizer differs from that of"),
    ],
)
def test_a_server_with_another_model_is_refused_before_torch_is_needed(model, facts, told):
    settings = Settings(model=model, generator=())
    with served(**facts) as server, pytest.raises(SettingError, match=told):
        check_generators(replace(settings, generator=(server.url,)))


@pytest.mark.parametrize(
    ("urls", "told"),
    [
        (("http://127.0.0.1:9",), "no connection: Connection refused; start a server there: turnwise serve MODEL"),
        (("localhost:8000",), "write an address such as http://localhost:8000"),
        (("http://127.0.0.1:9", "http://127.0.0.1:9/"), "names http://127.0.0.1:9 twice"),
    ],
)
def test_an_address_without_a_server_is_refused_with_what_to_write(urls, told, tmp_path):
    with pytest.raises(SettingError, match=told):
        api.train(quiet=True, out=str(tmp_path), generator=urls, **SMALL)
    assert not list(tmp_path.iterdir())
