"""Checkpoints that several processes write: exact for any number of writers and readers, all or nothing, checked."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from turnwise.errors import StoreError
from turnwise.store.checkpoint import checkpoints, keep_newest, latest, load_checkpoint, load_latest, save_checkpoint
from turnwise.store.shard_files import INDEX, StoredTensors, TensorSlice, read_index, write_index, write_shard


def example() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    bits = torch.tensor([0x7FC00001, -0x80000000, 1], dtype=torch.int32).view(
        torch.float32
    )  # a NaN's payload, −0, denormal
    return {
        "model/w": torch.randn(7, 3, dtype=torch.float64),
        "model/half": torch.randn(5, 2, 2).bfloat16(),
        "model/bits": bits,
        "optimiser/step/w": torch.tensor(3.0),
        "counts": torch.arange(4),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
    }


@dataclass(frozen=True)
class Writers:
    """``count`` processes that each hold some rows of every tensor; the first one also what cannot be divided."""

    tensors: dict[str, torch.Tensor]
    count: int

    def slices(self, number: int) -> dict[str, TensorSlice]:
        out = {}
        for name, t in self.tensors.items():
            if t.dim() == 0 or not t.numel():
                rows, first = (t, 0) if number == 0 else (None, 0)
            else:
                length = -(-len(t) // self.count)
                first = min(number * length, len(t))
                rows = t[first : first + length]
            if rows is not None and (rows.numel() or not t.numel()):
                out[name] = TensorSlice(rows, (first, *[0] * (t.dim() - 1))[: t.dim()], tuple(t.shape))
        return out

    def write_files(self, folder: Path):
        return [write_shard(folder, n, self.count, self.slices(n)) for n in range(self.count)]


def save(directory: Path, step: int, count: int = 2, **options) -> Path:
    return save_checkpoint(directory, step, Writers(example(), count), {"step": step, "x": torch.ones(2)}, **options)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = lambda t: t.contiguous().reshape(-1).view(torch.uint8)  # noqa: E731
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(as_bytes(a), as_bytes(b))


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_any_number_of_writers_gives_the_same_tensors(tmp_path, count):
    path = save(tmp_path, 4, count)
    back = load_checkpoint(tmp_path)
    assert back.step == 4 and back.state["step"] == 4 and torch.equal(back.state["x"], torch.ones(2))
    assert back.tensors.keys() == example().keys()
    assert [name for name, t in example().items() if not same_bits(back.tensors[name], t)] == []
    assert len(list(path.glob("shard-*.safetensors"))) == count


def test_any_part_is_read(tmp_path):
    save(tmp_path, 0, 3)
    stored, w = load_checkpoint(tmp_path).tensors, example()["model/w"]
    for first, end, left, right in product(range(8), range(8), range(4), range(4)):
        if first <= end and left <= right:
            part = stored.part("model/w", (first, left), (end - first, right - left))
            assert same_bits(part, w[first:end, left:right]), (first, end, left, right)


def test_a_reader_opens_only_the_files_that_hold_its_part(tmp_path):
    path = save(tmp_path, 0, 2)
    stored = pickle.loads(pickle.dumps(load_checkpoint(tmp_path).tensors))  # as it reaches another process
    (path / "shard-00001-of-00002.safetensors").unlink()
    assert same_bits(stored.part("model/w", (4, 0), (3, 3)), example()["model/w"][4:])
    with pytest.raises(
        StoreError, match=r"shard-00001-of-00002\.safetensors cannot be read.*; copy the file back, or remove"
    ):
        stored["model/w"]


def test_the_files_are_plain_safetensors_and_json(tmp_path):
    path = save(tmp_path, 0, 2)
    second = load_file(path / "shard-00002-of-00002.safetensors")
    assert same_bits(second["model/w"], example()["model/w"][4:]) and "optimiser/step/w" not in second
    row = json.loads((path / INDEX).read_text())["model/w"]
    assert (row["shape"], row["dtype"]) == ([7, 3], "F64")
    assert [(s["file"][:11], s["start"], s["shape"]) for s in row["slices"]] == [
        ("shard-00001", [0, 0], [4, 3]), ("shard-00002", [4, 0], [3, 3]),
    ]  # fmt: skip


def test_a_checkpoint_of_one_process_is_read_by_parts_too(tmp_path):
    save_checkpoint(tmp_path, 1, example(), {})
    stored = load_checkpoint(tmp_path).tensors
    assert isinstance(stored, StoredTensors)
    assert same_bits(stored.part("model/w", (2, 1), (3, 2)), example()["model/w"][2:5, 1:])
    assert [name for name, t in example().items() if not same_bits(stored[name], t)] == []


def test_both_forms_are_listed_kept_and_replaced_alike(tmp_path):
    save_checkpoint(tmp_path, 1, example(), {})
    save(tmp_path, 2)
    save(tmp_path, 2, 3)  # the same step again
    save(tmp_path, 3, replaces=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003", "step-00000001"]
    keep_newest(tmp_path, 1)
    assert latest(tmp_path).name == "step-00000003" and len(list(tmp_path.iterdir())) == 1


# ------------------------------------------------------------------- damage

SECOND = "shard-00002-of-00002.safetensors"


def flip(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: (path / SECOND).unlink(),
            rf"has no file {SECOND} .*; copy the file back, or remove .*step-00000002 to",
        ),
        (
            lambda path: flip(path / SECOND),
            rf"is damaged: {SECOND} does not match its checksum; copy the file back, or remove",
        ),
        (lambda path: flip(path / INDEX), rf"is damaged: {INDEX} does not match its checksum"),
    ],
)
def test_a_missing_or_changed_shard_is_named(tmp_path, damage, message):
    path = save(tmp_path, 2)
    damage(path)
    with pytest.raises(StoreError, match=message):
        load_checkpoint(path)
    with pytest.warns(UserWarning, match=message), pytest.raises(StoreError, match=message):
        load_latest(tmp_path)  # not None: the run would begin again at step 0 and remove what is left
    assert path.is_dir()
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage(checkpoints(tmp_path)[0])
    with pytest.warns(UserWarning, match=message):
        assert load_latest(tmp_path).step == 1


def test_without_a_checkpoint_a_run_begins_at_its_start(tmp_path):
    assert load_latest(tmp_path / "none") is None


def test_a_writer_that_fails_leaves_the_previous_checkpoint(tmp_path):
    save(tmp_path, 1)

    @dataclass(frozen=True)
    class Killed(Writers):
        def write_files(self, folder: Path):
            first = write_shard(folder, 0, 2, self.slices(0))
            (folder / SECOND).write_bytes(b"half")
            raise RuntimeError(f"rank 1 of 2 was ended by SIGKILL after {first.name}")

    with pytest.raises(RuntimeError, match="SIGKILL"):
        save_checkpoint(tmp_path, 2, Killed(example(), 2), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"] and load_latest(tmp_path).step == 1


def test_slices_that_do_not_make_up_a_tensor_are_refused(tmp_path):
    writers = Writers(example(), 2)
    files = writers.write_files(tmp_path)
    with pytest.raises(StoreError, match="holds 12 of the 21 numbers of 'model/w'"):
        write_index(tmp_path, files[:1])
    other = replace(files[1].tensors["model/w"], dtype="F32")
    with pytest.raises(StoreError, match="disagree about 'model/w': F64"):
        write_index(tmp_path, [files[0], replace(files[1], tensors={"model/w": other})])
    assert not (tmp_path / INDEX).exists()
    with pytest.raises(StoreError, match=rf"{INDEX} cannot be read"):
        read_index(tmp_path)


def test_a_dtype_that_no_file_can_hold_is_named(tmp_path):
    odd = {"z": TensorSlice(torch.zeros(2, dtype=torch.complex128), (0,), (2,))}
    with pytest.raises(StoreError, match=r"cannot hold 'z' of dtype torch\.complex128"):
        write_shard(tmp_path, 0, 1, odd)
