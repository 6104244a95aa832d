"""BM25 over a few documents: the Okapi ranking function, in memory, without dependencies.

    score(q, d) = Σ_{t ∈ q} idf(t) · tf(t, d) / (tf(t, d) + k1 · (1 − b + b · |d| / mean |d|))
    idf(t)      = ln(1 + (N − n(t) + ½) / (n(t) + ½))

(Robertson and Zaragoza 2009; the idf is Lucene's, which is never negative, and the constant factor k1 + 1 is omitted,
as in Lucene: it changes no ranking.) A word that occurs twice in the query counts twice.

Knows no meaning: a word is a run of letters and digits, in lower case.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return WORD.findall(text.lower())


class BM25Index:
    """``Index(["a red cat", "a dog"]).top("red", 1) == [0]``"""

    def __init__(self, documents: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        assert k1 >= 0 and 0 <= b <= 1, (k1, b)
        split = [words(document) for document in documents]
        mean = sum(map(len, split)) / max(len(split), 1)
        self.size = len(split)
        self._weights: dict[str, dict[int, float]] = defaultdict(dict)  # word -> document -> its term of the score
        document_frequency = Counter(word for document in split for word in set(document))
        for number, document in enumerate(split):
            norm = k1 * (1 - b + b * len(document) / mean) if mean else 0.0
            for word, tf in Counter(document).items():
                n = document_frequency[word]
                idf = math.log(1 + (self.size - n + 0.5) / (n + 0.5))
                self._weights[word][number] = idf * tf / (tf + norm)

    def scores(self, query: str) -> list[float]:
        """One score per document."""
        out = [0.0] * self.size
        for word in words(query):
            for number, weight in self._weights.get(word, {}).items():
                out[number] += weight
        return out

    def top(self, query: str, count: int) -> list[int]:
        """The documents with the highest scores above 0, best first; ties go to the earlier document."""
        scores = self.scores(query)
        matching = [number for number, score in enumerate(scores) if score > 0]
        return sorted(matching, key=lambda number: -scores[number])[:count]
