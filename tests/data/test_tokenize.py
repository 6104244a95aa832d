"""Rows as expert trajectories: the tokens are exactly what the assistant says, everything else is context."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import environments
from turnwise.core.batch import pack
from turnwise.core.levels import TRAJECTORY
from turnwise.core.records import Group, Origin, Task
from turnwise.data.dataset import read_dataset
from turnwise.data.export import FORMS, divergence
from turnwise.data.tokenize import DialogueTokenizer, build_groups
from turnwise.errors import SettingError
from turnwise.models.tiny import tiny_tokenizer
from turnwise.rollout.episode import EpisodeLimits
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import play_scripted

RENDERER = Renderer(tiny_tokenizer([], 300))
TOKENIZER = DialogueTokenizer(RENDERER, context=4096)
TASK = Task("test", 1)
TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=12)
OTHER = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "tool", "system"]), TEXT)
SAID = st.builds(lambda text: {"role": "assistant", "content": text}, TEXT)


def rows(tmp_path, *given):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, given)))
    return read_dataset(path)


def groups(tmp_path, *given, tokenizer=TOKENIZER):
    return build_groups(rows(tmp_path, *given), tokenizer)


@settings(max_examples=60, deadline=None)
@given(opening=st.lists(OTHER, min_size=1, max_size=2), rest=st.lists(SAID | OTHER, max_size=5), last=SAID)
def test_the_text_of_the_tokens_is_what_the_assistant_said(tmp_path_factory, opening, rest, last):
    said = [*opening, *rest, last]
    group = groups(tmp_path_factory.mktemp("rows"), {"messages": said})[0]
    t = group.trajectories[0]
    assert t.origin == Origin.EXPERT and t.reward == 1.0 and t.success
    assert [RENDERER.decode(turn.tokens[:-1]) for turn in t.turns] == [
        m["content"] for m in said if m["role"] == "assistant"
    ]
    assert all(turn.tokens[-1] == RENDERER.stop_ids[0] and not turn.logp for turn in t.turns)
    assert list(t.messages) == said
    read = RENDERER.decode([i for turn in t.turns for i in (*turn.context, *turn.tokens)])
    template = RENDERER._text(said, (), False)
    assert template.startswith(read), "the model reads the dialogue as the template writes it"
    assert pack([group]).expert.x.all()


@pytest.mark.parametrize("history", [0, 1, 2])
@pytest.mark.parametrize("name", ["guess", "lookup", "keydoor"])
def test_a_row_reads_as_the_episode_it_was_exported_from(tmp_path, name, history):
    """Play, export, read: the same contexts, the same tokens; also from the middle on, where what came before is a prompt."""
    task, limits = Task(name, 5, difficulty=2), EpisodeLimits(turns=60, context=4096, history=history)
    played = asyncio.run(play_scripted("oracle", environments.make(name, 2), "0.0", task, RENDERER, limits))
    row = next(FORMS["demos"](Group("0", task, (played,))))
    tokenizer = replace(TOKENIZER, history=history, tools=tuple(getattr(environments.load(name), "tools", ())))
    read = groups(tmp_path, row, tokenizer=tokenizer)[0].trajectories[0]
    seen = lambda turns: [(t.context, t.tokens, t.restart) for t in turns]  # noqa: E731
    assert len(read.turns) > 1 and seen(read.turns) == seen(played.turns)
    assert read.task == task and read.reward == played.reward
    said = list(played.messages)
    later = [n for n, m in enumerate(said) if m["role"] == "assistant"][1]
    rest = groups(tmp_path, {"prompt": said[:later], "completion": said[later:]}, tokenizer=tokenizer)[0].trajectories[
        0
    ]
    assert [t.tokens for t in rest.turns] == [t.tokens for t in played.turns[1:]]
    before = () if played.turns[1].restart else (*played.turns[0].context, *played.turns[0].tokens)
    assert rest.turns[0].context == (*before, *played.turns[1].context)


def test_pairs_are_groups_of_two(tmp_path):
    found = groups(tmp_path, *[{"prompt": "a", "chosen": "b", "rejected": str(i)} for i in range(3)])
    assert [len(g.trajectories) for g in found] == [2, 2, 2]
    batch = pack(found)
    assert batch.facts["chosen"].level == TRAJECTORY and batch.facts["chosen"].x.tolist() == [1, 0] * 3
    assert [t.reward for t in found[0].trajectories] == [1.0, 0.0]


def test_rows_of_one_prompt_or_one_task_are_peers(tmp_path):
    row = {"prompt": "a", "completion": "b", "reward": 0.5}
    assert [len(g.trajectories) for g in groups(tmp_path, row, row, {**row, "prompt": "c"})] == [2, 1]
    named = [{**row, "prompt": p, "seed": s} for p, s in (("a", 1), ("b", 1), ("a", 2))]
    assert [len(g.trajectories) for g in groups(tmp_path, *named)] == [2, 1]


def test_a_dialogue_that_does_not_fit_is_named_by_its_line(tmp_path):
    short, long = {"prompt": "a", "completion": "b"}, {"prompt": "a" * 90, "completion": "b"}
    with pytest.raises(SettingError, match=r"2 of 3 rows.*lines 2, 3: longer than the context of 64.*--context \d+"):
        groups(
            tmp_path,
            short,
            long,
            {"prompt": "a", "chosen": "b", "rejected": "c" * 90},
            tokenizer=DialogueTokenizer(RENDERER, 64),
        )


def test_a_turn_that_ends_itself_is_refused(tmp_path):
    end = RENDERER.decode(RENDERER.stop_ids[:1])
    with pytest.raises(SettingError, match="line 1: the assistant says the token that ends a turn"):
        groups(tmp_path, {"prompt": "a", "completion": f"b{end}c"})


def test_a_template_that_refuses_a_role_is_told_by_line(tmp_path):
    strict = Renderer(tiny_tokenizer([], 300))
    strict.tokenizer.chat_template = (
        "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        + (strict.tokenizer.chat_template)
    )
    said = [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(SettingError, match="line 1: the chat template refused"):
        groups(tmp_path, {"messages": said}, tokenizer=DialogueTokenizer(strict, 99))


def test_tools_and_answers(tmp_path):
    call = '<tool_call>{"name": "python", "arguments": {}}</tool_call>'
    row = {"prompt": "a", "completion": f"{call}{call}<tool_call>x</tool_call>", "answer": "42"}
    t = groups(tmp_path, row)[0].trajectories[0]
    assert (t.turns[0].tool_calls, t.turns[0].tool_errors) == (3, 1)
    assert RENDERER.decode(t.answer) == "42"


def test_where_two_dialogues_part():
    a, b, c = ({"role": "assistant", "content": x} for x in "abc")
    u, v = ({"role": "user", "content": x} for x in "uv")
    assert divergence([u, a, u, b], [u, a, u, c]) == 3
    assert (
        divergence([u, a, u, b], [u, a, v, b]) == 1
    )  # the environment answered differently: from what was said before it
    assert divergence([u, a], [v, a]) == 0 and divergence([u], [u]) == 0
