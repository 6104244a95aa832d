"""Contexts with the environment's words masked: template tokens stay, lengths stay, only what was just said is replaced."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.core.batch import pack
from turnwise.core.protocols import Step
from turnwise.core.records import Completion, Group, Sampling, Stop, Task
from turnwise.errors import RenderError
from turnwise.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from turnwise.rollout import renderer as observation_mask
from turnwise.rollout.episode import Episode, EpisodeLimits
from turnwise.rollout.renderer import CHATML, Renderer

FORGETS = CHAT_TEMPLATE.replace("message.content", "message.content.split('</think>')[-1]")
TRIMS = CHAT_TEMPLATE.replace("message.content", "message.content | trim")
SHOUTS = CHAT_TEMPLATE.replace(
    "message.content", "(message.content | upper if message.role == 'tool' else message.content)"
)


def renderer(template: str = CHAT_TEMPLATE, corpus=("the answer is", "No information found.")) -> Renderer:
    tokenizer = tiny_tokenizer(corpus, 480)
    tokenizer.chat_template = template
    return Renderer(tokenizer)


PLAIN, FORGETTING, TRIMMING = renderer(), renderer(FORGETS), renderer(TRIMS)
FILLER = PLAIN.encode(observation_mask.PLACEHOLDER)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def filled(n: int) -> list[int]:
    return [*FILLER, *[FILLER[-1]] * n][:n]


def told(r: Renderer, *contents: str, said: str = "yes", role: str = "tool", history: int = 0):
    dialogue = r.open([{"role": "user", "content": "begin"}], (), history)
    r.append_sampled(dialogue, r.encode_turn(said))
    r.append_observation(dialogue, [{"role": role, "content": words} for words in contents], mask=True)
    return dialogue


@settings(deadline=None, max_examples=150)
@given(contents=st.lists(WORDS, min_size=1, max_size=3))
def test_words_become_the_placeholder_and_the_template_stays(contents):
    """Special tokens part every message from the template here, so its words can be encoded by themselves."""
    dialogue = told(PLAIN, *contents)
    tool, end, agent = (PLAIN.encode(t)[0] for t in ("<|tool|>", "<|end|>", "<|assistant|>"))
    expected: list[int] = []
    for words in contents:
        expected += [tool, *filled(len(PLAIN.encode(words))), end]
    assert dialogue.masked_ids == [*expected, agent]
    assert len(dialogue.masked_ids) == len(dialogue.new_ids)


def test_short_words_take_the_beginning_and_long_ones_repeat_the_end():
    short, long = told(PLAIN, "z"), told(PLAIN, "z" * 40)
    assert short.masked_ids[1:2] == FILLER[:1]
    assert long.masked_ids[1:41] == [*FILLER, *[FILLER[-1]] * (40 - len(FILLER))]


@pytest.mark.parametrize(
    "words", ["assistant", "tool", "|", "<|assistant|>", "a", "<|end|>", "904617320509046173205", ""]
)
def test_words_that_the_template_writes_too(words):
    dialogue = told(PLAIN, words)
    assert dialogue.masked_ids[0] == dialogue.new_ids[0] and dialogue.masked_ids[-2:] == dialogue.new_ids[-2:]
    assert dialogue.masked_ids[1:-2] == filled(len(dialogue.new_ids) - 3)


def test_nothing_to_mask():
    assert told(PLAIN).masked_ids == []  # nothing was said
    dialogue = PLAIN.open([{"role": "user", "content": "begin"}])
    PLAIN.append_sampled(dialogue, PLAIN.encode_turn("yes"))
    PLAIN.append_observation(dialogue, [{"role": "user", "content": "go"}])
    assert dialogue.masked_ids == []  # nobody asked
    again = told(PLAIN, "go")
    PLAIN.append_sampled(again, PLAIN.encode_turn("yes"))
    assert again.masked_ids == []


def test_after_a_restart_only_the_latest_words_are_masked():
    dialogue = told(FORGETTING, "begin", said="<think>hm</think>yes")
    assert dialogue.restarted and len(dialogue.masked_ids) == len(dialogue.ids)
    changed = [i for i, (a, b) in enumerate(zip(dialogue.ids, dialogue.masked_ids)) if a != b]
    last = FORGETTING.encode(dialogue.text[: dialogue.text.rindex("begin")])
    assert changed and min(changed) >= len(last)  # the task, which is the same word, stands before them


def test_a_template_that_changes_words():
    dialogue = told(TRIMMING, "  word  ", " two ")
    assert PLAIN.decode(dialogue.new_ids).count("word<|end|>") == 1
    assert dialogue.masked_ids[1 : 1 + len(PLAIN.encode("word"))] == filled(len(PLAIN.encode("word")))
    loud = told(renderer(SHOUTS), "word", "two")
    assert len(loud.masked_ids) == len(loud.new_ids) and loud.masked_ids[-1] == loud.new_ids[-1]
    assert loud.masked_ids[0] == loud.new_ids[0] and "WORD" in PLAIN.decode(loud.new_ids)
    assert "WORD" not in PLAIN.decode(loud.masked_ids) and "TWO" not in PLAIN.decode(loud.masked_ids)


def test_chatml_where_tokens_may_reach_across():
    """A token that holds a piece of the template as well is the template's."""
    tokenizer = tiny_tokenizer(["tool\nab ab", "\nab", "\nab", "user\n"] * 20, 400)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    r = Renderer(tokenizer)
    for words in ("ab", "ab ab", "zzz", "\n\n"):
        dialogue = told(r, words)
        offsets = r.tokenizer(r.decode(dialogue.new_ids), return_offsets_mapping=True, add_special_tokens=False)
        begin = r.decode(dialogue.new_ids).index("tool\n") + len("tool\n")
        for i, (a, b) in enumerate(offsets["offset_mapping"]):
            inside = begin <= a and b <= begin + len(words)
            assert inside or dialogue.masked_ids[i] == dialogue.new_ids[i]
    assert told(r, "zzz").masked_ids != told(r, "zzz").new_ids


