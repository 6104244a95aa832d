"""Tensors in files that several processes write: each writes its slices, an index says where every slice is.

    shard-00001-of-00002.safetensors   slices of the first process, and the tensors that all of them hold alike
    shard-00002-of-00002.safetensors   slices of the second
    shards.json                        of each tensor: shape, dtype, and its slices (file, start, shape)

A process writes one tensor at a time, so a tensor of a GPU needs no more host memory than itself. A reader opens the files that
hold what it asks for, and reads only that part: the number of writers does not matter. Nothing is pickled.

Does not know ranks or process groups, nor what the tensors mean. What makes a whole folder atomic is in ``checkpoint``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from turnwise.errors import StoreError
from turnwise.store.atomic import explain_write_errors

INDEX = "shards.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
Position = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """What one process holds of a tensor: ``TensorSlice(rows, start=(4, 0), whole=(8, 3))`` are its last four rows."""

    values: Tensor
    start: Position
    whole: Position  # the shape of the whole tensor


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """Where a slice of a tensor is stored."""

    file: str
    key: str  # its name in that file
    start: Position
    shape: Position


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Shape, dtype and slices of one tensor. The slices do not overlap and cover all of it."""

    shape: Position
    dtype: str  # as safetensors writes it: "F32"
    slices: tuple[StoredSlice, ...]


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file that one process has written."""

    name: str
    digest: tuple[int, str]  # size and SHA-256
    tensors: Mapping[str, StoredTensor]  # with the slice that it holds


@runtime_checkable
class ShardSource(Protocol):
    """Tensors that several processes hold, and write by themselves."""

    def write_files(self, folder: Path) -> Sequence[ShardFile]:
        """Let every process write its file into ``folder``."""
        ...


# ------------------------------------------------------------------- writing
def write_shard(folder: Path, number: int, count: int, slices: Mapping[str, TensorSlice]) -> ShardFile:
    """Write the file of process ``number`` (from 0) of ``count``, and force it to the disk."""
    name = f"shard-{number + 1:05d}-of-{count:05d}.safetensors"
    # wide types first: the format packs tensors without gaps, and a reader maps them only where they are aligned
    ordered = dict(sorted(slices.items(), key=lambda item: -item[1].values.element_size()))
    header, tensors, position = {}, dict[str, StoredTensor](), 0
    for key, piece in ordered.items():
        values, shape = piece.values, tuple(piece.values.shape)
        if values.dtype not in NAME_OF:
            choices = ", ".join(DTYPES)
            raise StoreError(f"a checkpoint cannot hold {key!r} of dtype {values.dtype}; use one of {choices}")
        dtype, end = NAME_OF[values.dtype], position + values.numel() * values.element_size()
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        tensors[key] = StoredTensor(piece.whole, dtype, (StoredSlice(name, key, piece.start, shape),))
        position = end
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    size, digest = 0, hashlib.sha256()
    with explain_write_errors(folder / name), (folder / name).open("wb") as stream:
        for data in _contents(text, ordered.values()):
            size += stream.write(data)
            digest.update(data)
        stream.flush()
        os.fsync(stream.fileno())
    return ShardFile(name, (size, digest.hexdigest()), {key: tensors[key] for key in slices})


def write_index(folder: Path, files: Sequence[ShardFile]) -> None:
    """Write the index of ``files``; raises if they do not hold all of every tensor."""
    index: dict[str, StoredTensor] = {}
    for file in files:
        for name, part in file.tensors.items():
            before = index.get(name, StoredTensor(part.shape, part.dtype, ()))
            if (before.shape, before.dtype) != (part.shape, part.dtype):
                raise StoreError(
                    f"the processes disagree about {name!r}: {before.dtype} {before.shape}, {part.dtype} {part.shape}"
                )
            index[name] = StoredTensor(part.shape, part.dtype, (*before.slices, *part.slices))
    _check_complete(folder, index)
    text = json.dumps({name: asdict(tensor) for name, tensor in index.items()})
    (folder / INDEX).write_text(text, encoding="ascii")


def _contents(header: bytes, slices: Iterable[TensorSlice]) -> Iterator[bytes | memoryview]:
    """The parts of a safetensors file. Only one tensor at a time is copied to the host."""
    yield len(header).to_bytes(8, "little")
    yield header
    for piece in slices:
        yield piece.values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _check_complete(folder: Path, index: Mapping[str, StoredTensor]) -> None:
    for name, tensor in index.items():
        covered = sum(math.prod(piece.shape) for piece in tensor.slices)
        if covered != math.prod(tensor.shape):
            raise StoreError(f"{folder} holds {covered} of the {math.prod(tensor.shape)} numbers of {name!r}")


# ------------------------------------------------------------------- reading
class StoredTensors(Mapping[str, Tensor]):
    """Tensors in files, by name. A tensor, or a part of it, is read when it is asked for; it may alias the file.

    Can be sent to another process, which then reads for itself."""

    def __init__(self, folder: Path, index: Mapping[str, StoredTensor]) -> None:
        self.folder, self.index = folder.absolute(), index
        self._files: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredTensors, (self.folder, self.index)

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[str]:
        return iter(self.index)

    def __contains__(self, name: object) -> bool:
        return name in self.index

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.index[name]
        return self.part(name, (0,) * len(tensor.shape), tensor.shape)

    def part(self, name: str, start: Position, shape: Position) -> Tensor:
        """The values of ``name`` from ``start`` on."""
        tensor, pieces = self.index[name], []
        for piece in tensor.slices:
            first = tuple(map(max, start, piece.start))
            end = tuple(min(a + n, b + m) for a, n, b, m in zip(start, shape, piece.start, piece.shape))
            if all(a < b for a, b in zip(first, end)):
                pieces.append((first, end, piece))
        if len(pieces) == 1:
            return self._read(*pieces[0])
        values = torch.empty(shape, dtype=DTYPES[tensor.dtype])
        for first, end, piece in pieces:
            values[_ranges(start, first, end)] = self._read(first, end, piece)
        return values

    def _read(self, first: Position, end: Position, piece: StoredSlice) -> Tensor:
        """The values from ``first`` to ``end``, positions in the whole tensor, of the slice that holds them."""
        try:
            if piece.file not in self._files:
                self._files[piece.file] = safe_open(self.folder / piece.file, framework="pt")
            file = self._files[piece.file]
            if tuple(b - a for a, b in zip(first, end)) == piece.shape:
                return file.get_tensor(piece.key)
            return file.get_slice(piece.key)[_ranges(piece.start, first, end)]
        except (SafetensorError, OSError) as error:
            raise StoreError(f"{self.folder / piece.file} cannot be read: {error}; {advice(self.folder)}") from error


def read_index(folder: Path) -> StoredTensors:
    """The tensors of a folder whose files ``write_shard`` and ``write_index`` wrote."""
    try:
        index = {}
        for name, row in json.loads((folder / INDEX).read_text(encoding="ascii")).items():
            slices = (StoredSlice(s["file"], s["key"], tuple(s["start"]), tuple(s["shape"])) for s in row["slices"])
            index[name] = StoredTensor(tuple(row["shape"]), row["dtype"], tuple(slices))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{folder / INDEX} cannot be read: {error}; {advice(folder)}") from error
    _check_complete(folder, index)
    return StoredTensors(folder, index)


def read_whole_file(folder: Path, file: str, keys: Mapping[str, str]) -> StoredTensors:
    """The tensors of one safetensors file that a single process wrote. ``keys``: the key in the file of each name."""
    with safe_open(folder / file, framework="pt") as handle:
        index = {}
        for name, key in keys.items():
            values = handle.get_slice(key)  # reads the header alone
            shape = tuple(values.get_shape())
            index[name] = StoredTensor(shape, values.get_dtype(), (StoredSlice(file, key, (0,) * len(shape), shape),))
    return StoredTensors(folder, index)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Position]:
    """The shape of each tensor, read from no file but the index."""
    if isinstance(tensors, StoredTensors):
        return {name: tensor.shape for name, tensor in tensors.index.items()}
    return {name: tuple(t.shape) for name, t in tensors.items()}


def advice(folder: Path) -> str:
    """What to do with a checkpoint that lacks something."""
    return f"copy the file back, or remove {folder} to continue from an older checkpoint"


def _ranges(origin: Position, first: Position, end: Position) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for o, a, b in zip(origin, first, end))
