"""A small file that would expand to more than a machine has is refused while it is read; honest files are not."""

from __future__ import annotations

import gzip
import json

import pytest

from turnwise.data import files
from turnwise.data.files import read_table
from turnwise.errors import SettingError

ROWS = [{"prompt": f"What is {n}?", "messages": [{"role": "user", "content": "é" * n}], "n": n} for n in range(300)]


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr(files, "SMALL_BYTES", 1 << 20)


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "bomb.csv.gz", "bomb.json.gz"])
@pytest.mark.parametrize("line", [b"a" * 999 + b"\n", b"a" * 1000], ids=["many lines", "one line"])
def test_a_gzipped_file_that_fills_the_memory_is_refused(tmp_path, name, line):
    path = tmp_path / name
    path.write_bytes(gzip.compress(line * 20_000))  # 20 MB
    with pytest.raises(SettingError, match=r"expands to more than 200 times as many .* unpack it to JSON Lines"):
        read_table(path)


def test_a_gzipped_file_is_read_whole(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    assert [row for _, row in read_table(path)] == ROWS


def bombs():
    pa = pytest.importorskip("pyarrow")
    large, many = "a" * 100_000, 5_000_000
    alike = lambda n, text: pa.DictionaryArray.from_arrays(pa.array([0] * n, pa.int32()), pa.array([text]))  # noqa: E731
    inside = pa.ListArray.from_arrays(pa.array([0, 100_000], pa.int32()), alike(100_000, large))
    return {
        "one text in many rows": alike(5000, large),
        "one text many times in one row": inside,
        "many rows of nothing": pa.nulls(many),
        "a list of nothing": pa.ListArray.from_arrays(pa.array([0, many], pa.int32()), pa.nulls(many)),
        "texts in structures": pa.StructArray.from_arrays([alike(5000, large).dictionary_decode()], ["content"]),
    }


@pytest.mark.integration
def test_parquet_that_fills_the_memory_is_refused(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for what, array in bombs().items():
        path = tmp_path / "bomb.parquet"
        parquet.write_table(pa.table({"prompt": array}), path, compression="zstd")
        assert path.stat().st_size < 200_000, what
        with pytest.raises(SettingError, match="expands to more than 200 times as many"):
            read_table(path)


@pytest.mark.integration
def test_parquet_is_read_as_it_was_written(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    table = pa.Table.from_pylist(ROWS)
    mixed = {"dictionary_pagesize_limit": 200, "data_page_size": 100, "write_batch_size": 8}  # a dictionary, then plain values
    for options in ({"compression": "none"}, {"compression": "zstd", "row_group_size": 70}, mixed, {"use_dictionary": False}):
        parquet.write_table(table, path, **options)
        assert [row for _, row in read_table(path)] == ROWS
        assert [line for line, _ in read_table(path)] == list(range(1, 301))
