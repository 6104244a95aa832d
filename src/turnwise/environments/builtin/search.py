"""BM25 over a handful of documents: the Okapi ranking function, in memory, without dependencies.

    score(q, d) = Σ_{t ∈ q} idf(t) · tf(t, d) / (tf(t, d) + k1 · (1 − b + b · |d| / mean |d|))
    idf(t)      = ln(1 + (N − n(t) + ½) / (n(t) + ½))

(Robertson and Zaragoza 2009; the idf is Lucene's, which is never negative, and the constant factor k1 + 1 is left out,
as Lucene does: it changes no ranking.) A word that stands twice in the query counts twice.

It does not know what the documents say: a word is a run of letters and digits, in lower case.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


class Index:
    """``Index(["a red cat", "a dog"]).top("red", 1) == [0]``"""

    def __init__(self, documents: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        assert k1 >= 0 and 0 <= b <= 1, (k1, b)
        split = [words(document) for document in documents]
        mean = sum(map(len, split)) / max(len(split), 1)
        self.size = len(split)
        self._weights: dict[str, dict[int, float]] = defaultdict(dict)  # word -> document -> its share of the score
        found = Counter(word for each in split for word in set(each))
        for number, each in enumerate(split):
            norm = k1 * (1 - b + b * len(each) / mean) if mean else 0.0
            for word, tf in Counter(each).items():
                idf = math.log(1 + (self.size - found[word] + 0.5) / (found[word] + 0.5))
                self._weights[word][number] = idf * tf / (tf + norm)

    def scores(self, query: str) -> list[float]:
        """One score per document."""
        out = [0.0] * self.size
        for word in words(query):
            for number, weight in self._weights.get(word, {}).items():
                out[number] += weight
        return out

    def top(self, query: str, count: int) -> list[int]:
        """The best documents that share at least one word with the query, best first; of equals the earlier."""
        scores = self.scores(query)
        found = [number for number, score in enumerate(scores) if score > 0]
        return sorted(found, key=lambda number: -scores[number])[:count]
