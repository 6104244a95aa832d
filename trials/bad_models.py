"""Bad model folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trials import fixtures
from trials.cases import Case

MARKER = "strangers-code-ran"


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _cut(name: str, share: float) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: int(len(content) * share)])

    return change


def _write(name: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda model: (
        (model / name).write_bytes(content if isinstance(content, bytes) else content.encode()) and None
    )


def _remove(*names: str) -> Callable[[Path], None]:
    return lambda model: [(model / name).unlink(missing_ok=True) for name in names] and None


def _template(text: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": text}))
        (model / "chat_template.jinja").unlink(missing_ok=True)

    return change


def _strangers_code(model: Path) -> None:
    code = (
        f"open({str(model.parent / MARKER)!r}, 'w').close()\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
    )
    code += "class C(LlamaConfig):\n    model_type = 'strange'\nclass M(LlamaForCausalLM):\n    config_class = C\n"
    (model / "modeling_strange.py").write_text(code)
    names = {"AutoConfig": "modeling_strange.C", "AutoModelForCausalLM": "modeling_strange.M"}
    _config(model_type="strange", architectures=["M"], auto_map=names)(model)


def _nan_weights(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    next(iter(tensors.values())).fill_(float("nan"))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def _pickle(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")


BROKEN: dict[str, Callable[[Path], None]] = {
    "empty folder": lambda model: shutil.rmtree(model) or model.mkdir(),
    "no config": _remove("config.json"),
    "config is not JSON": _write("config.json", "{"),
    "config is a list": _write("config.json", "[]"),
    "config is empty": _write("config.json", ""),
    "config of another architecture": _config(model_type="unheard_of", architectures=["Unheard"]),
    "config without a type": _write("config.json", "{}"),
    "config of a vision model": _config(model_type="vit", architectures=["ViTModel"]),
    "config of an encoder": _config(model_type="bert", architectures=["BertModel"]),
    "wrong width": _config(hidden_size=48),
    "wrong layers": _config(num_hidden_layers=3),
    "text for a width": _config(hidden_size="wide"),
    "negative width": _config(hidden_size=-32),
    "smaller vocabulary": _config(vocab_size=17),
    "no weights": _remove("model.safetensors"),
    "weights cut in half": _cut("model.safetensors", 0.5),
    "weights cut to a header": _cut("model.safetensors", 0.01),
    "weights of zero bytes": _write("model.safetensors", b""),
    "weights are text": _write("model.safetensors", "hello"),
    "weights with a huge header": _write("model.safetensors", b"\xff" * 64),
    "weights of NaN": _nan_weights,
    "a pickle instead": _pickle,
    "no tokenizer": _remove("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    "tokenizer is not JSON": _write("tokenizer.json", "{"),
    "tokenizer cut in half": _cut("tokenizer.json", 0.5),
    "no chat template": _template(""),
    "template does not compile": _template("{% for m in messages %}"),
    "template raises": _template("{{ raise_exception('no') }}"),
    "template ignores messages": _template("hello"),
    "template loops": _template("{% for i in range(100000000) %}x{% endfor %}"),
    "template reaches for internals": _template("{{ messages.__class__.__mro__ }}"),
    "template ignores the assistant": _template("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"),
    "a stranger's code": _strangers_code,
}  # fmt: skip
PLACES = {
    "a path that is not there": "./nowhere",
    "a file": "/etc/hostname",
    "a hub id that is not there": "nobody/nothing-at-all",
    "a name with odd characters": "\x1b[31m../x",
    "an empty name": "",
    "a URL": "https://localhost:1/model",
}


def cases() -> Iterator[Case]:
    argv = ["train", "grpo", "--dry-run", "--env", "guess", "--difficulty", "1", "--groups", "2", "--group-size", "2"]
    argv += ["--max-tokens", "4", "--context", "100", "--eval-tasks", "2"]
    for name, change in BROKEN.items():
        yield Case("models", name, [*argv, "--model", "model"], "refused", _prepare(change))
    for name, place in PLACES.items():
        yield Case("models", name, [*argv, f"--model={place}"], "either" if not place else "refused")


def _prepare(change: Callable[[Path], None]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        shutil.copytree(fixtures.model(), folder / "model")
        change(folder / "model")

    return prepare
