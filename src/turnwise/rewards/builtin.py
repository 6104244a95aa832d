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
    """1 if the final answer is mathematically equal to the reference (package math-verify). Without a box, a tag or ####, the
    final answer is what the last sentence says."""
    if answer is None:
        return None
    text = THOUGHTS.sub("", completion[-MAX_TEXT:], count=1)
    boxed = last_box(text)
    last = final_answer(text) if boxed is None else boxed
    if boxed is None and last == text:
        last = re.split(r"(?<=[.!?])\s+|\n", text.strip())[-1]
        if (
            len(last) <= 300
            and (one := ONE_NUMBER.fullmatch(last))
            and not MEANT & set(re.findall("[a-z]+", last.lower()))
        ):
            last = one[1]
    equal = _same_maths(final_answer(str(answer)), last)
    return {"score": float(equal), "success": equal}


# What an answer may be. The library takes the last thing that it can read and passes over the rest, so what is not listed here is
# no answer, unless the reference has it, too.
COMMANDS = frozenset(re.findall(r"\S+", r"""
    \frac \sqrt \pi \infty \cdot \times \div \pm \cup \cap \binom \{ \} \% \sin \cos \tan \cot \sec \csc \arcsin \arccos \arctan
    \sinh \cosh \tanh \log \ln \exp + - * / ^ ( ) [ ] { } ! ,"""))  # fmt: skip