def test_the_latest_of_a_window_of_observations():
    r = PLAIN
    dialogue = told(r, "first", role="user", history=1)
    r.append_sampled(dialogue, r.encode_turn("yes"))
    r.append_observation(dialogue, [{"role": "user", "content": "second"}], mask=True)
    assert dialogue.restarted and "first" not in dialogue.text
    n = len(r.encode("second"))
    assert dialogue.masked_ids == [*dialogue.ids[: -n - 2], *filled(n), *dialogue.ids[-2:]]


def test_a_tokenizer_without_offsets_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(RenderError, match="fast tokenizer"):
        observation_mask.mask_spans(Slow(), "a", [1], [(0, 1)])


# -------------------------------------------------------------------- episodes


class FixedSession:
    async def generate(self, ids, sampling):
        tokens = PLAIN.encode_turn("yes")
        return Completion(tokens, [-1.0] * len(tokens), [0.0] * len(tokens), [0] * len(tokens), Stop.TOKEN)

    def close(self):
        pass


class Talks:
    def reset(self, seed):
        return [{"role": "user", "content": "begin"}]

    def step(self, action):
        return Step([{"role": "tool", "content": "the answer is 42"}], reward=1.0)


@pytest.mark.parametrize("record_masked", [False, True])
def test_an_episode_records_them_when_asked(record_masked):
    task, limits = Task("test", seed=0), EpisodeLimits(turns=3, context=400)
    one = asyncio.run(
        Episode("t", task, Talks(), FixedSession(), PLAIN, Sampling(), limits, record_masked=record_masked).run()
    )
    batch = pack([Group("g", task, (one,))])
    if not record_masked:
        assert not any(turn.masked_context for turn in one.turns) and batch.sequences.masked_ids is None
        return
    first, *later = one.turns
    assert first.masked_context == () and len(later) == 2
    for turn in later:
        assert len(turn.masked_context) == len(turn.context) and turn.masked_context != turn.context
        assert PLAIN.decode(turn.masked_context).startswith("<|tool|>No information")
    assert batch.sequences.masked_ids.numel() == batch.sequences.ids.numel()
