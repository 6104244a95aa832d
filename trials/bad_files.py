"""Bad data files: for learning from a file alone, for demonstrations, and as prompts with a reward."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from trials.cases import Case, text_file

SMALL = ("--env", "guess", "--steps", "1", "--cold-steps", "1", "--eval-tasks", "2", "--difficulty", "1")
USER = {"role": "user", "content": "a"}
PAIR = {"prompt": "which?", "chosen": "yes", "rejected": "no"}


def _lines(*rows: object) -> str:
    return "\n".join(json.dumps(row) for row in rows)


PAIRS: dict[str, str | bytes] = {
    "empty": "",
    "only blank lines": "\n\n  \n",
    "not JSON": "hello\n",
    "a cut line": _lines(PAIR)[:-5],
    "a list on each line": "[1, 2]\n",
    "a number on each line": "3\n",
    "null": "null\n",
    "not UTF-8": b'{"prompt": "\xff\xfe"}\n',
    "UTF-16": _lines(PAIR).encode("utf-16"),
    "binary": bytes(range(256)) * 20,
    "a million brackets": "[" * 1_000_000,
    "deep object": '{"a":' * 3000 + "1" + "}" * 3000,
    "missing column": _lines({"prompt": "a", "chosen": "b"}),
    "same answers": _lines({"prompt": "a", "chosen": "b", "rejected": "b"}),
    "numbers for texts": _lines({"prompt": 1, "chosen": 2, "rejected": 3}),
    "null columns": _lines({"prompt": None, "chosen": None, "rejected": None}),
    "empty answers": _lines({"prompt": "a", "chosen": "", "rejected": ""}),
    "wrong roles": _lines({"prompt": [{"role": "robot", "content": "a"}], "chosen": "b", "rejected": "c"}),
    "ShareGPT": _lines({"prompt": [{"from": "human", "value": "a"}], "chosen": "b", "rejected": "c"}),
    "role without content": _lines({"prompt": [{"role": "user"}], "chosen": "b", "rejected": "c"}),
    "dialogues for a method of pairs": _lines({"messages": [USER, {"role": "assistant", "content": "b"}]}),
    "not a number as weight": _lines({**PAIR, "margin": float("nan")}),
    "infinite reward": _lines({"prompt": "a", "completion": "b", "reward": float("inf")}),
    "prompts only": _lines({"prompt": "a"}, {"prompt": "b"}),
    "a very long row": _lines({**PAIR, "chosen": "yes " * 100_000}),
    "tool calls by the user": _lines({"messages": [{**USER, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}),
    "a call without a name": _lines({**PAIR, "chosen": [{"role": "assistant", "tool_calls": [{"x": 1}]}]}),
}  # fmt: skip
ODD_BUT_USABLE = {
    "lone surrogates": '{"prompt": "a\\ud800", "chosen": "b\\udfff", "rejected": "c"}\n' * 30,
    "NUL and control characters": _lines(
        *[{**PAIR, "prompt": "a\x00\x1b[2J", "chosen": f"b\x07{n}"} for n in range(30)]
    ),
    "byte order mark": "\ufeff" + _lines(*[{**PAIR, "chosen": f"yes {n}"} for n in range(30)]),
    "CRLF": _lines(*[{**PAIR, "chosen": f"yes {n}"} for n in range(30)]).replace("\n", "\r\n"),
    "the same row again and again": _lines(*[PAIR] * 30),
    "one pair": _lines(PAIR),
}
PROMPTS: dict[str, tuple[str, str | bytes]] = {
    "empty csv": ("p.csv", ""),
    "csv of a header": ("p.csv", "prompt,answer\n"),
    "csv with a broken quote": ("p.csv", 'prompt,answer\n"a,1\n'),
    "csv with more cells than columns": ("p.csv", "prompt,answer\na,1,2,3\n"),
    "csv of NULs": ("p.csv", b"\x00" * 100),
    "cut gzip": ("p.jsonl.gz", gzip.compress(_lines({"prompt": "a", "answer": "1"}).encode())[:-8]),
    "gzip in name only": ("p.jsonl.gz", _lines({"prompt": "a", "answer": "1"})),
    "parquet in name only": ("p.parquet", b"PAR1 nothing PAR1"),
    "empty parquet": ("p.parquet", b""),
    "unknown suffix": ("p.xlsx", b"PK\x03\x04"),
    "no prompt column": ("p.jsonl", _lines({"text": "a", "answer": "1"})),
    "empty prompts": ("p.jsonl", _lines({"prompt": "", "answer": "1"})),
    "prompt is a number": ("p.jsonl", _lines({"prompt": 3, "answer": "1"})),
    "prompt is an empty list": ("p.jsonl", _lines({"prompt": [], "answer": "1"})),
    "no answer column": ("p.jsonl", _lines(*[{"prompt": f"a{n}"} for n in range(40)])),
    "some answers missing": ("p.jsonl", _lines(*[{"prompt": f"a{n}", **({"answer": "1"} if n % 2 else {})} for n in range(40)])),
    "one row": ("p.jsonl", _lines({"prompt": "a", "answer": "1"})),
}  # fmt: skip
def _gzip_bomb(folder: Path) -> None:
    """Five gigabytes of long lines in five megabytes: one member again and again."""
    (folder / "bomb.jsonl.gz").write_bytes(gzip.compress(b"a" * 9_999_999 + b"\n") * 500)


def _parquet_bomb(folder: Path) -> None:
    """Ten gigabytes of text in less than two kilobytes."""
    import pyarrow
    from pyarrow import parquet

    alike = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 500_000, pyarrow.int32()), pyarrow.array(["a" * 20_000]))
    parquet.write_table(pyarrow.table({"prompt": alike}), folder / "bomb.parquet", compression="zstd")


BOMBS: dict[str, Callable[[Path], None]] = {"bomb.jsonl.gz": _gzip_bomb}
if importlib.util.find_spec("pyarrow"):
    BOMBS["bomb.parquet"] = _parquet_bomb
REWARDS = {
    "raises": "def score(completion, **_):\n    raise ValueError('no')\n",
    "returns text": "def score(completion, **_):\n    return 'good'\n",
    "returns NaN": "def score(completion, **_):\n    return float('nan')\n",
    "returns 1e300": "def score(completion, **_):\n    return 1e300\n",
    "returns None": "def score(completion, **_):\n    return None\n",
    "wants a column that is not there": "def score(completion, wisdom):\n    return 1.0\n",
    "takes nothing": "def score():\n    return 1.0\n",
    "is no function": "score = 3\n",
    "does not import": "import nowhere_at_all\ndef score(completion): return 1.0\n",
    "has a syntax error": "def score(completion) return 1.0\n",
    "exits the process": "import os\ndef score(completion, **_):\n    os._exit(3)\n",
    "exits on import": "import sys\nsys.exit(3)\n",
    "loops for ever": "def score(completion, **_):\n    while True: pass\n",
    "allocates without end": "def score(completion, **_):\n    x = []\n    while True: x.append(' ' * 10**7)\n",
    "prints without end": "def score(completion, **_):\n    print('x' * 10**6)\n    return 1.0\n",
    "returns too few": "def score(prompts, completions, **_):\n    return [1.0]\n",
    "recurses": "def score(completion, **_):\n    return score(completion)\n",
}
MAY_RUN = ("returns None", "prints without end", "some answers missing")


def cases() -> Iterator[Case]:
    for name, content in PAIRS.items():
        argv = ("train", "dpo", "--dry-run", "--data", "d.jsonl", *SMALL)
        yield Case("data files", f"pairs: {name}", argv, "refused", text_file("d.jsonl", content))
        argv = ("train", "grpo", "--dry-run", "--demos", "d.jsonl", *SMALL)
        yield Case("data files", f"demonstrations: {name}", argv, "refused", text_file("d.jsonl", content))
    for name, content in ODD_BUT_USABLE.items():
        argv = ("train", "dpo", "--dry-run", "--data", "d.jsonl", *SMALL)
        yield Case("data files", f"pairs: {name}", argv, "ran", text_file("d.jsonl", content))
    yield Case("data files", "a folder", ("train", "dpo", "--data", ".", *SMALL))
    rows = _lines(*[{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)])
    small = (
        "--steps",
        "1",
        "--cold-steps",
        "1",
        "--eval-tasks",
        "2",
        "--reward-seconds",
        "1",
        "--groups",
        "2",
        "--group-size",
        "2",
    )
    for name, (file, content) in PROMPTS.items():
        argv = ("train", "grpo", "--dry-run", "--data", file, "--reward", "exact", *small)
        expect = "either" if name in MAY_RUN else "refused"
        yield Case("prompts", name, argv, expect, text_file(file, content))
    for name, make in BOMBS.items():
        argv = ("train", "grpo", "--dry-run", "--data", name, "--reward", "exact", *small)
        yield Case("prompts", f"expands: {name}", argv, "refused", make)
    for name, source in REWARDS.items():

        def prepare(folder: Path, source: str = source) -> None:
            (folder / "p.jsonl").write_text(rows)
            (folder / "mine.py").write_text(source)

        argv = ("train", "grpo", "--dry-run", "--data", "p.jsonl", "--reward", "mine.py:score", *small)
        yield Case("rewards", name, argv, "either" if name in MAY_RUN else "refused", prepare)
