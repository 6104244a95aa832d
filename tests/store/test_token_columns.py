"""What updates computed for each token: exact round trip, pruning by age, resume."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.core.records import Task
from turnwise.store.ledger import SqliteLedger, WriteBehindLedger
from turnwise.store.token_columns import TokenColumns, decode_columns, encode_columns, kept_steps, read_columns

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def columns(step: int, position: int = 0, tokens: int = 3) -> TokenColumns:
    values = np.arange(tokens, dtype=np.float32) / 7
    return TokenColumns(step, position, ("a", "b"), (1, tokens - 1), {"advantage": values, "logp": -values})


@given(st.lists(FLOATS, max_size=40), st.booleans())
def test_a_column_is_read_as_it_was_written(values, repeated):
    logp = np.array(values, np.float32)
    given_ = {"logp": logp, "kept": logp > 0, **({"proximal": logp.copy()} if repeated else {})}
    tokens = TokenColumns(4, 1, ("a",), (len(values),), given_, (("g", ("a",)),), {"clock": 2})
    read = decode_columns(4, 1, *encode_columns(tokens))
    assert (read.step, read.position, read.trajectories, read.sizes) == (4, 1, ("a",), (len(values),))
    assert (read.groups, read.memory) == ((("g", ("a",)),), {"clock": 2})
    for name, array in given_.items():
        assert read.columns[name].astype(array.dtype).tobytes() == array.tobytes()


def test_an_equal_column_costs_nothing():
    logp = np.random.default_rng(0).normal(size=4000).astype(np.float32)
    once = encode_columns(TokenColumns(0, 0, ("a",), (4000,), {"logp": logp}))[1]
    twice = encode_columns(TokenColumns(0, 0, ("a",), (4000,), {"logp": logp, "proximal": logp.copy()}))[1]
    assert len(twice) == len(once)


def test_columns_of_one_trajectory():
    tokens = columns(0)
    assert tokens.of("a")["advantage"].tolist() == tokens.columns["advantage"][:1].tolist()
    assert tokens.of("b")["logp"].tolist() == tokens.columns["logp"][1:].tolist()
    assert tokens.of("c") == {}


def test_only_the_newest_steps_are_kept(tmp_path):
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
        for step in range(5):
            ledger.keep_tokens(lambda step=step: [columns(step), columns(step, 1)], step, steps=2)
        assert kept_steps(ledger) == (3, 4)
        assert [t.position for t in read_columns(ledger, 4)] == [0, 1]
        assert read_columns(ledger, 0) == ()


def test_a_resume_forgets_the_steps_that_are_taken_again(tmp_path):
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
        ledger.issue("g", Task("calculator", 0), 0, 0)
        ledger.seal(1)
        for step in range(3):
            ledger.keep_tokens(lambda step=step: [columns(step)], step, steps=9)
        ledger.resume(1)
        assert kept_steps(ledger) == (0,)


def test_writing_is_deferred(tmp_path):
    made = []
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger, WriteBehindLedger(ledger) as queue:
        queue.keep_tokens(lambda: made.append(1) or [columns(0)], 0, steps=2)
        assert not made
        queue.flush()
        assert made
        assert len(read_columns(ledger, 0)) == 1


@pytest.mark.parametrize("tokens", [0, 1])
def test_an_update_without_tokens(tokens):
    empty = TokenColumns(0, 0, ("a",), (tokens,), {"logp": np.zeros(tokens, np.float32)})
    assert decode_columns(0, 0, *encode_columns(empty)).columns["logp"].tolist() == [0.0] * tokens
