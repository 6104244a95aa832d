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
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from turnwise.errors import SettingError

THOUGHTS = re.compile(r"^.*</think>", re.DOTALL)
HASHES = re.compile(r"####\s*(.+)")
FENCED = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"[-+]?[0-9]{1,40}(\.[0-9]{1,40})?")
THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
MAX_TEXT = 100_000  # characters of an answer that are read
SET_APART = {"<super>": "^", "<sub>": "_", "<fraction>": " ", "<circle>": " "}
PAIRS = dict(zip("\"'`*$“‘", "\"'`*$”’"))  # marks around an answer
SENTENCE_END = ".。,;:"


# ---------------------------------------------------------------------- match


def exact(
    completion: str, answer: Any, *, ignore_case: bool = True, whole: bool = False
) -> float | dict[str, Any] | None:
    """1 if the final answer equals the reference, or one of several. ``whole``: compare the whole text, and find no final answer
    in tags, a box or after ####."""
    if answer is None:
        return None
    said = completion[-MAX_TEXT:] if whole else final_answer(completion)
    references = answer if isinstance(answer, list | tuple) else [answer]
    texts = [str(r) if whole else final_answer(str(r)) for r in references]
    # marks alone come to nothing: then only the same marks are equal, and silence is no answer to "*"
    equal = any(
        normalise(said, ignore_case) == normalise(text, ignore_case)
        and (bool(normalise(text)) or said.strip() == text.strip())
        for text in texts
    )
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


def last_block(text: str) -> str:
    """The last fenced block of an answer, after any thinking; all of it if there is none."""
    text = THOUGHTS.sub("", text[-MAX_TEXT:], count=1)
    blocks = FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


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
    for character in set(text) if not text.isascii() else ():  # 5² is not 52, nor 2½ the number 21⁄2
        if (mark := SET_APART.get(unicodedata.decomposition(character).split(" ")[0])) is not None:
            text = text.replace(character, mark + character)
    text = " ".join(_bare(unicodedata.normalize("NFKC", text)).split())
    number = THOUSANDS.sub("", text)
    if NUMBER.fullmatch(number):
        value = Decimal(number).normalize()
        return format(value if value else Decimal(0), "f")
    return text.casefold() if ignore_case else text


def _bare(text: str) -> str:
    """A text without marks around it and behind its sentence. Marks that mean something stay: .5 is not 5, f' not f, 3! not 3."""
    before = ""
    while text != before:
        before = text = text.strip()
        if PAIRS.get(text[:1]) == text[-1:]:
            text = text[1:-1]
        elif text[-1:] and (text[-1] in SENTENCE_END or (text[-1] == "!" and text[-3:-1].isalpha() and len(text) > 2)):
            text = text[:-1]
    return text


def majority(completions: list[Any], *, pattern: str = "", ignore_case: bool = True) -> list[float]:
    """1 for each answer that equals the one most answers of the group give: a label without a reference. ``pattern``: the final
    answer is what it matches last (its first group, where it has one); an answer without a match is wrong and has no vote.

    Of equally frequent answers, the one that reaches their count first is the label."""
    votes: list[str | None] = []
    for completion in completions:
        text = completion
        if not isinstance(completion, str):  # a dialogue: the last message by the policy
            spoken = [str(m.get("content") or "") for m in completion if m.get("role") == "assistant"]
            text = spoken[-1] if spoken else ""
        if not pattern:
            votes.append(normalise(final_answer(text), ignore_case) or None)
            continue
        matches = list(re.finditer(pattern, text[-MAX_TEXT:], re.DOTALL))
        answer = matches[-1][1 if matches[-1].re.groups else 0] or "" if matches else ""
        votes.append(normalise(answer, ignore_case) or None)
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


def _check_pattern(reward: str, pattern: str = "", **_: Any) -> None:
    try:
        re.compile(pattern)
    except re.error as fault:
        raise SettingError(f"reward {reward!r}: {pattern!r} is no regular expression: {fault}") from fault


