"""The pages under docs/methods, one for each family, from the docstrings and slots of the recipes.

    python docs/hooks/method_pages.py docs/methods

A page repeats nothing that a recipe does not say. It does not know what a method scores: docs/evidence does.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import equations

from turnwise import recipes
from turnwise.algebra.piece import text
from turnwise.observe.mechanism import percent
from turnwise.recipes import catalogue
from turnwise.recipes.recipe import Kind, Recipe

GENERATED = "<!-- Written by `make docs` from the docstrings of the recipes. Do not edit. -->"
SECTIONS = ("Paper", "Settings", "Deviation", "Sure of")
KINDS = {
    Kind.OBJECTIVE: "ratio, clipping or trust region, and what the loss averages over",
    Kind.CREDIT: "credit assignment; combines with any objective: --credit",
    Kind.DATA: "learns from further data: demonstrations, replay, a teacher",
    Kind.PREFERENCE: "learns from pairs of a chosen and a rejected answer",
}
TITLES = {  # file of a family: title of its page
    "critic_free": "Objectives without a critic",
    "actor_critic": "Actor-critic objectives",
    "trust_region": "Trust regions and importance ratios",
    "sampler_mismatch": "Corrections for sampler mismatch",
    "off_policy": "Off-policy objectives",
    "entropy": "Entropy control",
    "tool_agents": "Tool-using agents",
    "turn_credit": "Credit by turn and by state",
    "group_credit": "Credit inside a group",
    "segment_credit": "Credit by segment and by tree",
    "reward_shaping": "Reward shaping",
    "experts_and_replay": "Experts, teachers and replay",
    "selection": "Selected and past data",
    "values": "Values of tokens and corrected sampling",
    "preferences": "Preferences",
}


SHORT_RUNS = Path(__file__).parents[2] / "experiments" / "results" / "method_acts.jsonl"
VERDICTS = {  # of a short run, and the mark in the table
    "acted": "x", "plain": "=", "warned at start": "w", "warned later": "l", "refused": "r", "silent": "SILENT", "died": "DIED",
}  # fmt: skip


def pages() -> dict[str, str]:
    """Every page by its file name."""
    families = {family.__name__.rsplit(".", 1)[-1]: family for family in recipes.FAMILIES}
    made = {f"{name}.md": family_page(name) for name in families}
    return {"index.md": index_page(list(families)), **made, "acts.md": acts_page()}


@cache
def short_runs() -> dict[str, dict[str, dict]]:
    """Of each method, what became of its short run in each environment."""
    rows = map(json.loads, SHORT_RUNS.read_text(encoding="utf-8").splitlines())
    return {row["name"]: row["cells"] for row in rows if row["kind"] == "method"}


def acts_page() -> str:
    """One table: every method in every environment."""
    runs = short_runs()
    envs = list(next(iter(runs.values())))
    totals = Counter(cell["verdict"] for cells in runs.values() for cell in cells.values())
    lines = [
        f"| `{name}` | {' | '.join(VERDICTS[runs[name][env]['verdict']] for env in envs)} |"
        for name in recipes.METHODS if name in runs
    ]  # fmt: skip
    return "\n".join([
        "# Does it act?", "", GENERATED, "",
        "Three steps of every method in every built-in environment and on prompts of a file, with a tiny model and the method's "
        "defaults (`python experiments/method_acts.py`). The meter compares each of its slots with GRPO's on the same batch "
        "([Concepts](../concepts.md)). Each method's own page says how much acted, and why it was refused.", "",
        f"{sum(totals.values()):,} runs of {len(runs)} methods: " + ", ".join(
            f"{totals[verdict]:,} {verdict} ({mark})" for verdict, mark in VERDICTS.items() if totals[verdict]
        ) + ". Plain: the method differs from GRPO in nothing that is measured. Warned: nothing of it acted, and the run said so "
        "at its start or after the third step. Refused: the run said what it lacks and what to write.", "",
        f"| method | {' | '.join(envs)} |", "|---" * (len(envs) + 1) + "|", *lines, "",
    ])  # fmt: skip


def short_run_words(cells: dict[str, dict]) -> str:
    """What the short runs of a method showed: where it acted and how much at most, and what became of the others."""
    largest = Counter[str]()
    others: dict[str, list[str]] = {}
    for env, cell in cells.items():
        largest |= Counter(cell.get("acted", {}))
        if cell["verdict"] != "acted":
            reason = cell.get("why", "").split(";")[0].replace(env, "…")
            others.setdefault(cell["verdict"] + f" ({reason})" * bool(reason), []).append(env)
    acted = sum(cell["verdict"] == "acted" for cell in cells.values())
    shares = ", ".join(f"{slot} {percent(share)}" for slot, share in largest.items())
    words = [f"In {acted} of {len(cells)} short runs" + f"; at most {shares}" * bool(shares)]
    return ". ".join([*words, *(f"{sentence(what)[:-1]}: {', '.join(envs)}" for what, envs in others.items())])


def title_of(family: str) -> str:
    return TITLES.get(family, family.replace("_", " ").capitalize())


def members(family: str) -> list[str]:
    return [name for name in recipes.METHODS if recipes.method(name).__module__.rsplit(".", 1)[-1] == family]


def index_page(families: list[str]) -> str:
    """All methods in one table a family."""
    lines = [
        "# Methods",
        "",
        GENERATED,
        "",
        f"{len(recipes.METHODS)} published methods. Each is one short function that names a piece for every slot it changes. "
        "`turnwise explain NAME` prints a method, `turnwise diff A B` prints the slots in which two methods differ.",
        "",
        "Every method is tested against an independent float64 implementation of its equation, and for invariance to packing "
        "order and micro-batch size. What papers' claims come to in runs is on the page [Evidence](../evidence/index.md).",
        "",
        "| kind | question it answers |",
        "|---|---|",
        *(f"| {kind} | {KINDS[kind]} |" for kind in Kind),
    ]
    for family in families:
        lines += ["", f"## [{title_of(family)}]({family}.md)", "", "| method | kind | idea |", "|---|---|---|"]
        for name in members(family):
            entry = catalogue.describe_method(name)
            lines.append(f"| [`{name}`]({family}.md#{name}) | {entry['kind']} | {cell(idea(name))} |")
    return "\n".join(lines) + "\n"


def family_page(family: str) -> str:
    """The methods of one family, each with its equation."""
    about = sys.modules[recipes.method(members(family)[0]).__module__].__doc__ or ""
    lines = [f"# {title_of(family)}", "", GENERATED, "", " ".join(about.split("\n\n")[0].split())]
    for name in members(family):
        lines += ["", *method_section(name)]
    return "\n".join(lines) + "\n"


def method_section(name: str) -> Iterator[str]:
    doc = inspect.getdoc(recipes.method(name)) or ""
    entry = catalogue.describe_method(name)
    title = doc.splitlines()[0].split(": ", 1)[0]
    yield from (f"## {name}", "", f"**{title}.** {sentence(idea(name))}", "")
    yield from equation(doc, name)
    for section in SECTIONS:
        body = catalogue.docstring_section(doc, section)
        if body:
            yield from (f"**{section}.** {sentence(body)}", "")
    for title, said in entry["sources"].items():
        yield from (f"**{title}.** {sentence(said)}", "")
    if entry["parameters"]:
        values = ", ".join(f"`{key}={value!r}`" for key, value in entry["parameters"].items())
        yield from (f"**Hyper-parameters.** {values}", "")
    if entry["sets"]:
        sets = ", ".join(f"`{key}={value}`" for key, value in entry["sets"].items())
        yield from (f"**Sets, where you do not.** {sets}", "")
    wants = [*(n for n in entry["needs"] if n not in ("logp", "entropy")), *entry["requirements"]]
    if wants:
        yield from (f"**Needs.** {', '.join(f'`{want}`' for want in dict.fromkeys(wants))}", "")
    if entry["idle_without"]:
        lacking = ", ".join(f"`{want}`" for want in entry["idle_without"])
        yield from (f"**A part does nothing without.** {lacking}", "")
    if cells := short_runs().get(name):
        yield from (f"**[Acted](acts.md).** {sentence(short_run_words(cells))}", "")
    yield from ("| slot | piece |", "|---|---|")
    defaults = default_slots()
    for slot, piece in entry["slots"].items():
        if piece != defaults.get(slot):
            escaped = piece.replace("|", "\\|")
            yield f"| {slot} | `{escaped}` |"


def idea(name: str) -> str:
    """The first paragraph of a docstring, without the method's title."""
    first = (inspect.getdoc(recipes.method(name)) or "").split("\n\n")[0]
    return " ".join(first.split()).split(": ", 1)[-1]