RELATIONS = frozenset(("<", ">", *(f"\\{name}{slant}" for name in "lg" for slant in ("e", "eq", "eqslant", "t"))))
SPELLINGS = tuple(  # other ways to write the same, in the order in which they are replaced
    (re.compile(pattern), plain)
    for pattern, plain in (
        ("[−–]", "-"), ("×", r"\\times "), ("[·⋅]", r"\\cdot "), ("÷", r"\\div "), ("π", r"\\pi "), ("∞", r"\\infty "),
        ("∪", r"\\cup "), ("≤", r"\\le "), ("≥", r"\\ge "), ("±", r"\\pm "), (r"√\s*([0-9A-Za-z]+|\([^()]*\))", r"\\sqrt{\1}"),
        (r"\\(?:text|mathrm|mbox|textrm|textbf|textit|mathbf|operatorname)\s*\{([^{}]*)\}", r" \1 "), (r"\\[dtc]frac", r"\\frac"),
        (r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![A-Za-z])|\\?\$|\\!|\*\*|`", ""), (r"\{[bB]matrix\}", "{pmatrix}"),
        (r"\{,\}", ","), (r"(?<=[0-9])\\[,;: ](?=[0-9]{3}(?![0-9]))", ""),
        (r"(?:\s|(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z]))+", " "),
        (r"\s*\^?\s*\{?\s*(?:\\circ|°)\s*\}?|(?<=[0-9])\s*\b[Dd]egrees?\b", ""),
        (r"\s*(?:\\?%|\b[Pp]er ?cent\b)(?=[\s.,)\]]*$)", r"\\%"), (r"\s*\b(?:or|and)\b\s*|(?<=[0-9]);", ", "),
        (r"(?<=[0-9])\s+([0-9]+)/([0-9]+)(?![0-9])", r"\\frac{\1}{\2}"), (r"\^\s*([0-9]+|[A-Za-z])", r"^{\1}"),
        (r"\\exp\s*\(([^()]*)\)", r"e^{\1}"),
        (r"^\s*([-+]?[0-9.]+)[eE]([-+]?[0-9]{1,3})[\s.]*$", r"\1 \\times 10^{\2}"),
    )
)  # fmt: skip
LEAD = re.compile(
    r"^[\s*#]*(?:(?:so|thus|therefore|hence|the|final|correct|answer|result|value|solution|it|that|this|we|get|have|gives?|is|are|"
    r"equals?|to|be)\b[\s,:]*)+",
    re.IGNORECASE,
)
NOUN = re.compile(r"(?:(?<=[0-9)}.%])|(?<=\\pi))\s*([A-Za-z]+(?:[\s/.]+[A-Za-z]+)*)[\s.]*(?:\^\s*\{([0-9])\})?[\s.]*$")
UNITS = {  # words of one unit; the library drops them all
    word: words[0]
    for words in map(str.split, (
        "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre", "mg milligram",
        "g gram", "kg kilogram", "ml milliliter millilitre", "l liter litre", "s sec second", "min minute", "h hr hour", "day",
        "week", "month", "year", "cent", "dollar", "inch", "ft foot feet", "mile", "mph", "am", "pm",
    ))
    for word in words
}  # fmt: skip
MEANT = frozenset(re.findall(r"\w+", """
    not no or wrong false to of than thousand million billion trillion hundred dozen half halves third thirds quarter quarters
    tenths hundredths squared cubed times plus minus over mod more less fewer most least about pi ish repeating
    """))  # fmt: skip  # words that are part of what is said, and no noun behind it
ONE_NUMBER = re.compile(r"[A-Za-z ,:'$*]*?(-?[0-9][0-9,.]*%?[A-Za-z ,$]*)[.!*]*")  # a sentence with one number
TOKEN = re.compile(r"(?:[A-Za-z]|\\log)_(?:\w|\{\w+\})|\\[A-Za-z]+|\\.|[0-9]*\.?[0-9]+|[A-Za-z]+|\S", re.DOTALL)
NAME = re.compile(r"\s*(?:\\(?:angle|triangle)\s*)?[A-Za-z][A-Za-z ]*'?(?:_\w|_\{\w+\})?\s*(?:\([^()]{0,20}\))?\s*")
BETWEEN = r"\s*(?:\*|\\(?:times|cdot|div)(?![A-Za-z])(?!\s*10\s*\^))\s*"
# a question is no answer to itself: 48 + 14 is equal to 62
CALCULATIONS = tuple(map(re.compile, (
    r"[0-9A-Za-z)}!]\s*(?:[-+]|\\pm)\s*[0-9A-Za-z({\\]",
    rf"[0-9)}}!]{BETWEEN}[0-9(]|[0-9)]\s*\(\s*[0-9.]+\s*\)", r"[0-9]\s+[0-9]",
)))  # fmt: skip


def _same_maths(reference: str, answer: str) -> bool:
    if len(answer) > 200 + 4 * len(reference):
        return False
    wanted, said = _plain(reference), _plain(answer)
    letters = re.sub(r"[\s().]", "", wanted)
    if letters.isalpha() and (
        len(letters) > 2 or len(letters) == 1 or letters.isupper()
    ):  # which the library reads as a product
        return (
            said.strip("(). ") == letters
            if len(letters) == 1
            else normalise(said.strip("()")) == normalise(wanted.strip("()"))
        )
    (wanted, unit), (said, unit_said) = _without_noun(wanted), _without_noun(said)
    if any(MEANT & set(u) for u in (unit, unit_said)) and unit != unit_said:
        return False
    if unit and unit_said and unit != unit_said and {*unit, *unit_said} & {*UNITS.values(), "^"}:
        return False
    numbers = [THOUSANDS.sub("", text) for text in (wanted, said)]
    if all(map(NUMBER.fullmatch, numbers)):  # the library rounds
        return Decimal(numbers[0]) == Decimal(numbers[1])
    wanted, said = (number if NUMBER.fullmatch(number) else text for number, text in zip(numbers, (wanted, said)))
    (value, _), (value_said, sides_said) = _solved(wanted), _solved(said)
    if value is None or value_said is None:  # an equation
        return value is value_said and _listed(said, wanted) and _verified(wanted, said)
    # of 8 = 7 the library reads the 7: each side that is a number must be the answer
    return _listed(value_said, value) and all(_verified(value, side) for side in (value_said, *sides_said[:8]))


def _plain(text: str) -> str:
    """A text in one spelling, without its first words and a point behind it."""
    for pattern, plain in SPELLINGS:
        text = pattern.sub(plain, text)
    text = re.sub(r"^\s*[a-zA-Z]\s*\\in(?![A-Za-z])", "", LEAD.sub("", text))
    return text.strip(" \t\n*#:").removesuffix(".").strip()


def _without_noun(text: str) -> tuple[str, tuple[str, ...]]:
    """A value, and the words behind it: of units their first name, and a power."""
    match = NOUN.search(text[-200:])
    words = [w.lower() for w in re.split(r"[\s/.]+", match[1])] if match else []
    units = tuple(UNITS.get(w) or UNITS.get(w.removesuffix("s")) or w for w in words)
    if match is None or any(len(u) < 3 and u not in UNITS for u in units):  # 3x
        return text, ()
    return text[: len(text) - len(match[0])].strip(), (*units, *("^", match[2]) * bool(match[2]))


def _solved(text: str) -> tuple[str | None, list[str]]:
    """Of ``x = 14 / 2 = 7`` the last side, and of the others those that are numbers; None for an equation: no name or number is
    on its left."""
    parts = re.split(r",(?![^(\[{]*[)\]}])", text)
    rows = [part.split("=") for part in (parts if all("=" in part for part in parts) else [text])]
    number = lambda side: not re.search(r"(?<![\\A-Za-z])[A-Za-z]", side)  # noqa: E731
    if any(len(row) > 1 and not NAME.fullmatch(row[0]) and not number(row[0]) for row in rows):
        return None, []
    if len(rows) == 1:
        return rows[0][-1].strip(), [side for side in rows[0][:-1] if number(side)]
    values = ", ".join(row[-1].strip() for row in sorted(rows, key=lambda row: row[0].strip()))
    return values if len({row[0].strip() for row in rows}) < len(rows) else f"({values})", []


def _listed(answer: str, reference: str) -> bool:
    """Whether all that an answer consists of may be in one, or is in the reference."""
    said, wanted = (
        Counter(TOKEN.findall(re.sub(r"(?<![\w)}])\|([^|]*)\|", r"(\1)", text))) for text in (answer, reference)
    )
    letters = set(re.sub(r"\\[A-Za-z]+", "", reference))
    words = {t for t in said if t[0].isalpha() or t.startswith("\\log_")}
    if any(set(word.removeprefix("\\log")) - set("_{}") - letters for word in words):
        return False
    others = {t for t in said | wanted if not t[-1].isalnum() or t[0] == "\\"} - COMMANDS - RELATIONS - words
    if any(said[t] != wanted[t] for t in others - {"="}):
        return False
    several, several_said, relation, relation_said = (
        bool(kind & tokens.keys()) for kind in ({",", "\\pm"}, RELATIONS) for tokens in (wanted, said)
    )
    if (several_said and not several | relation) or (relation_said and not relation) or "{}" in answer.replace(" ", ""):
        return False
    if re.search(r"(?:[-+*/^]|\\(?:cdot|times|div|pm))\s*(?:$|[)}\],])", answer):
        return False
    bare = [re.sub(r"_(\w|\{\w+\})", "", text) for text in (answer, reference)]
    return not any(calculation.search(bare[0]) and not calculation.search(bare[1]) for calculation in CALCULATIONS)


def _verified(reference: str, answer: str) -> bool:
    library = _needed("math", "math-verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off: ours are on
    try:
        parsed = [library.parse(f"${text}$", parsing_timeout=None) for text in (reference, answer)]
        return bool(parsed[0]) and bool(library.verify(*parsed, float_rounding=12, timeout_seconds=None))
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
