"""Equations written in Unicode, as LaTeX: ``Aᵢ = (Rᵢ − mean)/(std + ε)`` → ``A_{i} = \\frac{R_{i} - \\operatorname{mean}}{...}``.

Docstrings of recipes keep their equations in Unicode, so that a terminal shows them. The site and GitHub show LaTeX. The
converter knows the notation of those docstrings and no other: an unknown character raises ``Unreadable`` and the page shows
the line as it is. It does not check that an equation is right.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

GREEK_NAMES = """alpha beta gamma delta varepsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon varphi
chi psi omega Gamma Delta Theta Lambda Xi Phi Psi Omega"""
GREEK = dict(zip("αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΦΨΩ", GREEK_NAMES.split()))
SYMBOLS = {
    "Σ": r"\sum", "Π": r"\prod", "∇": r"\nabla", "∂": r"\partial", "·": r"\cdot", "≤": r"\le", "≥": r"\ge", "≠": r"\ne",
    "←": r"\leftarrow", "→": r"\to", "±": r"\pm", "‖": r"\|", "½": r"\tfrac{1}{2}", "…": r"\dots", "∝": r"\propto",
    "∈": r"\in", "⌈": r"\lceil", "⌉": r"\rceil", "≻": r"\succ", "ℓ": r"\ell", "−": "-", "~": r"\sim", "∣": "|",
    ":=": r"\mathrel{:=}", "|": "|", "+": "+", "-": "-", "=": "=", "<": "<", ">": ">", ",": ",", ":": ":",
    ".": ".", "'": "'", "%": r"\%", ";": ";",
}  # fmt: skip
LOWER = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ", "0123456789+-aehijklmnoprstuvx"))
UPPER = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ʲᵏⁿᵖᵀ", "0123456789+-jknpT"))
MARKS = {"\u0304": r"\bar", "\u0302": r"\hat"}
FUNCTION_NAMES = """min max log exp clip mean std median whiten sg softmax softmin softplus clipped argmax sin cos tanh Var
KL Beta"""
FUNCTIONS = frozenset(FUNCTION_NAMES.split())
NATIVE = frozenset(("min", "max", "log", "exp", "sin", "cos", "tanh"))  # LaTeX has commands for these
CLOSING = {"(": ")", "[": "]", "{": "}"}
TOKEN = re.compile(
    r":=|[A-Za-z]+'s\b|[A-Za-z]+(?:-[A-Za-z]+)+|[A-Za-z]+\d+[A-Za-z0-9]*|[A-Za-z]+|\d+(?:\.\d+)?(?:k\b)?|\s+|.",
    re.DOTALL,
)
NAMES = frozenset(["low", "high", "cap", "eps", "lr", "far_low", "far_high"])
NAME_MARK = "\u2060"  # before a word that stands for a number


class Unreadable(ValueError):
    """A character or a bracket that the notation does not have."""


@dataclass
class Atom:
    """One item of a formula. ``kind`` is symbol, word, number, group, operator or space."""

    kind: str
    latex: str
    inner: str = ""  # of a group: what is between its brackets


def latex(text: str, names: Iterable[str] = ()) -> str:
    """One formula; ``names`` are words that stand for numbers, such as hyper-parameters. Raises ``Unreadable``."""
    return _join(_fractions(_atoms(_prepare(text), frozenset(names))))


def lines(text: str, names: Iterable[str] = ()) -> list[tuple[str, str]]:
    """The equation paragraph of a docstring as ("maths" | "prose", LaTeX or Markdown) items, one for each displayed line.

    A part with several words outside brackets is a sentence: its formulas become inline maths, so that a browser can wrap it.
    """
    out = []
    for part in _split(_prepare(text)):
        atoms = _fractions(_atoms(part, frozenset(names)))
        words = sum(atom.kind == "word" for atom in atoms)
        symbols = sum(atom.kind in ("symbol", "group", "number") for atom in atoms)
        if words >= 3 or not symbols:
            out.append(("prose", _sentence(atoms)))
        else:
            out.append(("maths", _join(atoms)))
    return out


def _prepare(text: str) -> str:
    text = " ".join(line.strip() for line in text.splitlines())
    text = re.sub(r"``?([^`]+)``?", r"\1", text)
    text = re.sub(r"\*(\w+)\*", r"\1", text)
    return "".join(unicodedata.normalize("NFD", char) if char.isalpha() else char for char in text)


def _split(text: str) -> list[str]:
    """At ``;`` outside brackets, and at a comma with two spaces behind it."""
    parts, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        wide = text[place : place + 3] == ",  "
        if depth == 0 and (char == ";" or wide):
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def _atoms(text: str, names: frozenset[str]) -> list[Atom]:
    names = NAMES | names - FUNCTIONS
    tokens = []
    for token in TOKEN.findall(text):
        if token in names and len(token) > 1:
            tokens.append(NAME_MARK + token)
        else:  # a product of two symbols is written without a space: sA
            tokens.extend(token if re.fullmatch(r"[a-z][A-Z]", token) else [token])
    atoms, place = _read(tokens, 0, "")
    if place != len(tokens):
        raise Unreadable(text)
    return atoms


def _read(tokens: list[str], place: int, until: str) -> tuple[list[Atom], int]:
    atoms: list[Atom] = []
    while place < len(tokens):
        token = tokens[place]
        if token == until:
            return atoms, place + 1
        if token in CLOSING:
            inner, place = _read(tokens, place + 1, CLOSING[token])
            body = _join(_fractions(inner))
            left, right = (r"\{", r"\}") if token == "{" else (token, CLOSING[token])
            tall = re.search(r"\\(frac|sum|prod|sqrt)", body)
            atoms.append(
                Atom("group", rf"\left{left} {body} \right{right}" if tall else f"{left} {body} {right}", body)
            )
        elif token in ("_", "^"):
            script, place = _script(tokens, place + 1)
            _attach(atoms, token, script)
        elif token in LOWER or token in UPPER:
            run = ""
            table, sign = (LOWER, "_") if token in LOWER else (UPPER, "^")
            while place < len(tokens) and tokens[place] in table:
                run, place = run + table[tokens[place]], place + 1
            _attach(atoms, sign, run)
        elif token in MARKS:
            atoms[-1].latex = f"{MARKS[token]}{{{atoms[-1].latex}}}"
            place += 1
        elif token == "*" and atoms and atoms[-1].kind == "symbol":
            _attach(atoms, "^", "*")
            place += 1
        elif token == "'" and atoms and atoms[-1].kind == "symbol":
            atoms[-1].latex += "'"
            place += 1
        elif token == "√":
            inner, place = _root(tokens, place + 1)
            atoms.append(Atom("symbol", rf"\sqrt{{{inner}}}"))
        else:
            place = _plain(tokens, place, atoms)
    if until:
        raise Unreadable(f"no {until}")
    return atoms, place


def _plain(tokens: list[str], place: int, atoms: list[Atom]) -> int:
    token, after = tokens[place], tokens[place + 1] if place + 1 < len(tokens) else ""
    if token.isspace():
        atoms.append(Atom("space", " "))
    elif token[0].isdigit():
        atoms.append(Atom("number", r"\mathbf{1}" if token == "1" and after == "[" else token))
    elif token[0] == NAME_MARK:
        long_name = after == "_" and re.fullmatch(
            r"[a-z]{2,}", "".join(tokens[place + 2 : place + 3]).lstrip(NAME_MARK)
        )
        name = token[1:] + (rf"\_{tokens[place + 2].lstrip(NAME_MARK)}" if long_name else "")
        atoms.append(Atom("symbol", rf"\mathrm{{{name}}}"))
        return place + (3 if long_name else 1)
    elif token in GREEK:
        atoms.append(Atom("symbol", "\\" + GREEK[token]))
    elif token in SYMBOLS or token == "/":
        atoms.append(Atom("operator", SYMBOLS.get(token, "/")))
    elif token.isascii() and token[0].isalpha():
        long_name = (
            after == "_" and len(token) > 1 and re.fullmatch(r"[a-z]{2,}", "".join(tokens[place + 2 : place + 3]))
        )
        article = (
            token == "a" and after.isspace() and re.fullmatch(r"[a-z]{2,}", "".join(tokens[place + 2 : place + 3]))
        )
        if long_name and token not in FUNCTIONS:
            atoms.append(Atom("word", f"{token}_{tokens[place + 2]}"))
            return place + 3
        if len(token) == 1 and not article:
            atoms.append(Atom("symbol", token))
        elif token in FUNCTIONS or after in ("(", "[", "_") or after in LOWER or after in UPPER:
            atoms.append(Atom("function", f"\\{token}" if token in NATIVE else rf"\operatorname{{{token}}}"))
        elif re.search(r"\d", token) or (token.isupper() and len(token) <= 4):
            atoms.append(Atom("symbol", rf"\mathrm{{{token}}}"))
        else:
            atoms.append(Atom("word", token))
    else:
        raise Unreadable(token)
    return place + 1


def _script(tokens: list[str], place: int) -> tuple[str, int]:
    if tokens[place] == "{":
        inner, place = _read(tokens, place + 1, "}")
        return _join(inner), place
    word = tokens[place].lstrip(NAME_MARK)
    if len(word) > 1 and word.isascii():
        return rf"\text{{{word}}}", place + 1
    inner: list[Atom] = []
    place = _plain(tokens, place, inner)
    return inner[0].latex, place


def _root(tokens: list[str], place: int) -> tuple[str, int]:
    """What a root covers: the next bracket, or a function with its bracket."""
    if tokens[place] == "(":
        inner, place = _read(tokens, place + 1, ")")
        return _join(_fractions(inner)), place
    inner, rest = _read(tokens[place : place + 1], 0, "")
    if place + 1 < len(tokens) and tokens[place + 1] == "(":
        body, after = _read(tokens, place + 2, ")")
        return f"{_join(inner)}({_join(_fractions(body))})", after
    return _join(inner), place + rest


def _attach(atoms: list[Atom], sign: str, script: str) -> None:
    if not atoms:
        raise Unreadable(sign)
    base = atoms[-1]
    if base.kind == "word":
        base.kind, base.latex = "function", rf"\operatorname{{{base.latex}}}"
    if base.latex in (r"\sum", r"\prod") and sign == "_":
        base.latex += r"\limits"
    base.latex += f"{sign}{{{script}}}"
    if base.kind == "group":
        base.inner = ""


def _fractions(atoms: list[Atom]) -> list[Atom]:
    """``x/y`` as a fraction where both sides are single items; ``(…) / (…)`` too. Everything else keeps its slash."""
    out: list[Atom] = []
    place = 0
    while place < len(atoms):
        if atoms[place].latex == "/" and out:
            wide = out[-1].kind == "space"
            above = out[-2] if wide and len(out) > 1 else out[-1]
            place_below = place + 1 + wide
            under = _under(atoms, place_below)
            before = out[-2 - wide].kind if len(out) > 1 + wide else "space"
            tight_call = above.kind == "group" and before in ("symbol", "function", "word", "group")
            plain = above.kind in (("group",) if wide else ("symbol", "number", "group")) and not tight_call
            if (
                under
                and plain
                and (not wide or under[0].kind == "group")
                and not (above.kind == "group" and not above.inner)
            ):
                del out[-1 - wide :]
                top = above.inner if above.kind == "group" else above.latex
                out.append(Atom("symbol", rf"\frac{{{top}}}{{{under[0].inner or under[0].latex}}}"))
                place = under[1]
                continue
        out.append(atoms[place])
        place += 1
    return out


def _under(atoms: list[Atom], place: int) -> tuple[Atom, int] | None:
    """The denominator that begins here, and where it ends."""
    if place >= len(atoms):
        return None
    first, after = atoms[place], atoms[place + 1] if place + 1 < len(atoms) else Atom("space", " ")
    if first.latex == "|" or (first.latex == r"\sum" and after.latex == "|"):
        skip = 1 + (first.latex != "|")
        ends = [n for n in range(place + skip, len(atoms)) if atoms[n].latex == "|"]
        return (Atom("symbol", _join(atoms[place : ends[0] + 1])), ends[0] + 1) if ends else None
    if first.kind == "number" and after.kind == "symbol":
        return Atom("symbol", _join([first, after])), place + 2
    if first.kind == "word":
        return Atom("symbol", rf"\text{{{first.latex}}}"), place + 1
    if first.kind == "function" and first.latex == r"\operatorname{std}" and after.kind != "group":
        return first, place + 1
    if first.kind in ("symbol", "number", "group") and after.kind != "group" and first.latex != r"\partial":
        return first, place + 1
    return None


def _join(atoms: list[Atom]) -> str:
    out, run = [], []
    for atom in [*atoms, Atom("end", "")]:
        if atom.kind == "word" or (atom.kind == "space" and run):
            run.append(atom.latex)
            continue
        if run:
            words = " ".join("".join(run).split()).replace("_", r"\_")
            out.append(rf"\text{{ {words} }}")
            run = []
        out.append(atom.latex)
    return re.sub(r" +", " ", " ".join(part for part in out if part.strip())).strip()


def _sentence(atoms: list[Atom]) -> str:
    """Words as Markdown, formulas between them as inline maths."""
    out, formula = [], []

    def flush() -> None:
        if [a.kind for a in formula if a.kind != "space"] == ["function"]:  # alone among words it is one of them
            out.append(re.sub(r"\\operatorname\{(\w+)\}|\\(\w+)", r"\1\2", _join(formula)))
            formula.clear()
            return
        body = _join(formula)
        head = re.match(r"[,:;.]?", body).group()
        out[-1:] = [out[-1] + head] if out and head else out[-1:]
        body = body[len(head) :].strip()
        tail = re.search(r"[,:;.]?$", body).group()  # punctuation belongs to the sentence
        body = body[: len(body) - len(tail)].strip()
        out.append((f"${body}$" if body else "") + tail)
        formula.clear()

    for atom in atoms:
        if atom.kind == "word":
            if any(a.kind != "space" for a in formula):
                flush()
            formula.clear()
            out.append(atom.latex)
        else:
            formula.append(atom)
    if any(a.kind != "space" for a in formula):
        flush()
    return re.sub(r" ([,:;.])(?= |$)", r"\1", " ".join(out))
