"""Rows as people write them: every shape that is read, and every mistake by its line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.core.records import Task
from turnwise.data.dataset import DIRECTIONS, read_dataset, with_directions, with_revisions
from turnwise.errors import SettingError

USER = {"role": "user", "content": "2+2?"}
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
TOOL = {"role": "tool", "content": "4", "name": "python"}


def write(tmp_path, *rows, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return path


def one(tmp_path, row, env="calculator"):
    return read_dataset(write(tmp_path, row), env).rows[0]


def refused(path) -> str:
    with pytest.raises(SettingError) as caught:
        read_dataset(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------- shapes


def test_a_dialogue_is_learned_turn_by_turn(tmp_path):
    example = one(tmp_path, {"messages": [USER, GOOD, TOOL, BAD, USER]}).examples[0]
    assert example.prompt == (USER,) and example.turns == ["4", "5"] and example.completion[1] == TOOL


def test_a_completion_may_be_text_or_messages(tmp_path):
    text = one(tmp_path, {"prompt": "2+2?", "completion": "4"}).examples[0]
    lists = one(tmp_path, {"prompt": [USER], "completion": [GOOD]}).examples[0]
    assert text == lists and text.prompt == (USER,) and text.turns == ["4"]


def test_what_the_assistant_said_in_a_prompt_is_context(tmp_path):
    example = one(tmp_path, {"prompt": [USER, BAD, USER], "completion": [GOOD, TOOL, GOOD]}).examples[0]
    assert example.prompt == (USER, BAD, USER) and example.turns == ["4", "4"]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "2+2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
    ids=["text", "messages", "whole dialogues", "and a prompt", "and a prompt of messages"],
)
def test_pairs(tmp_path, row):
    found = one(tmp_path, row)
    assert found.is_pair and [s.prompt for s in found.examples] == [(USER,)] * 2
    assert [s.turns for s in found.examples] == [["4"], ["5"]]
    assert [s.facts for s in found.examples] == [{"chosen": 1.0}, {"chosen": 0.0}]


def test_two_dialogues_part_where_they_first_differ(tmp_path):
    found = one(tmp_path, {"chosen": [USER, BAD, USER, GOOD], "rejected": [USER, BAD, USER, BAD]})
    assert found.examples[0].prompt == (USER, BAD, USER) and found.examples[0].turns == ["4"]


def test_contents_in_parts_and_calls_beside_them_become_text(tmp_path):
    call = {"id": "x", "type": "function", "function": {"name": "python", "arguments": '{"code": "2+2"}'}}
    said = {"role": "assistant", "content": [{"type": "text", "text": "let me see "}], "tool_calls": [call]}
    example = one(tmp_path, {"messages": [USER, said, TOOL, {**GOOD, "tool_calls": None}]}).examples[0]
    wanted = 'let me see <tool_call>{"name": "python", "arguments": {"code": "2+2"}}</tool_call>'
    assert example.turns == [wanted, "4"]
    only = {"role": "assistant", "content": None, "tool_calls": [{"name": "python", "arguments": {}}]}
    assert one(tmp_path, {"messages": [USER, only]}).examples[0].turns[0].startswith("<tool_call>")


def test_other_columns(tmp_path):
    row = {"prompt": "2+2?", "completion": "4", "reward": 0.5, "success": True, "answer": "4", "source": "mine"}
    found = one(tmp_path, {**row, "level": 3, "flag": True, "task": "a.b:C/train/2/17", "nothing": None})
    example = found.examples[0]
    assert (example.reward, example.success, example.answer) == (0.5, True, "4")
    assert example.facts == {"source": "mine", "level": 3.0, "flag": 1.0}
    assert found.task == Task("a.b:C", 17, "train", 2)
    assert one(tmp_path, {**row, "seed": 5, "difficulty": 3}).task == Task("calculator", 5, "train", 3)


def test_columns_of_one_side(tmp_path):
    row = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "reward_chosen": 0.9, "reward_rejected": 0.1, "gap": 2}
    better, worse = one(tmp_path, {**row, "chosen_score": 7, "rejected_score": 1}).examples
    assert (better.reward, worse.reward) == (0.9, 0.1)
    assert better.facts == {"chosen": 1.0, "gap": 2.0, "score": 7.0}
    assert worse.facts == {"chosen": 0.0, "gap": 2.0, "score": 1.0}


def test_columns_that_cannot_be_facts_are_counted(tmp_path):
    rows = [{"prompt": "a", "completion": "b", "scores": [1, 2]}, {"prompt": "a", "completion": "b", "long": "x" * 999}]
    assert read_dataset(write(tmp_path, *rows)).unused_columns == {"scores": 1, "long": 1}


# ----------------------------------------------------------------------- files


def test_json_arrays_and_blank_lines_and_a_byte_order_mark(tmp_path):
    row = {"prompt": "a", "completion": "b"}
    assert len(read_dataset(write(tmp_path, json.dumps([row, row], indent=1), name="rows.json"))) == 2
    found = read_dataset(write(tmp_path, "", row, "   ", row, ""))
    assert [r.line for r in found.rows] == [2, 4]
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row).encode())
    assert len(read_dataset(path)) == 1


def test_parquet_needs_its_package(tmp_path, monkeypatch):
    path = write(tmp_path, {}, name="rows.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    assert "needs the package pyarrow" in refused(path) and "JSON Lines" in refused(path)


CALL = {"function": {"name": "python", "arguments": {"code": "2+2"}}}
ASK = {"function": {"name": "search", "arguments": {"query": "sum", "most": 2}}}
SCHEMA = {
    "type": "function",
    "function": {"name": "python", "parameters": {"properties": {"code": {"type": "string"}}}},
}
OTHER = {
    "type": "function",
    "function": {"name": "search", "parameters": {"properties": {"query": {"type": "string"}}}},
}
FORMATS = {
    "messages": [
        {
            "messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, TOOL, GOOD],
            "tools": [SCHEMA, OTHER],
            "reward": 1.0,
        },
        {"messages": [USER, {"role": "assistant", "content": "so:", "tool_calls": [ASK]}, TOOL, BAD], "success": False},
    ],
    "text": [{"prompt": "2+2?", "completion": "4", "source": "mine"}, {"prompt": "3+3?", "completion": "6", "seed": 4}],
    "lists": [
        {"prompt": [USER], "completion": [GOOD]},
        {"prompt": [USER, BAD, USER], "completion": [GOOD, TOOL, GOOD]},
    ],
    "pairs": [{"prompt": "2+2?", "chosen": "4", "rejected": "5", "score_chosen": 9.0, "score_rejected": 2.0}],
    "dialogues": [{"chosen": [USER, GOOD], "rejected": [USER, BAD]}],
    "two prompts": [{"prompt_chosen": "add", "prompt_rejected": "times", "chosen": "4", "rejected": "4", "within": 1}],
    "rated": [{"prompt": "2+2?", "response": "4", "helpfulness": 4, "verbosity": 1}],
}


@pytest.mark.integration
@pytest.mark.parametrize("form", FORMATS)
def test_parquet_says_what_json_lines_say(tmp_path, form):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = FORMATS[form]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    parquet.write_table(arrow.table({n: [row.get(n) for row in rows] for n in columns}), tmp_path / "rows.parquet")
    found, wanted = read_dataset(tmp_path / "rows.parquet", "guess"), read_dataset(write(tmp_path, *rows), "guess")
    assert [r.line for r in found.rows] == list(range(1, len(rows) + 1))
    assert found.rows == wanted.rows and found.unused_columns == wanted.unused_columns


@pytest.mark.integration
def test_bad_rows_of_parquet_are_named_by_number(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist([{"prompt": "a", "completion": "b"}, {"prompt": "a"}]), path)
    assert "1 of 2 rows cannot be used. line 2: columns prompt" in refused(path)
    path.write_bytes(b"PAR1 and then nothing")
    assert "cannot be read as Parquet" in refused(path)


# ------------------------------------------------------------------ directions


RATED = [
    {"prompt": "2+2?", "response": "4", "helpfulness": 3, "verbosity": 0.0},
    {"prompt": "2+2?", "response": "It is 4, as everybody knows.", "helpfulness": 3, "verbosity": 4},
    {"prompt": "3+3?", "completion": "6", "helpfulness": 1, "verbosity": 2, "task": "calculator/train/1/7"},
]
HEADS = ("helpfulness", "verbosity")


def test_a_rated_answer_is_asked_for_in_several_directions(tmp_path):
    rows = with_directions(read_dataset(write(tmp_path, *RATED)), HEADS, 0)
    assert [(r.line, r.copy) for r in rows.rows] == [(n, c) for n in (1, 2, 3) for c in range(DIRECTIONS)]
    for row in rows.rows:
        example, given = row.examples[0], RATED[row.line - 1]
        assert row.task is None and example.rewards == {name: float(given[name]) for name in HEADS}
        v = [example.facts[f"toward_{name}"] for name in HEADS]
        assert v[0] >= 0.7 and sum(x * x for x in v) == pytest.approx(1, abs=0.02)
        stated, asked = example.prompt[0]["content"].split("\n")
        assert (
            stated == f"[helpfulness*{round(100 * v[0])} + verbosity*{round(100 * v[1])}]" and asked == given["prompt"]
        )
    first, second = ([r.examples[0].prompt for r in rows.rows if r.line == n] for n in (1, 2))
    assert first == second, "answers to one prompt are asked for in the same directions"
    assert with_directions(read_dataset(write(tmp_path, *RATED)), HEADS, 0) == rows
    assert with_directions(read_dataset(write(tmp_path, *RATED)), HEADS, 1) != rows
    assert {v > 0 for r in rows.rows if (v := r.examples[0].facts["toward_verbosity"])} == {True, False}


def test_a_direction_that_is_told_is_kept_and_three_ratings_will_do(tmp_path):
    told = {**RATED[0], "toward_helpfulness": 0.8, "toward_verbosity": -0.6}
    row = with_directions(read_dataset(write(tmp_path, told)), HEADS, 0).rows[0]
    assert row.examples[0].prompt == (USER,) and row.examples[0].facts["toward_verbosity"] == -0.6
    three = with_directions(read_dataset(write(tmp_path, {**RATED[0], "wit": 2})), (*HEADS, "wit"), 0)
    for v in ([r.examples[0].facts[f"toward_{n}"] for n in (*HEADS, "wit")] for r in three.rows):
        assert v[0] >= 0.7 and sum(x * x for x in v) == pytest.approx(1, abs=0.03)


def test_a_row_without_a_rating_is_named(tmp_path):
    path = write(tmp_path, RATED[0], {"prompt": "a", "response": "b", "helpfulness": "much"})
    with pytest.raises(SettingError, match=r"1 of 2 rows cannot be used. line 2: no rating helpfulness, verbosity"):
        with_directions(read_dataset(path), HEADS, 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no rows"),
        (b"\n \n", "holds no rows"),
        (b"\xff\xfe\x00rubbish", "is not UTF-8 text"),
        (b"hello", "line 1: 'hello' is not JSON"),
        (b"3", "line 1: '3' is not an object"),
    ],
)
def test_files_that_are_no_rows(tmp_path, content, words):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert words in refused(path)


def test_paths_that_are_no_files(tmp_path):
    assert "is not there" in refused(tmp_path / "nope.jsonl")
    assert "is a folder" in refused(tmp_path)


# -------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "a", "answer": "b"}, "columns question, answer; write messages, or prompt and completion"),
        ({}, "columns none"),
        ({"messages": []}, "messages is []"),
        ({"messages": "hi"}, "messages is 'hi'"),
        ({"messages": [USER]}, "no assistant message"),
        ({"messages": [GOOD]}, "begins with the assistant"),
        ({"conversations": [{"from": "nobody", "value": "x"}]}, "messages has the role 'nobody'"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "the role 'wizard'"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "has the content None"),
        ({"messages": [{**USER, "tool_calls": [1]}, GOOD]}, "only the assistant can"),
        ({"messages": [USER, {**GOOD, "tool_calls": [{"name": 3}]}]}, "a tool call of messages"),
        ({"prompt": "a"}, "columns prompt"),
        ({"completion": "a"}, "no column prompt"),
        ({"prompt": 3, "completion": "a"}, "prompt is 3"),
        ({"prompt": "a", "completion": [USER, GOOD]}, "begins with a user message"),
        ({"prompt": "a", "chosen": "b"}, "no column rejected"),
        ({"chosen": "b", "rejected": "c"}, "write a prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ({"prompt": "a", "chosen": [USER, GOOD], "rejected": "b"}, "write both alike"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "are the same"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, GOOD]}, "one a part of the other"),
        ({"chosen": [{**USER, "content": "x"}, GOOD], "rejected": [USER, BAD]}, "begin differently"),
        ({"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, TOOL, GOOD]}, "differ first at a user message"),
        ({"prompt": "other", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "prompt is not what"),
        ({"prompt": "a", "completion": "b", "reward": "much"}, "reward is 'much'"),
        ({"prompt": "a", "completion": "b", "reward": float("nan")}, "reward is nan"),
        ({"prompt": "a", "completion": "b", "level": float("inf")}, "level is inf"),
        ({"prompt": "a", "completion": "b", "success": 2}, "success is 2"),
        ({"prompt": "a", "completion": "b", "answer": 4}, "answer is 4"),
        ({"prompt": "a", "completion": "b", "task": "calculator-17"}, "write environment/split/difficulty/seed"),
        ({"prompt": "a", "completion": "b", "seed": "x"}, "seed is 'x'"),
        ({"prompt": "a", "completion": "b", "seed": 1, "split": 3}, "split is 3"),
        ({"prompt": "a", "completion": "b", "tools": 5}, "tools is 5"),
    ],
)  # fmt: skip
def test_every_mistake_is_named_with_its_line(tmp_path, row, words):
    said = refused(write(tmp_path, {"prompt": "a", "completion": "b"}, "", row))
    assert "1 of 2 rows cannot be used. line 3: " in said and words in said


def test_all_mistakes_are_counted_and_the_first_few_shown(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}, *[{"messages": []}] * 9, *[{f"column{i}": i} for i in range(6)]]
    said = refused(write(tmp_path, *rows))
    assert "15 of 16 rows" in said and "lines 2, 3, 4, 5 and 5 more: messages is []" in said and "; and 3 more" in said


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(
    ["messages", "prompt", "completion", "chosen", "rejected", "task", "seed", "reward", "tools", "x", "x_chosen"]
), JSON, max_size=4), min_size=1, max_size=4))  # fmt: skip
def test_nonsense_is_refused_in_words_or_read(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    try:
        assert len(read_dataset(path)) == len(rows)
    except SettingError as fault:
        assert "\n" not in str(fault)


# ------------------------------------------------------- pairs for other methods


def test_one_answer_under_two_prompts(tmp_path):
    row = {"prompt_chosen": "add", "prompt_rejected": "multiply", "chosen": "4", "rejected": "4", "within": 1}
    better, worse = one(tmp_path, row).examples
    assert [s.prompt[0]["content"] for s in (better, worse)] == ["add", "multiply"]
    assert better.facts == {"chosen": 1.0, "within": 1.0}
    assert "no column prompt_rejected" in refused(write(tmp_path, {**row, "prompt_rejected": None}))


def test_a_pair_with_its_revisions_is_six(tmp_path):
    rows = with_revisions(read_dataset(write(tmp_path, {"prompt": "2+2?", "chosen": "4", "rejected": "5"})))
    examples = rows.rows[0].examples
    assert [(s.facts["revises"], s.facts["chosen"]) for s in examples] == [(r, c) for r in (0, 1, 2) for c in (1, 0)]
    assert (
        examples[0].prompt == (USER,)
        and examples[2].prompt[:2] == (USER, BAD)
        and examples[4].prompt[:2] == (USER, GOOD)
    )
    assert [s.turns for s in examples] == [["4"], ["5"]] * 3
