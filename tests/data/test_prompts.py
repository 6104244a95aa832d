"""Files of prompts as users have them: formats, columns, bad rows, splits."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.data.files import digest, read_table
from turnwise.data.prompts import PromptFile, PromptRow, holds_prompts_only, read_prompts, split_rows
from turnwise.errors import SettingError

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1="}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def one(tmp_path, **row) -> PromptRow:
    return read_prompts(write(tmp_path / "one.jsonl", [row])).rows[0]


# -------------------------------------------------------------------- formats


def test_the_same_rows_in_every_format(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    lines = write(tmp_path / "a.jsonl", ROWS).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    (tmp_path / "a.csv").write_text('prompt,answer\n"1+1=",2\n1+2=,3\n')
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    (tmp_path / "a.tsv").write_text("prompt\tanswer\n1+1=\t2\n1+2=\t3\n")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for path in tmp_path.iterdir():
        assert [row for _, row in read_table(path)] == ROWS, path


def test_a_saved_data_set_and_one_with_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "two")
    datasets.DatasetDict({"a": saved, "b": saved}).save_to_disk(tmp_path / "three")
    assert [row for _, row in read_table(tmp_path / "one")] == [row for _, row in read_table(tmp_path / "two")] == ROWS
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    with pytest.raises(SettingError, match="splits a, b"):
        read_table(tmp_path / "three")


def test_a_hub_that_cannot_be_reached_is_told_at_once(monkeypatch):
    pytest.importorskip("datasets")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(SettingError, match="not reachable"):
        read_table("nobody/nothing")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.csv", b"a,b\n1\n", "1 values for 2 columns"),
        ("a.csv", b"a,a\n1,2\n", "header"),
        ("a.csv", b'a,b\n"1,2\n', "line"),
        ("a.csv", b"", "header"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-4], "cannot be read"),
        ("a.jsonl", b"\xff\xfe", "not UTF-8"),
        ("a.parquet", b"PAR1", "Parquet"),
    ],
)
def test_a_broken_file_is_refused_in_words(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SettingError, match=words):
        read_table(tmp_path / name)


def test_a_csv_cell_may_hold_json(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,reward_model\nq,"{""ground_truth"": ""7""}"\n')
    assert read_prompts(tmp_path / "a.csv").rows[0].answer == "7"


# -------------------------------------------------------------------- columns


@pytest.mark.parametrize("column", ["prompt", "question", "problem", "query", "instruction"])
@pytest.mark.parametrize("answer", ["answer", "ground_truth", "solution", "target", "completion"])
def test_the_common_columns_are_found_and_told(tmp_path, column, answer):
    file = read_prompts(write(tmp_path / "a.jsonl", [{column: "q", answer: "7"}]))
    row = file.rows[0]
    assert (row.prompt, row.answer, row.columns["answer"], row.columns["ground_truth"]) == ("q", "7", "7", "7")
    assert f"prompts from {column}, answers from {answer}" in file.describe()


def test_a_row_of_verl(tmp_path):
    row = one(
        tmp_path, data_source="gsm8k", prompt=MESSAGES, ability="math",
        reward_model={"style": "rule", "ground_truth": "2"}, extra_info={"index": 0},
    )  # fmt: skip
    assert row.answer == row.columns["ground_truth"] == "2" and row.columns["data_source"] == "gsm8k"
    assert row.messages == MESSAGES and row.columns["extra_info"] == {"index": 0}


def test_a_last_assistant_message_is_the_answer(tmp_path):
    row = one(tmp_path, messages=[*MESSAGES, {"role": "assistant", "content": "2"}])
    assert row.messages == MESSAGES and row.answer == "2"


def test_a_column_of_its_own_wins_over_the_canonical_name(tmp_path):
    row = one(tmp_path, prompt="q", answer="7", ground_truth="8")
    assert row.columns["answer"] == "7" and row.columns["ground_truth"] == "8"


@pytest.mark.parametrize(("value", "text"), [(7, "7"), (["a", "b"], "a"), ({"x": 1}, '{"x": 1}'), (True, "true")])
def test_an_answer_that_is_no_text(tmp_path, value, text):
    assert one(tmp_path, prompt="q", answer=value).answer == text


def test_bad_rows_are_named_together(tmp_path):
    rows = [
        {"prompt": "q"},
        {"text": "q"},
        {"prompt": [{"role": "robot", "content": "q"}]},
        {"prompt": 3},
        {"prompt": None, "answer": "2"},
    ]
    with pytest.raises(SettingError) as raised:
        read_prompts(write(tmp_path / "a.jsonl", rows))
    message = str(raised.value)
    assert "line 5: prompt is empty" in message
    assert "4 of 5 rows" in message and "line 2" in message and "robot" in message and "write prompt" in message


def test_what_a_file_lacks_is_said_without_guessing(tmp_path):
    assert "neither completions nor pairs" in holds_prompts_only(write(tmp_path / "a.jsonl", ROWS))
    assert "2 rows with answer, prompt" in holds_prompts_only(tmp_path / "a.jsonl")
    assert not holds_prompts_only(write(tmp_path / "b.jsonl", [{"prompt": "q", "completion": "a"}]))
    assert not holds_prompts_only(
        write(tmp_path / "c.jsonl", [{"messages": [*MESSAGES, {"role": "assistant", "content": "a"}]}])
    )
    assert holds_prompts_only(write(tmp_path / "d.jsonl", [{"messages": MESSAGES}]))


# --------------------------------------------------------------------- splits


def file_of(prompts, path="a") -> PromptFile:
    file = PromptFile(path)
    for n, text in enumerate(prompts):
        row = {"messages": [{"role": "user", "content": text}]}
        file.add(n, row, row)
    return file


def texts(numbers, *files):
    rows = [row for file in files for row in file.rows]
    return [rows[n].prompt[0]["content"] for n in numbers]


@given(st.lists(st.text(max_size=3), min_size=2, max_size=40), st.floats(0.01, 0.99))
def test_a_split_shares_no_prompt_and_loses_no_row(prompts, share):
    file = file_of(prompts)
    if len(set(prompts)) < 2:
        with pytest.raises(SettingError, match="--eval-data"):
            split_rows(file, share, None)
        return
    train, held_out = split_rows(file, share, None)
    assert train and held_out and len(train) + len(held_out) == len(prompts)
    assert not set(texts(train, file)) & set(texts(held_out, file))


def test_a_split_depends_on_content_and_not_on_order():
    prompts = [f"question {n}" for n in range(200)]
    there, back = (set(texts(split_rows(f, 0.1, None)[1], f)) for f in (file_of(prompts), file_of(prompts[::-1])))
    assert there == back and 8 <= len(there) <= 34


def test_prompts_of_the_held_out_file_are_not_trained_on():
    files = file_of(["a", "b", "c"]), file_of(["b", "x"], "b")
    train, held_out = split_rows(files[0], 0.1, files[1])
    assert texts(train, *files) == ["a", "c"] and texts(held_out, *files) == ["b", "x"]
    with pytest.raises(SettingError, match="every prompt"):
        split_rows(file_of(["a"]), 0.1, file_of(["a"], "b"))


# ---------------------------------------------------------------- large files


def test_a_large_file_takes_little_more_memory_than_its_text_and_says_how_far_it_is(tmp_path, monkeypatch, caplog):
    rows = [{"prompt": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(4000)]
    path = write(tmp_path / "large.jsonl", rows)
    monkeypatch.setattr("turnwise.data.files.REPORT_SECONDS", (0.0, 0.0))
    read_prompts(write(tmp_path / "small.jsonl", rows[:3]))
    assert "small.jsonl: 3 rows read" in caplog.text
    monkeypatch.undo()
    tracemalloc.start()
    try:
        file = read_prompts(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # a row as objects takes 14 times its text
    assert peak < 4 * path.stat().st_size
    assert file.rows[3999].answer == "7998" and file.rows[3999].line == 4000 and len(file.rows) == 4000


def test_half_characters_and_deep_columns_are_seen_in_every_way_of_storing_a_row(tmp_path):
    path = tmp_path / "half.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a\\ud800"}\r\n\n{"prompt": "\xc3\xa4", "x": ' + b"[" * 63 + b"]" * 63 + b"}")
    assert [row.prompt for row in read_prompts(path).rows] == ["a\ufffd", "ä"]
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}')
    with pytest.raises(SettingError, match=r"not UTF-8 text \(byte 28\)"):
        read_prompts(path)
    path.write_text('{"prompt": "a", "x": ' + "[" * 64 + "]" * 64 + '}\n{"prompt": 3\n')
    with pytest.raises(SettingError, match=r"1 of 2 rows cannot be used. line 2: .* is not JSON"):
        read_prompts(path)
    path.write_text('{"prompt": "a", "x": ' + "[" * 64 + "]" * 64 + "}\n")
    with pytest.raises(SettingError, match="nested deeper than 64 levels; write flat columns"):
        read_prompts(path)