check_majority, check_regex = partial(_check_pattern, "majority"), partial(_check_pattern, "regex")


def regex(completion: str, *, pattern: str, full: bool = False) -> float:
    """1 if the pattern matches somewhere in the answer; ``full``: if it matches all of it."""
    if full:  # an answer that is longer than what is read does not match
        return float(len(completion) <= MAX_TEXT and re.fullmatch(pattern, completion, re.DOTALL) is not None)
    return float(re.search(pattern, completion[-MAX_TEXT:], re.DOTALL) is not None)


def json_schema(completion: str, schema: Any = None, *, file: str = "") -> float | None:
    """1 if the answer is JSON, alone or in its last fenced block, that the schema accepts: that of ``file``, or of the column
    ``schema``."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    validator = _validator(Path(file).read_text(encoding="utf-8") if file else text)
    if validator is None:
        return None
    try:
        return float(validator.is_valid(strict_json(last_block(completion))))
    except (ValueError, RecursionError):
        return 0.0


def strict_json(text: str) -> Any:
    """A JSON value that every reader understands alike: raises ``ValueError`` for a key that occurs twice, NaN and Infinity."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, object_pairs_hook=once, parse_constant=refuse)


def check_json_schema(file: str = "") -> None:
    _needed("json_schema", "jsonschema")
    if file and not Path(file).is_file():
        raise SettingError(f"reward 'json_schema': there is no file {file}")


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """None where a row has no schema. Nothing is downloaded: a reference must be inside the schema."""
    jsonschema = _needed("json_schema", "jsonschema")
    from referencing import Registry

    parsed = json.loads(schema)
    if parsed is None:
        return None
    kind = jsonschema.validators.validator_for(parsed)
    kind.check_schema(parsed)
    return kind(parsed, registry=Registry())


def _needed(reward: str, package: str) -> Any:
    try:
        return import_module(package.replace("-", "_"))
    except ImportError:
        raise SettingError(
            f"reward {reward!r} needs the package {package}; pip install 'turnwise-rl[rewards]'"
        ) from None


# ----------------------------------------------------------------------- math


def math(completion: str, answer: Any) -> float | dict[str, Any] | None:
    """1 if the final answer is mathematically equal to the reference (package math-verify)."""
    if answer is None:
        return None
    text = THOUGHTS.sub("", completion[-MAX_TEXT:], count=1)
    boxed = last_box(text)
    equal = _same_maths(final_answer(str(answer)), boxed if boxed is not None else final_answer(text))
    return {"score": float(equal), "success": equal}


# The library takes the last number that it can read and passes over these: a text that has them says something else.
PASSED_OVER = re.compile(
    r"\\not\b|\\neq?\b|\\neg\b|\\mid\b|\\to\b|≠|→|\bnot\b|\.\.|'|(?<=[0-9])_|(?<=[0-9])\s*\|\s*(?=[0-9])|\?"
    r"|(?:[-+*/^]|\\(?:cdot|times|div))[\s.$}]*$"
)
RELATION = re.compile(r"[<>≤≥≈]|\\(?:l|g)(?:eq?|eqslant|t)?\b|\\(?:approx|simeq|sim|equiv|propto)\b")
UNIT = re.compile(
    r"[0-9][\s\\,~}]*(?:\\(?:text|mathrm|mbox|textrm)\s*\{)?[\s\\,]*([A-Za-z]+)[\s.}]*(?:\^\s*\{?([0-9])\}?)?[\s.}]*$"
)
UNITS = {  # words of one unit; the library drops them all
    word: words[0]
    for words in map(str.split, (
        "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre", "mg milligram",
        "g gram", "kg kilogram", "ml milliliter millilitre", "l liter litre", "s sec second", "min minute", "h hr hour", "day",
        "week", "month", "year", "cent", "dollar", "inch", "ft foot feet", "mile", "mph", "am", "pm",
    ))
    for word in words
}  # fmt: skip
LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
SUMMAND = re.compile(r"[-+*/^(]\s*([A-Za-z])(?![A-Za-z])")  # a letter that takes part in a calculation
# a question is no answer to itself: 48 + 14 is equal to 62. Scientific notation is a number
CALCULATION = re.compile(r"[0-9)}]\s*(?:[-+*×·]|\\(?:times|cdot|div)\b(?!\s*10\s*\^))\s*[0-9({\\]")
WORD = re.compile(r"(?:\\text\s*\{)?\s*([A-Z]{2,})\s*\}?")  # which the library reads as a product of letters


