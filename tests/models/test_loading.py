"""Broken model folders and models with code of their own are refused in one sentence; no stranger's code runs unasked."""

from __future__ import annotations

import io
import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from turnwise.cli.main import main
from turnwise.errors import SettingError
from turnwise.models import loading
from turnwise.models.hub import check_model
from turnwise.models.loading import save_lossless
from turnwise.models.tiny import tiny_model, tiny_tokenizer
from turnwise.models.trust import remote_code_is_trusted, trust_remote_code


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "good"
    tiny_model(300, 0, hidden=32, layers=1).save_pretrained(folder)
    tiny_tokenizer(["one two three"], 300).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def refusal(folder, capsys, *more) -> str:
    """What the command says; it must come from the door: no run directory may exist afterwards."""
    out = folder.parent / "runs"
    code = main(["train", "--env", "calculator", "--model", str(folder), "--out", str(out), *more])
    captured = capsys.readouterr()
    assert code == 2 and "Traceback" not in captured.err and not out.exists()
    lines = [line for line in captured.err.splitlines() if line.startswith("turnwise: ")]
    assert len(lines) == 1
    return lines[0]


def test_truncated_weights(folder, capsys):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cut off or damaged" in refusal(folder, capsys)


def test_a_file_of_nothing_but_zeros(folder, capsys):
    (folder / "model.safetensors").write_bytes(bytes(64))
    assert "cut off or damaged" in refusal(folder, capsys)


def test_a_missing_shard(folder, capsys):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors is missing" in refusal(folder, capsys)


def test_an_unreadable_index(folder, capsys):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{")
    assert "cannot be read" in refusal(folder, capsys)


def test_no_weights(folder, capsys):
    (folder / "model.safetensors").unlink()
    assert "has no weights" in refusal(folder, capsys)


def test_weights_that_the_config_describes_are_missing(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(SettingError, match=r"lacks 18 weights .* such as model\.layers\.1\.input_layernorm\.weight"):
        loading.load_causal_lm(str(folder))


def test_no_tokenizer(folder, capsys):
    for file in folder.glob("token*"):
        file.unlink()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert "has no tokenizer" in refusal(folder, capsys)


def test_an_unknown_architecture(folder, capsys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    assert "unheard_of" in refusal(folder, capsys)


def test_a_config_that_is_no_json(folder, capsys):
    (folder / "config.json").write_text("{'model_type'")
    assert "no model could be loaded" in refusal(folder, capsys)


# ------------------------------------------------------------------ code of a stranger

CODE = """
import pathlib
pathlib.Path({marker!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM
class StrangeConfig(LlamaConfig):
    model_type = "strange"
class StrangeModel(LlamaForCausalLM):
    config_class = StrangeConfig
"""


@pytest.fixture
def strange(folder, tmp_path, monkeypatch):
    """A folder whose configuration names code that leaves a marker."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = tmp_path / "marker"
    (folder / "strange.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "strange.StrangeConfig", "AutoModelForCausalLM": "strange.StrangeModel"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "strange", "auto_map": auto}))
    return folder, marker


def test_a_strangers_code_does_not_run_even_if_everything_is_answered_with_yes(strange, capsys, monkeypatch):
    folder, marker = strange
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 50))
    assert "--trust-remote-code" in refusal(folder, capsys)
    assert not marker.exists()


@pytest.mark.parametrize("load", [loading.load_config, loading.load_causal_lm])
def test_every_way_to_load_refuses_it(strange, load, monkeypatch):
    folder, marker = strange
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 50))
    with pytest.raises(SettingError, match="--trust-remote-code"):
        load(str(folder))
    assert not marker.exists()


def test_a_tokenizer_with_code_is_refused(strange, monkeypatch):
    folder, marker = strange
    config = json.loads((folder / "tokenizer_config.json").read_text())
    auto = {"auto_map": {"AutoTokenizer": ["strange.StrangeTokenizer", None]}, "tokenizer_class": "StrangeTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **auto}))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 50))
    with pytest.raises(SettingError, match="--trust-remote-code"):
        loading.load_tokenizer(str(folder))
    assert not marker.exists()


def test_with_the_flag_it_runs(strange):
    folder, marker = strange
    with trust_remote_code():
        assert type(loading.load_causal_lm(str(folder))).__name__ == "StrangeModel"
    assert marker.exists() and not remote_code_is_trusted()


def test_the_flag_reaches_the_command_and_ends_with_it(monkeypatch):
    seen = []
    monkeypatch.setitem(
        main.__globals__["FUNCTIONS"], "list", lambda argv: seen.append((argv, remote_code_is_trusted())) or 0
    )
    assert main(["list", "--json", "--trust-remote-code"]) == 0 and main(["list"]) == 0
    assert seen == [(["--json"], True), ([], False)]


# ------------------------------------------------------------------ saving


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_model_is_written_in_the_smallest_dtype_that_loses_nothing(tmp_path, dtype):
    model = tiny_model(300, 0, hidden=32, layers=1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(dtype))
    save_lossless(model, tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    parameters = model.num_parameters()
    assert size < parameters * dtype.itemsize * 1.1 + 4000
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    assert model.dtype == torch.float32
    assert AutoConfig.from_pretrained(tmp_path).tie_word_embeddings


def test_a_good_folder_passes(saved):
    check_model(str(saved))
