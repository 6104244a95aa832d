"""The tiny model and tokenizer: words that must be read whole, and heads that begin by copying."""

from __future__ import annotations

import torch

from turnwise.environments.builtin.guess import Guess
from turnwise.environments.builtin.lookup import SYMBOLS
from turnwise.models.tiny import tiny_model, tiny_tokenizer

LISTS = ["small red ball, big red cup, small blue ball, big red hat. guess it."] * 50


def pieces(tokenizer, text):
    return [tokenizer.decode([i]) for i in tokenizer.encode(text, add_special_tokens=False)]


def test_a_symbol_is_read_by_itself_wherever_it_stands():
    plain, whole = tiny_tokenizer(LISTS, 400), tiny_tokenizer(LISTS, 400, Guess.symbols)
    assert len(pieces(plain, LISTS[0])) < 5  # all of it was merged
    assert pieces(whole, LISTS[0])[:6] == ["small", " red", " ball", ", big", " red", " cup"]
    assert "".join(pieces(whole, LISTS[0])) == LISTS[0]


def test_a_name_is_one_token_in_a_question_a_call_and_an_article():
    texts = [
        "what is the seat of tepo? use",
        '{"name": "search", "arguments": {"query": "tepo"}}',
        "tepo: city. land luka.",
    ]
    tokenizer = tiny_tokenizer(texts * 50, 500, SYMBOLS)
    assert all("tepo" in pieces(tokenizer, text) for text in texts)
    assert '{"name": "search", "arguments": {"query": "' in pieces(
        tokenizer, texts[1]
    )  # what never changes is one, too


def test_copying_heads_say_again_what_they_look_at():
    model, same, other = (tiny_model(300, seed, copying=True) for seed in (0, 0, 1))
    attention = model.model.layers[1].self_attn
    value, out = attention.v_proj.weight, attention.o_proj.weight
    size = attention.head_dim
    for head in range(model.config.num_attention_heads):
        group = head * model.config.num_key_value_heads // model.config.num_attention_heads
        assert torch.equal(out[:, head * size : (head + 1) * size], value[group * size : (group + 1) * size].T)
    weights = [m.model.layers[1].self_attn.v_proj.weight for m in (same, other, tiny_model(300, 0))]
    assert [torch.equal(value, w) for w in weights] == [True, False, False]
