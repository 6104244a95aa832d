"""A table of bytes spells what the tokenizer spells, halves of letters and unknown ids included."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from turnwise.rollout import token_codec

TEXTS = ["naïve café, 数学 и числа 🙂🙃", "a + b = c\n\tdef f(x): return x", "ÿ ¡ ® \xad soft"]


def _tokenizer(decoder: Any) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoder
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS * 20, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    made.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<é数>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made)


TOKENIZER = _tokenizer(decoders.ByteLevel())
QUICK = token_codec.fast_decoder(TOKENIZER)


def test_the_table_is_what_decodes():
    assert isinstance(QUICK, token_codec._ByteTable)


@given(st.lists(st.integers(0, len(TOKENIZER) + 5), max_size=40))
def test_any_ids_spell_the_same(ids):
    assert QUICK(ids) == TOKENIZER.backend_tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back(text):
    assert QUICK(TOKENIZER.encode(text)) == text == TOKENIZER.decode(TOKENIZER.encode(text))


def test_another_decoder_is_asked_itself():
    """Metaspace joins words in a way that no table of bytes knows."""
    other = _tokenizer(decoders.Metaspace())
    ids = other.encode(TEXTS[1])
    found = token_codec.fast_decoder(other)
    assert found(ids) == other.backend_tokenizer.decode(ids, skip_special_tokens=False) != QUICK(ids)


def test_a_table_that_disagrees_is_not_used(monkeypatch):
    monkeypatch.setitem(token_codec.BYTES, "a", 7)
    assert token_codec.fast_decoder(TOKENIZER)(TOKENIZER.encode("banana")) == "banana"


def test_a_tokenizer_in_python_is_asked_itself():
    class Slow:
        def decode(self, ids: list[int], **options: bool) -> str:
            assert options == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
            return "".join(map(chr, ids))

    assert token_codec.fast_decoder(Slow())((104, 105)) == "hi"


ENCODE = token_codec.fast_encoder(TOKENIZER)


@given(st.text(max_size=30) | st.sampled_from([*TEXTS, "<|end|> a<é数>", ""]))
def test_any_text_has_the_same_ids(text):
    assert list(ENCODE(text)) == TOKENIZER.encode(text, add_special_tokens=False)


def test_what_others_set_is_not_ours():
    made = _tokenizer(decoders.ByteLevel())
    encode = token_codec.fast_encoder(made)
    long = " ".join(TEXTS)
    made(long, truncation=True, max_length=3, add_special_tokens=False)
    assert made.backend_tokenizer.truncation is not None
    assert list(encode(long)) == TOKENIZER.encode(long, add_special_tokens=False)


def test_without_a_backend_the_tokenizer_is_asked():
    class Slow:
        def encode(self, text, add_special_tokens):
            assert not add_special_tokens
            return [ord(letter) for letter in text]

    assert token_codec.fast_encoder(Slow())("ab") == (97, 98)
