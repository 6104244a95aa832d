"""Whether a model's name can be loaded at all, found out in seconds and without importing a model library.

A folder must exist and hold its weights, none of them missing or cut off. A hub id must be in the local cache, or the hub must
answer; the hub's own client would retry for half a minute first. Does not download anything.
"""

from __future__ import annotations

import json
import os
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path

from safetensors import SafetensorError, safe_open

from turnwise.errors import SettingError

HUB_SECONDS = 3.0
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
ON = {"1", "on", "yes", "true"}


def check_model(name: str) -> None:
    """Refuse a folder that does not exist or lacks a part, and a hub id that is neither cached nor reachable."""
    why = ""
    if os.path.isdir(name):
        if (Path(name) / "config.json").is_file():
            check_weights(Path(name))
        else:
            why = "the folder has no config.json"
    # the library would look for it on the hub, for half a minute
    elif is_path(name):
        why = "this is a file, not a folder" if os.path.exists(name) else "there is no such folder"
    elif not HUB_ID.fullmatch(name):
        why = "this is neither a folder nor a hub id"
    elif not is_cached(name):
        offline = {os.environ.get(name, "").lower() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
        if offline & ON:
            why = "it is not in the local cache, and HF_HUB_OFFLINE forbids to download it"
        elif reason := unreachable(hub_address()):
            why = f"it is not in the local cache, and the hub cannot be reached ({reason})"
    if why:
        raise SettingError(no_model(name, why))


def no_model(name: str, why: str) -> str:
    return (
        f"no model could be loaded from {name!r}: {why}; write a folder in Hugging Face layout, "
        "a hub id such as Qwen/Qwen3-0.6B, tiny, or smollm2 (after `turnwise model fetch smollm2`)"
    )


def check_weights(folder: Path) -> None:
    """Refuse a folder whose weights are missing or cut off. Their files are not read."""
    why = ""
    for file in _weight_files(folder):
        if not file.is_file():
            why = f"{file} is missing, and {WEIGHTS[0]}{INDEX} lists it; download the model again"
        elif file.suffix == ".safetensors":
            try:
                with safe_open(file, framework="np"):  # compares the header with the size of the file
                    pass
            except SafetensorError as fault:
                why = f"{file} is cut off or damaged ({fault}); download or copy it again"
        if why:
            raise SettingError(why)


def _weight_files(folder: Path) -> list[Path]:
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}{INDEX}"
        if index.is_file():
            try:
                return [folder / shard for shard in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            except (ValueError, KeyError, TypeError, AttributeError) as fault:
                raise SettingError(f"{index} cannot be read: {fault}; download the model again") from fault
    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    if not files:
        raise SettingError(f"the folder {folder} has no weights: neither {WEIGHTS[0]} nor {WEIGHTS[0]}{INDEX}")
    return files


def is_path(name: str) -> bool:
    """Whether this can only be a path: a hub id is a name, or an owner and a name."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or os.path.exists(name)


def hub_address() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def is_cached(name: str) -> bool:
    """Whether the hub's cache holds a snapshot of this model."""
    home = (
        os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    )
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub")
    folder = cache.expanduser() / f"models--{name.replace('/', '--')}" / "snapshots"
    return any(folder.glob("*/config.json"))


def unreachable(address: str, seconds: float = HUB_SECONDS) -> str:
    """Why an address does not answer within ``seconds``; empty if it does, with any status. Honours proxy settings."""
    reasons: list[str] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=seconds).close()
            reasons.append("")
        except urllib.error.HTTPError:
            reasons.append("")
        except (OSError, ValueError) as fault:
            reasons.append(str(getattr(fault, "reason", fault)))

    asking = threading.Thread(target=ask, daemon=True)  # resolving a name has no time limit of its own
    asking.start()
    asking.join(seconds)
    return reasons[0] if reasons else f"no answer within {seconds:g} s"