def _same_maths(reference: str, answer: str) -> bool:
    if len(PASSED_OVER.findall(answer)) != len(PASSED_OVER.findall(reference)):
        return False
    if RELATION.search(answer) and not RELATION.search(reference):
        return False
    if WORD.fullmatch(reference.strip()):
        return normalise(re.sub(r"\\text\s*|[{}]", "", answer)) == normalise(re.sub(r"\\text\s*|[{}]", "", reference))
    plain = [THOUSANDS.sub("", text.strip()) for text in (reference, answer)]
    if all(NUMBER.fullmatch(text) for text in plain):  # the library rounds
        return Decimal(plain[0]) == Decimal(plain[1])
    if NUMBER.fullmatch(plain[0]) and CALCULATION.search(" ".join(answer.split("=")[-1].split())):
        return False
    units = {_unit(text) for text in (reference, answer)} - {None}
    sides, wanted = answer.split("="), reference.split("=")
    if len(units) > 1 or (len(wanted) > 1 and len(sides) == 1 and len(LETTER.findall(wanted[0])) > 1):
        return False  # other units, or a number for an equation
    if not set(SUMMAND.findall(sides[-1])) <= set(re.findall("[A-Za-z]", reference)):
        return False  # 12 + c is no 12
    # of 8 = 7 the library reads the 7: each side that is a number must be the answer
    numbers = (
        [side for side in sides if side.strip() and not LETTER.search(side)] if len(wanted) == 1 < len(sides) else []
    )
    return _verified(reference, answer) and all(_verified(reference, side) for side in numbers[:8])


def _unit(text: str) -> str | None:
    if (match := UNIT.search(text[-200:])) is None:
        return None
    word, power = match[1].lower(), match[2] or ""
    unit = UNITS.get(word) or UNITS.get(word.removesuffix("s"))
    return unit and unit + power


def _verified(reference: str, answer: str) -> bool:
    library = _needed("math", "math-verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off: ours are on
    parsed = []
    try:
        for text in (reference.strip(), answer.strip()):
            # in the form that it reads best; a long text as it is: it finds the last expression
            short = len(text) <= 200 and not any(mark in text for mark in ("$", "\\boxed", "\n"))
            parsed.append(library.parse(f"${text}$" if short else text, parsing_timeout=None))
        return bool(parsed[0]) and bool(library.verify(*parsed, timeout_seconds=None))
    except Exception:  # an expression that cannot be read, or that SymPy cannot compare
        return False


def check_math() -> None:
    _same_maths("1", "2")  # loads parsers


# ----------------------------------------------------------------------- code


def code(completion: str, tests: Any, *, seconds: float = 4.0, partial: bool = False) -> float | dict[str, Any] | None:
    """1 if the program in the answer passes every test in the sandbox; ``partial``: the share it passes.

    ``tests`` is Python text, a list of such texts, or ``{"inputs": [...], "outputs": [...]}`` of a program that reads and prints.
    """
    if tests is None:
        return None
    from turnwise.rewards.programs import run_tests  # late: every run parses rewards, few run code

    passed, total = run_tests(last_block(completion), tests, seconds)
    right = total > 0 and passed == total
    return {"score": passed / max(1, total) if partial else float(right), "success": right, "tests_passed": passed}
