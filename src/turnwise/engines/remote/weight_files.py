"""Weights as files that another process reads: safetensors with a checksum, in shared memory or in a folder that both see.

The trainer writes a version and removes old ones: all weights in the dtype that a server keeps, or the factors of adapters, whose
base is a file of its own. A server that has no base gets it before the first adapters; its file is removed once every server has
it, and written again for a server that comes later. A vLLM that loads adapters by name gets a PEFT folder, any other merged
weights. A server reads a file, compares its checksum, and refuses what is incomplete. Knows tensors, files and what servers say
of themselves; neither models nor HTTP, and sends nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, dtype

from turnwise.engines.adapters import AdaptedWeights, Adapter, HeldWeights, SentBase, adapted_weights, factors_of
from turnwise.errors import SettingError, StoreError

if TYPE_CHECKING:
    from turnwise.engines.remote.replica import Replica

SHARED_MEMORY = Path("/dev/shm")
DESCRIPTORS = Path("/proc/self/fd")
WEIGHTS, BASE, ADAPTERS = "weights", "base", "adapters"  # what a file holds
FOLDER, DEVICE = "folder", "device"  # other ways: adapters as PEFT writes them; from GPU to GPU, without files
NAME = re.compile(rf"(?:{WEIGHTS}|{BASE}|{ADAPTERS})-(\d+)(?:-\d+)?\.safetensors")
KIND = "turnwise-weights-"
KEPT = 2  # versions: a server that was late may still read the one before
Form = tuple[tuple[str, str], ...]
"""The dtypes of weights that a server does not keep in float32, by name."""


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
        named = {"path": self.path, "sha256": self.sha256}
        of_adapters = {"base": self.base, "adapters": dict(self.adapters)} if self.kind == ADAPTERS else {}
        # all weights are described by path and checksum alone, as every server understands them
        return named if self.kind == WEIGHTS else {**named, "kind": self.kind, **of_adapters}


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
            cure = "write --generator-weights FOLDER with a folder that this process and the servers can use"
            raise SettingError(f"weights cannot be written to {base} ({fault.strerror}); {cure}") from None
        self.close = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)  # also when the process ends

    def write(
        self,
        weights: Mapping[str, Tensor],
        version: int,
        dtypes: Mapping[str, dtype] = {},
        kind: str = WEIGHTS,
        form: int = 0,
    ) -> WeightFile:
        """Write a version; complete or not at all. ``dtypes``: of weights that the reader does not keep in their own dtype;
        ``form`` counts files of one version that differ in them."""
        tensors = {n: t.detach().to(dtypes.get(n, t.dtype)).to("cpu").contiguous() for n, t in weights.items()}
        seen: set[int] = set()
        for name, value in tensors.items():  # a file cannot say that two names are one tensor
            tensors[name] = value.clone() if value.data_ptr() in seen else value
            seen.add(value.data_ptr())
        path = self.path / f"{kind}-{version}{f'-{form}' if form else ''}.safetensors"
        aside = path.with_suffix(".writing")
        try:
            reserve(aside, sum(t.numel() * t.element_size() for t in tensors.values()))
            save_file(tensors, aside)
            digest = checksum(aside)
            aside.replace(path)
        except (OSError, SafetensorError) as fault:
            aside.unlink(missing_ok=True)
            if self.path.parent == SHARED_MEMORY and not self.chosen:  # 64 MiB in a container, unless it was given more
                self._use(Path(tempfile.gettempdir()))
                return self.write(weights, version, dtypes, kind, form)
            cure = "write --generator-weights FOLDER with more room, or give more shared memory (docker run --shm-size)"
            raise StoreError(f"weights cannot be written to {path} ({fault}); {cure}") from fault
        files = {old: NAME.fullmatch(old.name) for old in self.path.glob(f"{kind}-*.safetensors")}
        versions = {old: int(match[1]) for old, match in files.items() if match}
        latest = {version, *sorted({*versions.values()})[-KEPT:]}
        for old in [old for old, number in versions.items() if number not in latest]:
            old.unlink(missing_ok=True)
        return WeightFile(str(path), digest, path.stat().st_size, kind)


@dataclass
class _Base:
    """Frozen weights, and the files that hold them now; a file that was removed keeps its checksum."""

    sent: SentBase
    digests: dict[Form, str] = field(default_factory=dict)
    files: dict[Form, WeightFile] = field(default_factory=dict)


class WeightPublisher:
    """Writes one version after the other. Files of a version are written when the first server needs them."""

    def __init__(self, folder: WeightFolder) -> None:
        self.folder, self.version, self.written = folder, -1, 0  # written: bytes of this version, its base included
        self._weights: Any = None
        self._whole: dict[Form, WeightFile] = {}
        self._adapters: WeightFile | None = None
        self._base: _Base | None = None
        self._folders: dict[int, WeightFile] = {}  # adapters as PEFT folders, by version
        self._forms: dict[Form, int] = {}

    def begin(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Write ``weights`` from now on. They may change after ``write_for``."""
        self._weights, self.version, self.written = weights, version, 0
        self._whole, self._adapters = {}, None
        if not isinstance(weights, AdaptedWeights) or not weights.mergeless:
            self._base = None
        elif self._base is None or not self._base.sent.is_still(weights.base):
            self._base = _Base(SentBase(weights.base))

    def _way(self, replica: Replica) -> str:
        if self._base is not None and replica.loads_adapters:
            # one rank and one scale must describe all adapters, as a PEFT configuration needs
            shapes = {(a.down.shape[0], a.scale) for a in self._weights.adapters.values()}
            if len(shapes) == 1:
                return FOLDER
        if replica.device_weights is not None and replica.device_weights.carries(self._weights):
            return DEVICE
        return ADAPTERS if self._base is not None and replica.takes_adapters else WEIGHTS

    def write_for(self, replicas: Sequence[Replica]) -> None:
        """Write what these servers need and is not written yet; without servers, what one that comes later can use."""
        assert self._weights is not None, "a run publishes before it samples"
        by_way: dict[str, list[Replica]] = {way: [] for way in (FOLDER, DEVICE, ADAPTERS, WEIGHTS)}
        for replica in replicas:
            by_way[self._way(replica)].append(replica)
        if self._base is not None and self._adapters is None and (by_way[ADAPTERS] or not replicas):
            factors, described = factors_of(self._weights.adapters)
            self._adapters = replace(self._write(factors, ADAPTERS), adapters=described)
        for replica in by_way[ADAPTERS]:
            base, form = self._base, _form(replica, BASE)
            assert base is not None
            if form not in base.files and not (replica.base and replica.base == base.digests.get(form)):
                base.files[form] = self._write(base.sent.weights, BASE, form)
                base.digests[form] = base.files[form].sha256
        if by_way[FOLDER]:
            if self.version not in self._folders:
                folder = self.folder.path / f"adapter-{self.version}"
                self._folders[self.version] = file = write_peft_folder(folder, self._weights.adapters)
                self.written += file.size
            loaded = {v for r in by_way[FOLDER] if r.runtime_adapters for v in r.runtime_adapters.loaded}
            for old in [v for v in self._folders if v != self.version and v not in loaded]:
                shutil.rmtree(self._folders.pop(old).path, ignore_errors=True)
        forms = {_form(replica, WEIGHTS) for replica in by_way[WEIGHTS]}
        if not replicas and self._base is None:
            forms = {()}
        for form in forms - self._whole.keys():
            self._whole[form] = self._write(self._weights, WEIGHTS, form)

    def _write(self, weights: Mapping[str, Tensor], kind: str, form: Form = ()) -> WeightFile:
        number = self._forms.setdefault(form, len(self._forms))
        dtypes = {name: getattr(torch, dtype) for name, dtype in form}
        file = self.folder.write(weights, self.version, dtypes, kind, number)
        self.written += file.size
        return file

    def files_for(self, replica: Replica) -> list[WeightFile]:
        """What to send to a server, in this order; nothing to one that gets weights without files."""
        match self._way(replica):
            case "folder":
                return [self._folders[self.version]]
            case "device":
                return []
            case "weights":
                return [self._whole[_form(replica, WEIGHTS)]]
        base, form = self._base, _form(replica, BASE)
        assert base is not None and self._adapters is not None
        adapters = replace(self._adapters, base=base.digests[form])
        return [adapters] if replica.base == adapters.base else [base.files[form], adapters]

    def forget_base(self) -> None:
        """Remove files of the base: every server has it."""
        if self._base is not None:
            for file in self._base.files.values():
                Path(file.path).unlink(missing_ok=True)
            self._base.files = {}

    def read_again(self) -> Mapping[str, Tensor]:
        """The weights of this version from their files: the learner's have moved on. A base does not move."""
        if self._adapters is not None and self._base is not None:
            factors, _ = read_weights(self._adapters.as_dict())
            self._weights = adapted_weights(self._base.sent.weights, factors, self._adapters.adapters)
        else:
            self._weights, _ = read_weights(next(iter(self._whole.values())).as_dict())
        weights: Mapping[str, Tensor] = self._weights
        return weights


