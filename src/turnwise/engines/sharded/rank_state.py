"""The state of a learner over several ranks in files: every rank writes and reads its own slices.

FSDP divides a tensor along its first dimension. A rank's slice has no meaning without the number of ranks, so the files say which
part of the whole tensor each slice is, and any number of ranks, or a single process, can read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from turnwise.store.shard_files import Position, ShardFile, StoredTensors, TensorSlice, shapes_of, write_shard


class RankTensors(Mapping[str, Tensor]):
    """The tensors of all ranks, as rank 0 sees them. Every rank writes its own; one that is read here is collected from all
    ranks. Valid until the next update."""

    def __init__(
        self,
        names: Sequence[str],
        collect: Callable[[Sequence[str]], Mapping[str, Tensor]],
        write: Callable[[Path], list[ShardFile]],
    ) -> None:
        self._names, self._collect, self._write = names, collect, write

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._collect([name])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def write_files(self, folder: Path) -> list[ShardFile]:
        """Let every rank write its file into ``folder``."""
        return self._write(folder.absolute())


class OwnTensors(Mapping[str, Tensor]):
    """Whole tensors, in files or in memory, as one rank holds them: its shard of those that are divided. Of a file it reads
    nothing else."""

    def __init__(self, whole: Mapping[str, Tensor], like: Callable[[str], Tensor | None], device: torch.device) -> None:
        """``like``: the tensor of this rank that a whole one is for, or None."""
        self._whole, self._like, self._device, self._shapes = whole, like, device, shapes_of(whole)

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, name: str) -> Tensor:
        like = self._like(name)
        if not isinstance(like, DTensor) or tuple(like.shape) != self._shapes[name]:
            return self._whole[name].to(self._device)
        start, shape = shard_range(like)
        if isinstance(self._whole, StoredTensors):
            part = self._whole.part(name, start, shape)
        else:
            part = self._whole[name][tuple(slice(a, a + n) for a, n in zip(start, shape))]
        return DTensor.from_local(
            part.to(self._device),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


def write_own(folder: Path, tensors: Mapping[str, Tensor]) -> ShardFile:
    """Write this rank's slices of ``tensors``. The first rank also writes what all ranks hold alike."""
    rank, slices = dist.get_rank(), dict[str, TensorSlice]()
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            start, shape = shard_range(tensor)
            part = tensor.to_local()
            assert tuple(part.shape) == shape, (
                f"rank {rank} holds {tuple(part.shape)} of {tuple(tensor.shape)}, not {shape}"
            )
            if rank == 0 or (part.numel() and start != (0,) * tensor.dim()):
                slices[name] = TensorSlice(part, start, tuple(tensor.shape))
        elif rank == 0:
            slices[name] = TensorSlice(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
    return write_shard(folder, rank, dist.get_world_size(), slices)


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
