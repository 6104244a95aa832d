"""``turnwise push``: what is uploaded, and what is refused. The hub is a stub."""

from __future__ import annotations

import json

import huggingface_hub
import pytest

from turnwise.cli.main import main
from turnwise.config.settings import Settings
from turnwise.models.tiny import tiny_model, tiny_tokenizer
from turnwise.store.checkpoint import save_model
from turnwise.store.rundir import RunDir
from turnwise.training.summary import base_licence, card, write_cards

EVALUATION = {"success": 0.25, "interval": [0.1, 0.4], "tasks": 8}
SUMMARY = {
    "steps": 2, "seed": 0, "tokens": 100, "measured": "held-out tasks",
    "success_before": EVALUATION, "success_after": {**EVALUATION, "success": 0.5, "reward": None},
}  # fmt: skip


class StubHub:
    def __init__(self) -> None:
        self.calls: list[tuple[str, dict]] = []

    def __call__(self) -> StubHub:
        return self

    def create_repo(self, name: str, **options) -> None:
        self.calls.append((name, options))

    def upload_folder(self, **options) -> None:
        self.calls.append((options.pop("repo_id"), options))


@pytest.fixture
def hub(monkeypatch) -> StubHub:
    stub = StubHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", stub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    return stub


@pytest.fixture
def run(tmp_path) -> RunDir:
    run_dir = RunDir.create(tmp_path, "done", Settings(method="grpo", steps=2).as_dict())
    model, tokenizer = tiny_model(300, 0, hidden=32, layers=1), tiny_tokenizer(["one two"], 300)
    save_model(run_dir.model, lambda path: (model.save_pretrained(path), tokenizer.save_pretrained(path)))
    run_dir.write_summary(SUMMARY)
    return run_dir


def test_the_model_is_uploaded_with_its_card(run, hub, capsys):
    assert main(["push", str(run.path), "me/agent", "--private"]) == 0
    (name, created), (target, upload) = hub.calls
    assert name == target == "me/agent" and created["private"]
    assert upload["folder_path"] == str(run.model) and "manifest.json" in upload["ignore_patterns"]
    text = (run.model / "README.md").read_text()
    assert 'from_pretrained("me/agent")' in text and "0.250 [0.100, 0.400] | 0.500" in text and "2402.03300" in text
    assert "me/agent" in capsys.readouterr().out


def test_a_dry_run_writes_the_folder_and_uploads_nothing(run, hub, tmp_path, capsys):
    target = tmp_path / "shown"
    assert main(["push", str(run.path), "me/agent", "--dry-run", str(target)]) == 0
    assert not hub.calls and (target / "README.md").is_file() and (target / "model.safetensors").is_file()
    assert not (target / "manifest.json").exists()
    assert main(["push", str(run.path), "me/agent", "--dry-run", str(target)]) == 2
    assert "already exists" in capsys.readouterr().err


def test_an_adapter_comes_first_where_there_is_one(run, hub):
    def write(path):
        (path / "adapter_config.json").write_text("{}")

    save_model(run.path / "adapter", write)
    assert main(["push", str(run.path), "me/agent"]) == 0 and hub.calls[-1][1]["folder_path"].endswith("adapter")
    assert "library_name: peft" in (run.path / "adapter" / "README.md").read_text()
    assert main(["push", str(run.path), "me/agent", "--part", "model"]) == 0
    assert hub.calls[-1][1]["folder_path"] == str(run.model)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["agent"], "owner/name"),
        (["me/"], "owner/name"),
        (["me/agent", "--part", "adapter"], "no adapter"),
        (["me/agent", "--part", "half"], "no part"),
    ],
)
def test_wrong_use_is_refused(run, hub, capsys, arguments, said):
    assert main(["push", str(run.path), *arguments]) == 2
    assert said in capsys.readouterr().err and not hub.calls


def test_without_a_token(run, hub, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(["push", str(run.path), "me/agent"]) == 2
    assert "needs a token" in capsys.readouterr().err and not hub.calls


def test_an_unfinished_or_damaged_run(run, hub, capsys):
    weights = run.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["push", str(run.path), "me/agent"]) == 2 and "checksum" in capsys.readouterr().err
    run.summary.unlink()
    assert main(["push", str(run.path), "me/agent"]) == 2 and "not finished" in capsys.readouterr().err
    assert not hub.calls


def test_a_hub_that_refuses(run, hub, monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError("403 forbidden\nmore")

    monkeypatch.setattr(hub, "create_repo", fail, raising=False)
    assert main(["push", str(run.path), "me/agent"]) == 2
    assert "did not accept me/agent: 403 forbidden" in capsys.readouterr().err


def test_the_licence_of_the_base_model(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    assert base_licence(str(tmp_path)) == "apache-2.0" and base_licence("tiny") == ""
    assert base_licence("smollm2") == "apache-2.0"
    text = card(Settings(model=str(tmp_path)), SUMMARY, tmp_path)
    assert "license: apache-2.0" in text and "not known here" not in text
    assert "not known here" in card(Settings(model="a/b"), SUMMARY, tmp_path / "none")


def test_a_card_of_a_recipe_of_ones_own_and_hostile_names(run):
    settings = Settings(method="own", env="a:b\n# forged")
    write_cards(run, settings, json.loads(run.summary.read_text()))
    assert "\n# forged" not in (run.model / "README.md").read_text()
