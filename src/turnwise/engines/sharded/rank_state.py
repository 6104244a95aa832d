"""The state of a learner over several ranks in files: every rank writes and reads its own slices.

FSDP divides a tensor along its first dimension. A rank's slice has no meaning without the number of ranks, so the files say which
part of the whole tensor each slice is, and any number of ranks, or a single process, can read them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from turnwise.engines.sharded.rank_pool import FILE_SECONDS, RankPool
from turnwise.errors import SettingError
from turnwise.store.shard_files import Position, ShardFile, StoredTensors, TensorSlice, write_shard


class RankTensors(Mapping[str, Tensor]):
    """The tensors of all ranks, as rank 0 sees them. Every rank writes its own; one that is read here is collected from all
    ranks. Valid until the next update."""

    def __init__(self, pool: RankPool, names: list[str]) -> None:
        self._pool, self._names = pool, names

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        value: Tensor = self._pool.call("gather_tensor", name)[0]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def write_files(self, folder: Path) -> list[ShardFile]:
        """Let every rank write its file into ``folder``."""
        return self._pool.call("write_own", folder.absolute(), seconds=FILE_SECONDS)


def check_shared(pool: RankPool, folder: Path) -> None:
    """Refuse a folder in which not every rank sees what rank 0 writes."""
    folder = folder.absolute()
    with tempfile.NamedTemporaryFile(prefix=".shared-", dir=folder) as mark:
        places = pool.call("find_file", Path(mark.name))
    if missing := sorted({place for place in places if place}):
        raise SettingError(
            f"{folder} is not the same folder on all machines: {', '.join(missing)} cannot read what rank 0 writes there; put "
            "the run (--out) on a filesystem that they share, because every rank writes its own part of a checkpoint"
        )


class OwnTensors(StoredTensors):
    """Stored tensors as one rank holds them: its shard of those that are divided. Reads nothing else of them."""

    def __init__(self, stored: StoredTensors, like: Callable[[str], Tensor | None], device: torch.device) -> None:
        """``like``: the tensor of this rank that a stored one is for, or None."""
        super().__init__(stored.folder, stored.index)
        self._like, self._device = like, device

    def __getitem__(self, name: str) -> Tensor:
        like = self._like(name)
        if not isinstance(like, DTensor) or tuple(like.shape) != self.index[name].shape:
            return super().__getitem__(name).to(self._device)
        own = self.part(name, *shard_range(like)).to(self._device)
        return DTensor.from_local(
            own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def write_own(folder: Path, tensors: Mapping[str, Tensor]) -> ShardFile:
    """Write this rank's slices of ``tensors``. The first rank also writes what all ranks hold alike."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    slices = {name: own_slice(tensor, rank) for name, tensor in tensors.items()}
    return write_shard(folder, rank, ranks, {name: own for name, own in slices.items() if own is not None})


def own_slice(tensor: Tensor, rank: int) -> TensorSlice | None:
    """What this rank writes of a tensor; None: nothing."""
    if not isinstance(tensor, DTensor):
        return TensorSlice(tensor, (0,) * tensor.dim(), tuple(tensor.shape)) if rank == 0 else None
    start, shape = shard_range(tensor)
    own = tensor.to_local()
    assert tuple(own.shape) == shape, f"rank {rank} holds {tuple(own.shape)} of {tuple(tensor.shape)}, not {shape}"
    empty = rank > 0 and (not own.numel() or start == (0,) * tensor.dim())
    return None if empty else TensorSlice(own, start, tuple(tensor.shape))


def shard_range(tensor: DTensor) -> tuple[Position, Position]:
    """Start and shape of this rank's part, as ``torch.chunk`` divides a dimension; all of it where it is not divided."""
    start, shape = [0] * tensor.dim(), list(tensor.shape)
    (placement,) = tensor.placements  # FSDP over a mesh of one dimension
    if isinstance(placement, Shard):
        d, ranks = placement.dim, tensor.device_mesh.size()
        length = -(-shape[d] // ranks)
        start[d] = min(tensor.device_mesh.get_local_rank() * length, shape[d])
        shape[d] = min(length, shape[d] - start[d])
    else:
        assert isinstance(placement, Replicate), f"no rule for {placement}"
    return tuple(start), tuple(shape)
