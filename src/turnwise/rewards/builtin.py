"""Built-in rewards: exact match, a vote, a regular expression, a JSON schema, mathematical equality, code with tests.

They run in a process that can be killed, because an answer may make any of them compute forever. The first argument is the
text of the answer; other positional ones are columns of the row; keyword-only ones are options. A missing reference is "does not
apply".
"""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from turnwise.errors import SettingError

THOUGHTS = re.compile(r"^.*</think>", re.DOTALL)
HASHES = re.compile(r"####\s*(.+)")
FENCED = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"[-+]?[0-9]{1,40}(\.[0-9]{1,40})?")
THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
MAX_TEXT = 100_000  # characters of an answer that are read
SURROUNDING = " \t\r\n.。!,;:\"'`*$"


# ---------------------------------------------------------------------- match


def exact(
    completion: str, answer: Any, *, ignore_case: bool = True, whole: bool = False
) -> float | dict[str, Any] | None:
    """1 if the final answer equals the reference, or one of several. ``whole``: compare the whole text, and find no final answer
    in tags, a box or after ####."""
    if answer is None:
        return None
    found = completion[-MAX_TEXT:] if whole else final_answer(completion)
    references = answer if isinstance(answer, list | tuple) else [answer]
    texts = [str(r) if whole else final_answer(str(r)) for r in references]
    equal = normalise(found, ignore_case) in {normalise(text, ignore_case) for text in texts}
    return {"score": float(equal), "success": equal}


def final_answer(text: str) -> str:
    """The last ``<answer>...</answer>``, else the last ``\\boxed{...}``, else what follows the last ``####``, after any thinking;
    all of the text if there is none of them."""
    text = THOUGHTS.sub("", text[-MAX_TEXT:], count=1)
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        return text[start + len("<answer>") : end]
    boxed = last_box(text)
    if boxed is not None:
        return boxed
    hashes = HASHES.findall(text)
    return str(hashes[-1]) if hashes else text


