import math
import random

import pytest

from turnwise.environments.builtin.lookup import BM25Index, words

DOCUMENTS = ["red cat", "red red dog house", "blue bird"]


def test_scores_by_hand():
    index = BM25Index(DOCUMENTS, k1=1.5, b=0.75)
    # mean length 8/3; red stands in two of three documents, cat in one
    idf_red, idf_cat = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)
    short, long = 1.5 * (0.25 + 0.75 * 2 * 3 / 8), 1.5 * (0.25 + 0.75 * 4 * 3 / 8)
    assert index.scores("red") == pytest.approx([idf_red / (1 + short), idf_red * 2 / (2 + long), 0])
    assert index.scores("red cat") == pytest.approx([(idf_red + idf_cat) / (1 + short), idf_red * 2 / (2 + long), 0])
    assert index.scores("red red")[0] == pytest.approx(2 * idf_red / (1 + short))


def test_without_length_correction_only_counts_matter():
    index = BM25Index(DOCUMENTS, k1=1.0, b=0.0)
    idf = math.log(1 + 1.5 / 2.5)
    assert index.scores("red") == pytest.approx([idf / 2, idf * 2 / 3, 0])


def test_top_leaves_out_what_shares_no_word_and_keeps_order_of_equals():
    index = BM25Index(["a b", "c d", "a b"])
    assert index.top("A!", 5) == [0, 2]
    assert index.top("zebra", 5) == index.top("", 5) == []
    assert BM25Index([]).top("a", 3) == []


def test_words():
    assert words("Zelor's founder: MIKAN, 12.") == ["zelor", "s", "founder", "mikan", "12"]


@pytest.mark.integration
def test_same_scores_as_bm25s():
    bm25s = pytest.importorskip("bm25s")
    rng = random.Random(0)
    vocabulary = [f"w{i}" for i in range(40)]
    documents = [[rng.choice(vocabulary) for _ in range(rng.randint(1, 25))] for _ in range(120)]
    theirs = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    theirs.index(documents, show_progress=False)
    ours = BM25Index([" ".join(document) for document in documents])
    for _ in range(50):
        query = rng.sample(vocabulary, rng.randint(1, 5))
        assert ours.scores(" ".join(query)) == pytest.approx(list(theirs.get_scores(query)), abs=1e-5)
