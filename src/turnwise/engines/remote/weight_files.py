"""Weights as files that another process reads: safetensors with a checksum, in shared memory or in a folder that both see.

The trainer writes a version and removes old ones: all weights, or the factors of adapters, whose base is a file of its own. A
server reads a file, compares its checksum, and refuses what is incomplete. Knows tensors and files; neither models nor HTTP.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import socket
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, dtype

from turnwise.engines.adapters import HeldWeights
from turnwise.errors import SettingError, StoreError

SHARED_MEMORY = Path("/dev/shm")
WEIGHTS, BASE, ADAPTERS = "weights", "base", "adapters"  # what a file holds
FOLDER = "folder"  # adapters as PEFT writes them
NAME = re.compile(rf"(?:{WEIGHTS}|{BASE}|{ADAPTERS})-(\d+)(?:-\d+)?\.safetensors")
KIND = "turnwise-weights-"
KEPT = 2  # versions: a server that was late may still read the one before


@dataclass(frozen=True)
class WeightFile:
    """Where the weights of one version are, and their checksum. The names are those of an ``update_info``. ``base``: the checksum
    of the base that adapters belong to; ``adapters``: rank and scale of each, by the name of its weight."""

    path: str
    sha256: str
    size: int = 0  # bytes
    kind: str = WEIGHTS
    base: str = ""
    adapters: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All weights are described by path and checksum alone, as every server understands them."""
        named = {"path": self.path, "sha256": self.sha256}
        if self.kind == WEIGHTS:
            return named
        of_adapters = {"base": self.base, "adapters": dict(self.adapters)} if self.kind == ADAPTERS else {}
        return {**named, "kind": self.kind, **of_adapters}


class WeightFolder:
    """Writes the weights of a run, version by version. ``folder``: empty for shared memory of this machine."""

    def __init__(self, folder: str = "") -> None:
        shared = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        self.chosen = bool(folder)
        self._use(Path(folder) if folder else shared)

    def _use(self, base: Path) -> None:
        try:
            base.mkdir(parents=True, exist_ok=True)
            remove_orphans(base, KIND)
            self.path = Path(tempfile.mkdtemp(prefix=owned_prefix(KIND), dir=base))
        except OSError as fault:
            raise SettingError(
                f"weights cannot be written to {base} ({fault.strerror}); write --generator-weights FOLDER with a folder that "
                "this process and the servers can use"
            ) from None
        self.close = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)  # also when the process ends

    def write(
        self,
        weights: Mapping[str, Tensor],
        version: int,
        dtypes: Mapping[str, dtype] | None = None,
        kind: str = WEIGHTS,
        form: int = 0,
    ) -> WeightFile:
        """Write a version; complete or not at all. ``dtypes``: of weights that the reader does not keep in their own dtype;
        ``form`` counts files of one version that differ in them."""
        rounded = dtypes or {}
        tensors = {n: t.detach().to(rounded.get(n, t.dtype)).to("cpu").contiguous() for n, t in weights.items()}
        path = self.path / f"{kind}-{version}{f'-{form}' if form else ''}.safetensors"
        aside = path.with_suffix(".writing")
        try:
            reserve(aside, sum(t.numel() * t.element_size() for t in tensors.values()))
            save_file(_unshared(tensors), aside)
            digest = checksum(aside)
            aside.replace(path)
        except (OSError, SafetensorError) as fault:
            aside.unlink(missing_ok=True)
            if self.path.parent == SHARED_MEMORY and not self.chosen:  # 64 MiB in a container, unless it was given more
                self._use(Path(tempfile.gettempdir()))
                return self.write(weights, version, dtypes, kind, form)
            raise StoreError(
                f"weights cannot be written to {path} ({fault}); write --generator-weights FOLDER with more room, or give more "
                "shared memory (docker run --shm-size)"
            ) from fault
        self._remove_before(kind, version)
        return WeightFile(str(path), digest, path.stat().st_size, kind)

    def remove(self, file: WeightFile) -> None:
        Path(file.path).unlink(missing_ok=True)

    def _remove_before(self, kind: str, newest: int) -> None:
        files = {path: NAME.fullmatch(path.name) for path in self.path.glob(f"{kind}-*.safetensors")}
        versions = {path: int(match[1]) for path, match in files.items() if match}
        latest = {newest, *sorted({*versions.values()})[-KEPT:]}
        for path, version in versions.items():
            if version not in latest:
                path.unlink(missing_ok=True)


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each with memory of its own: a file cannot say that two names are one tensor."""
    seen: set[int] = set()
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        out[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return out


def reserve(path: Path, size: int) -> None:
    """Take the room of a file at once: a page that a full file system cannot give would end the process that touches it."""
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, max(size, 1))


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_weights(described: Mapping[str, Any]) -> tuple[Mapping[str, Tensor], str]:
    """The tensors of the file that an ``update_info`` describes, and its checksum. Those of a base can be released."""
    path, expected = described.get("path"), described.get("sha256")
    if not isinstance(path, str) or not isinstance(expected, str):
        raise SettingError("'update_info' names no path and sha256; write those of a file of weights")
    file = Path(path)
    if not file.is_absolute() or not NAME.fullmatch(file.name):
        raise SettingError(f"{path[:200]!r} is no file of weights; write an absolute path to weights-N.safetensors")
    try:
        content = file.read_bytes()
    except OSError as fault:
        raise StoreError(
            f"{path[:200]} cannot be read here ({fault.strerror}); trainer and server on two machines need "
            "--generator-weights FOLDER with a folder that both see under the same path"
        ) from None
    if (digest := hashlib.sha256(content).hexdigest()) != expected:
        raise StoreError(f"{path[:200]} has the checksum {digest[:12]}, not {expected[:12]}: it was changed or cut")
    try:
        tensors = load(content)
        return (HeldWeights(tensors) if described.get("kind") == BASE else tensors), digest
    except SafetensorError as fault:
        raise StoreError(f"{path[:200]} holds no weights: {fault}") from None


# ---------------------------------------------------------- names of temporary files
#
# A name holds the machine beside the process that made the file: a folder may be shared by several machines or containers,
# and the number of a process means nothing outside its own.

BOOT, NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def owned_prefix(kind: str) -> str:
    """How names of this process begin."""
    return f"{kind}{_machine()}-{os.getpid()}-"


def remove_orphans(base: Path, kind: str) -> None:
    """Remove what processes of this machine left that were killed."""
    if not NAMESPACE.exists():  # nothing tells which processes exist
        return
    for path in base.glob(f"{kind}{_machine()}-*"):
        process = path.name.removeprefix(f"{kind}{_machine()}-").split("-")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@functools.cache
def _machine() -> str:
    """This machine since its last start, and this container of it."""
    facts = [socket.gethostname()]
    for read in (BOOT.read_text, lambda: os.readlink(NAMESPACE)):
        try:
            facts.append(read())
        except OSError:
            facts.append("")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