def _form(replica: Replica, kind: str) -> Form:
    # a base to which adapters are added each time keeps its dtype: rounding it would round the policy
    return tuple(sorted(replica.dtypes.items())) if kind == WEIGHTS or replica.adapters_beside else ()


def write_peft_folder(folder: Path, adapters: Mapping[str, Adapter]) -> WeightFile:
    """Write adapters as PEFT does; complete or not at all."""
    aside = folder.with_suffix(".writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    first = next(iter(adapters.values()))
    rank, modules = first.down.shape[0], {name: name.removesuffix(".weight") for name in adapters}
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": first.scale * rank, "lora_dropout": 0.0,
        "bias": "none", "inference_mode": True, "target_modules": sorted({m.rsplit(".", 1)[-1] for m in modules.values()}),
    }  # fmt: skip
    (aside / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    factors = {
        f"base_model.model.{modules[name]}.lora_{side}.weight": t.detach().to("cpu").contiguous()
        for name, a in adapters.items()
        for side, t in (("A", a.down), ("B", a.up))
    }
    file = aside / "adapter_model.safetensors"
    save_file(factors, file, metadata={"format": "pt"})
    digest, size = checksum(file), sum(path.stat().st_size for path in aside.iterdir())
    shutil.rmtree(folder, ignore_errors=True)
    aside.replace(folder)
    return WeightFile(str(folder), digest, size, FOLDER)


def reserve(path: Path, size: int) -> None:
    # take the room of a file at once: a page that a full file system cannot give would end the process that touches it
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, max(size, 1))


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_weights(described: Mapping[str, Any]) -> tuple[Mapping[str, Tensor], str]:
    """The tensors of the file that an ``update_info`` describes, and its checksum. Those of a base can be released."""
    path: Any = described.get("path")
    expected: Any = described.get("sha256")
    named = isinstance(path, str) and isinstance(expected, str)
    # a client that knows the token must not read any other file of this machine
    if not named or not Path(path).is_absolute() or not NAME.fullmatch(Path(path).name):
        other = f"{path!r:.200} is no file of weights; write an absolute path to weights-N.safetensors"
        raise SettingError(
            other if named else "'update_info' names no path and sha256; write those of a file of weights"
        )
    try:
        content = Path(path).read_bytes()
    except OSError as fault:
        cure = "trainer and server on two machines need --generator-weights FOLDER with a folder that both see under one path"
        raise StoreError(f"{path[:200]} cannot be read here ({fault.strerror}); {cure}") from None
    if (digest := hashlib.sha256(content).hexdigest()) != expected:
        raise StoreError(f"{path[:200]} has the checksum {digest[:12]}, not {expected[:12]}: it was changed or cut")
    try:
        tensors = load(content)
        return (HeldWeights(tensors) if described.get("kind") == BASE else tensors), digest
    except SafetensorError as fault:
        raise StoreError(f"{path[:200]} holds no weights: {fault}") from None


@contextlib.contextmanager
def shared_objects(value: Any, folder: Path | None = None) -> Iterator[Path]:
    """Where processes that this one has started read ``value``, by ``torch.load``, until the block ends. The file has no name: a
    kill leaves nothing. ``folder``: of checkpoints, for processes on other machines, which need a name; it is one that the next
    checkpoint removes."""
    if folder is None and DESCRIPTORS.is_dir():
        with tempfile.TemporaryFile() as file:
            torch.save(value, file)
            file.flush()
            yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        return
    with tempfile.TemporaryDirectory(prefix=".start.", suffix=".tmp", dir=folder) as name:
        path = Path(name) / "start.pt"
        torch.save(value, path)
        yield path


# ---------------------------------------------------------- names of temporary files
#
# A name holds the machine beside the process that made the file: a folder may be shared by several machines or containers,
# and the number of a process means nothing outside its own.

BOOT, NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def owned_prefix(kind: str) -> str:
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
    # this machine since its last start, and this container of it
    facts = [socket.gethostname(), "", ""]
    for n, read in enumerate((BOOT.read_text, lambda: os.readlink(NAMESPACE)), 1):
        with contextlib.suppress(OSError):
            facts[n] = read()
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