def last_box(text: str) -> str | None:
    """The content of the last complete ``\\boxed{...}``."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin, depth = start + len("\\boxed{"), 1
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
    return None


def normalise(text: str, ignore_case: bool = True) -> str:
    """Text for comparison: one form of each character, single spaces, no surrounding marks, numbers in one form."""
    text = " ".join(unicodedata.normalize("NFKC", text).strip(SURROUNDING).split())
    number = THOUSANDS.sub("", text)
    if NUMBER.fullmatch(number):
        value = Decimal(number).normalize()
        return format(value if value else Decimal(0), "f")
    return text.casefold() if ignore_case else text


def majority(completions: list[Any], *, pattern: str = "", ignore_case: bool = True) -> list[float]:
    """1 for each answer that equals the one most answers of the group give: a label without a reference. ``pattern``: the final
    answer is what it matches last (its first group, where it has one); an answer without a match is wrong and has no vote.

    Of equally frequent answers, the one that reaches their count first is the label."""
    votes = [_vote(_last_text(completion), pattern, ignore_case) for completion in completions]
    label = majority_vote(votes)
    return [float(vote is not None and vote == label) for vote in votes]


def majority_vote(votes: Sequence[str | None]) -> str | None:
    """The most frequent vote; of several, the first to reach that count. None: nobody voted."""
    counts = Counter(vote for vote in votes if vote is not None)
    most, reached = max(counts.values(), default=0), Counter[str]()
    for vote in votes:
        if vote is not None:
            reached[vote] += 1
            if reached[vote] == most:
                return vote
    return None


def _last_text(completion: Any) -> str:
    """The text of an answer, or of its last message by the policy."""
    if isinstance(completion, str):
        return completion
    spoken = [str(m.get("content") or "") for m in completion if m.get("role") == "assistant"]
    return spoken[-1] if spoken else ""


def _vote(text: str, pattern: str, ignore_case: bool) -> str | None:
    if not pattern:
        return normalise(final_answer(text), ignore_case) or None
    matches = list(re.finditer(pattern, text[-MAX_TEXT:], re.DOTALL))
    if not matches:
        return None
    return normalise(matches[-1][1 if matches[-1].re.groups else 0] or "", ignore_case)


def check_majority(pattern: str = "", ignore_case: bool = True) -> None:
    _compile("majority", pattern)


def _compile(reward: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as fault:
        raise SettingError(f"reward {reward!r}: {pattern!r} is no regular expression: {fault}") from fault


def regex(completion: str, *, pattern: str, full: bool = False) -> float:
    """1 if the pattern matches somewhere in the answer; ``full``: if it matches all of it."""
    match = re.fullmatch if full else re.search
    return float(match(pattern, completion[-MAX_TEXT:], re.DOTALL) is not None)


def check_regex(pattern: str, full: bool = False) -> None:
    _compile("regex", pattern)


def json_schema(completion: str, schema: Any = None, *, file: str = "") -> float | None:
    """1 if the answer is JSON, alone or in its last fenced block, that the schema accepts: that of ``file``, or of the column
    ``schema``."""
    validator = _validator(
        Path(file).read_text(encoding="utf-8") if file else (schema if isinstance(schema, str) else json.dumps(schema))
    )
    if validator is None:
        return None
    text = THOUGHTS.sub("", completion[-MAX_TEXT:], count=1)
    blocks = FENCED.findall(text)
    try:
        value = json.loads(blocks[-1] if blocks else text)
    except (ValueError, RecursionError):
        return 0.0
    return float(validator.is_valid(value))


def check_json_schema(file: str = "") -> None:
    _import_jsonschema()
    if file and not Path(file).is_file():
        raise SettingError(f"reward 'json_schema': there is no file {file}")


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """None where a row has no schema. Nothing is downloaded: a reference must be inside the schema."""
    jsonschema = _import_jsonschema()
    from referencing import Registry

    parsed = json.loads(schema)
    if parsed is None:
        return None
    kind = jsonschema.validators.validator_for(parsed)
    kind.check_schema(parsed)
    return kind(parsed, registry=Registry())


def _import_jsonschema() -> Any:
    try:
        import jsonschema
    except ImportError:
        raise SettingError(
            "reward 'json_schema' needs the package jsonschema; pip install 'turnwise[rewards]'"
        ) from None
    return jsonschema


# ----------------------------------------------------------------------- math


def math(completion: str, answer: Any) -> float | dict[str, Any] | None:
    """1 if the final answer is mathematically equal to the reference (package math-verify)."""
    if answer is None:
        return None
    parse, verify = _import_math_verify()
    reference, found = str(answer), THOUGHTS.sub("", completion[-MAX_TEXT:], count=1)
    gold = parse(_as_math(final_answer(reference)), parsing_timeout=None)
    boxed = last_box(found)
    mine = parse(_as_math(boxed if boxed is not None else final_answer(found)), parsing_timeout=None)
    try:
        equal = bool(gold) and bool(verify(gold, mine, timeout_seconds=None))
    except Exception:  # an expression that SymPy cannot compare
        equal = False
    return {"score": float(equal), "success": equal}


def _as_math(text: str) -> str:
    """A short text in the form that math-verify reads best; a long one as it is: it finds the last expression."""
    text = text.strip()
    return text if len(text) > 200 or "$" in text or "\\boxed" in text or "\n" in text else f"${text}$"


def check_math() -> None:
    parse, verify = _import_math_verify()
    verify(
        parse("$1$", parsing_timeout=None), parse("$2$", parsing_timeout=None), timeout_seconds=None
    )  # loads parsers


def _import_math_verify() -> tuple[Any, Any]:
    try:
        from math_verify import parse, verify
    except ImportError:
        raise SettingError("reward 'math' needs the package math-verify; pip install 'turnwise[rewards]'") from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off: ours are on
    return parse, verify


# ----------------------------------------------------------------------- code


def code(completion: str, tests: Any, *, seconds: float = 4.0, partial: bool = False) -> float | dict[str, Any] | None:
    """1 if the program in the answer passes every test in the sandbox; ``partial``: the share it passes.

    ``tests`` is Python text, a list of such texts, or ``{"inputs": [...], "outputs": [...]}`` of a program that reads and prints.
    """
    from turnwise.rewards.code_tests import run_tests

    if tests is None:
        return None
    text = THOUGHTS.sub("", completion[-MAX_TEXT:], count=1)
    blocks = FENCED.findall(text)
    passed, total = run_tests(blocks[-1] if blocks else text, tests, seconds)
    right = total > 0 and passed == total
    return {"score": passed / max(1, total) if partial else float(right), "success": right, "tests_passed": passed}
