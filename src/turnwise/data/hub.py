"""Data sets of the package ``datasets``: a folder that ``save_to_disk`` wrote, or a name on the Hugging Face hub.

The package is imported when a data set is read. Knows no column.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from turnwise.errors import SettingError, nearest

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")
FILE_SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".gz", ".txt", ".arrow")
CONNECT_SECONDS = 2.0
PREFERRED_SPLIT = "train"


def is_saved_dataset(path: Path) -> bool:
    """Whether ``save_to_disk`` wrote this folder: one data set, or several splits."""
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()


def is_hub_id(name: str) -> bool:
    """Whether this can only be ``owner/name``, with a configuration and a split as in ``owner/name:main:train``."""
    looks = HUB_ID.fullmatch(name) is not None and not name.endswith(FILE_SUFFIXES) and not name.startswith(".")
    return looks and not os.path.exists(name) and not os.path.isdir(name.split("/")[0])


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    """The rows of a saved data set or of one on the hub."""
    if not os.path.isdir(name):
        _require_connection(name)  # before an import that takes seconds
    try:
        import datasets
    except ImportError:
        raise SettingError(
            f"{name} is a data set, which needs the package datasets; pip install 'turnwise-rl[data]', or write JSON Lines"
        ) from None
    datasets.disable_progress_bars()
    try:
        if os.path.isdir(name):
            data = datasets.load_from_disk(name)
        else:
            owner_and_name, configuration, split = (*name.split(":"), None, None)[:3]
            offered = datasets.get_dataset_split_names(owner_and_name, configuration) if split is not None else ()
            if split is not None and split not in offered:
                raise SettingError(f"{owner_and_name} has no split {split!r}; {nearest(split, offered)}")
            data = datasets.load_dataset(owner_and_name, configuration, split=split)
    except SettingError:
        raise
    except Exception as fault:  # the package raises errors of many kinds
        words = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
        raise SettingError(f"the data set {name} cannot be read: {words}") from fault
    if isinstance(data, dict):
        splits = list(data)
        if PREFERRED_SPLIT not in splits and len(splits) != 1:
            raise SettingError(f"the data set {name} has the splits {', '.join(splits)}; save or name one of them")
        data = data[PREFERRED_SPLIT if PREFERRED_SPLIT in splits else splits[0]]
    yield from map(dict, data)


def _require_connection(name: str) -> None:
    """Refuse at once where the hub cannot be reached: the package would try for a minute. Behind a proxy only it can tell."""
    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("HF_DATASETS_OFFLINE"):
        return
    if any(os.environ.get(v) for v in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError as fault:
        raise SettingError(
            f"there is no file {name}, and as a data set on the hub it cannot be read: {address.hostname} is not "
            f"reachable ({fault}); write the path of a file"
        ) from fault