def equation(doc: str, name: str) -> Iterator[str]:
    """The paragraphs between the first one and the sections, as display maths; as they are where that fails."""
    paragraphs = [part for part in doc.split("\n\n")[1:] if not re.match(rf"({'|'.join(SECTIONS)}): ", part)]
    for paragraph in paragraphs:
        try:
            shown = equations.lines(paragraph, recipes.parameters(name))
        except equations.Unreadable:
            yield from ("```text", paragraph, "```", "")
            continue
        for kind, body in shown:
            yield from ("$$", body, "$$", "") if kind == "maths" else (body, "")


def default_slots() -> dict[str, str]:
    """The piece of every slot that a recipe may leave out."""
    found = {}
    for slot in fields(Recipe):
        if slot.default_factory is not MISSING:
            found[slot.name] = text(slot.default_factory())
        elif slot.default is not MISSING:
            found[slot.name] = text(slot.default)
    return found


def sentence(body: str) -> str:
    """Capitalised, with a stop, and safe for Markdown."""
    body = body.replace("|", "\\|").replace("$", "\\$")
    body = body[:1].upper() + body[1:]
    return body if body.endswith((".", "?")) else body + "."


def cell(body: str) -> str:
    return sentence(body).replace("\n", " ")


def write(folder: Path) -> None:
    """Write all pages and remove those of families that are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    made = pages()
    for old in folder.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, body in made.items():
        (folder / name).write_text(body, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
