"""Commands that list, describe and test what there is: methods, pieces of experience, environments, models, speed."""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.cli.flags import Parser
from turnwise.cli.output import print_json
from turnwise.config.settings import split_method
from turnwise.core.text import printable
from turnwise.errors import SettingError, nearest
from turnwise.recipes import signatures


def list_environments(argv: Sequence[str]) -> int:
    parser = Parser("environments", "All environments.")
    namespace = parser.parse(argv)
    from turnwise.cli import display
    from turnwise.environments import environment_rows

    rows = environment_rows()
    print_json(rows) if namespace.json else display.show_environments(rows)
    return 0


def list_methods(argv: Sequence[str]) -> int:
    parser = Parser("list", "All methods, or pieces of experience.")
    parser.add("words", nargs="*", metavar="WORD", help="only methods with each of these words in name, idea or paper")
    parser.add("--family", default="", help="only methods of this family")
    parser.add(
        "--needs",
        default="",
        metavar="WHAT",
        help="only methods that need this: reference, old_value, forks ...; none: nothing",
    )
    parser.add("--long", action="store_true", help="paper, kind, changes against grpo, needs and certainty of each too")
    parser.add(
        "--experience", action="store_true", help="list samplers, budgets, strategies, guidance and replay instead"
    )
    namespace = parser.parse(argv)
    from turnwise.cli import display
    from turnwise.recipes import catalogue, experience

    if namespace.experience:
        rows = experience.rows()
        print_json(rows) if namespace.json else display.show_experience(rows)
        return 0
    rows = catalogue.method_rows()
    families = dict.fromkeys(row["family"] for row in rows)
    needs = dict.fromkeys(need for row in rows for need in row["needs"].split(", ") if need != "–")
    if namespace.family and namespace.family not in families:
        raise SettingError(f"no family {namespace.family!r}; {nearest(namespace.family, families)}")
    if namespace.needs and namespace.needs not in (*needs, "none"):
        raise SettingError(f"no method needs {namespace.needs!r}; {nearest(namespace.needs, needs)}")
    wanted = "–" if namespace.needs == "none" else namespace.needs
    rows = [
        row
        for row in rows
        if namespace.family in ("", row["family"])
        and (not wanted or wanted in row["needs"].split(", "))
        and all(word.lower() in f"{row['method']} {row['idea']} {row['paper']}".lower() for word in namespace.words)
    ]
    if not rows:
        raise SettingError("no method has all of these; write fewer words, or leave --family or --needs out")
    print_json(rows) if namespace.json else display.show_methods(rows, namespace.long)
    return 0


def explain(argv: Sequence[str]) -> int:
    parser = Parser("explain", "Describe one method.")
    parser.add("method")
    parser.add("--credit", default="", help="use the credit assignment of another method")
    namespace = parser.parse(argv)
    if explain_pieces(namespace.method, namespace.json):
        return 0
    signatures.check_method(f"{namespace.method}+{namespace.credit}")
    from turnwise import recipes
    from turnwise.recipes import catalogue

    method, credit = split_method(namespace.method)
    credit = namespace.credit or credit
    if namespace.json:
        print_json(catalogue.describe_method(method, credit))
        return 0
    recipe = catalogue.parse_method(method, credit)
    for name in filter(None, (method, credit)):
        signature = ", ".join(f"{n}={p.default}" for n, p in recipes.parameters(name).items())
        print(f"{name}({signature})\n\n{inspect.getdoc(recipes.method(name)) or ''}\n")
        record = catalogue.record_of(name)
        print("".join(line + "\n" for line in (*sources(record.lines()), "")) if record else "", end="")
    print(f"Slots of {method} with the credit of {credit}" if credit else "Slots")
    width = max(map(len, recipe.slots()))
    for slot, piece in recipe.slots().items():
        print(textwrap.fill(piece, 118, initial_indent=f"  {slot:<{width}}  ", subsequent_indent=" " * (width + 4)))
    print(f"\nSignals: {', '.join(sorted(recipe.objective.signals))}")
    sets = ", ".join(f"{key}={value}" for key, value in signatures.suggested_settings(method).items())
    lists = {"Requires": sorted(recipe.requirements), "Partly idle without": sorted(recipe.idle_without)}
    for title, words in {**lists, "Sets, where you do not": [sets] if sets else []}.items():
        if words:
            print(f"{title}: {', '.join(words)}")
    return 0


def diff(argv: Sequence[str]) -> int:
    parser = Parser("diff", "The slots in which two methods differ.")
    parser.add("left")
    parser.add("right")
    namespace = parser.parse(argv)
    if diff_pieces(namespace.left, namespace.right, namespace.json):
        return 0
    signatures.check_method(f"{namespace.left}+{namespace.right}")
    from turnwise.recipes import catalogue

    rows = catalogue.slot_differences(namespace.left, namespace.right)
    if namespace.json:
        print_json(rows)
        return 0
    if not rows:
        print(f"{namespace.left} and {namespace.right} do not differ in any slot")
    width = max((len(r["slot"]) for r in rows), default=0)
    for r in rows:
        print(f"{r['slot']:<{width}}  {r[namespace.left]}  →  {r[namespace.right]}")
    return 0


def check_env(argv: Sequence[str]) -> int:
    parser = Parser("check-env", "Test an environment by playing it.")
    parser.add("environment", help="module:Class or a built-in name")
    parser.add("--episodes", type=int, default=20)
    namespace = parser.parse(argv)
    from turnwise import environments
    from turnwise.environments.checker.check import check_env as check

    report = check(environments.load(namespace.environment), namespace.episodes)
    if namespace.json:
        print_json({"ok": report.ok, "problems": list(report.problems), "warnings": list(report.warnings)})
    else:
        print(printable(report.text()))
    return 0 if report.ok else 1


def check_method(argv: Sequence[str]) -> int:
    parser = Parser("check-method", "Test the contract of a method in seconds, without a model.")
    parser.add("method", help="a method of `turnwise list`, METHOD+CREDIT, module:recipe or file.py:recipe")
    namespace = parser.parse(argv)
    signatures.check_method(namespace.method)
    from turnwise.checks.method import check_method as check

    report = check(namespace.method)
    print(json.dumps(report.as_dict(), indent=1) if namespace.json else report.text())
    return 0 if report.ok else 1


def model(argv: Sequence[str]) -> int:
    parser = Parser("model", "Download and list models.")
    parser.add("action", help="fetch or list")
    parser.add("name", nargs="?", default="", help="the model to fetch")
    parser.add("--to", default="", help="directory of models [$TURNWISE_MODELS, or a cache directory]")
    parser.add("--check", action="store_true", help="with list: compare every file with its checksum")
    namespace = parser.parse(argv)
    from turnwise.cli import display
    from turnwise.models import fetch

    if namespace.action == "fetch":
        folder = fetch.fetch(namespace.name, namespace.to, lambda text: print(text, file=sys.stderr, flush=True))
        usable = namespace.name if folder.parent == fetch.home() else folder
        print(json.dumps({"folder": str(folder)}) if namespace.json else f"Next:\n  turnwise train --model {usable}")
        return 0
    if namespace.action != "list":
        raise SettingError(f"no action {namespace.action!r} of model; {nearest(namespace.action, ('fetch', 'list'))}")
    rows = fetch.list_models(namespace.to, namespace.check)
    print_json(rows) if namespace.json else display.show_table("available models", rows)
    return 0


def bench(argv: Sequence[str]) -> int:
    parser = Parser("bench", "Measure speed on this machine.", json="")
    parser.add("--quick", action="store_true", help="fewer repeats, fewer rows")
    parser.add("--device", default="auto", help="cpu, cuda, or auto: cuda when present [auto]")
    parser.add("--threads", type=int, default=0, help="CPU threads; 0: the default of torch [0]")
    parser.add("--parts", default="", help="a subset of generation,learning,step,memory [all]")
    parser.add("--json", default="", metavar="FILE", help="write everything as JSON")
    parser.add("--out", default="", metavar="FILE", help="write the table as Markdown")
    namespace = parser.parse(argv)
    from turnwise.bench import report
    from turnwise.training.refusals import check_device

    parts = tuple(namespace.parts.split(",")) if namespace.parts else report.PARTS
    if unknown := [part for part in parts if part not in report.PARTS]:
        raise SettingError(f"no part {unknown[0]!r}; {nearest(unknown[0], report.PARTS)}")
    check_device(namespace.device)
    from turnwise.bench import table
    from turnwise.cli import display

    log = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731

    def write(facts: dict[str, object], rows: list[report.BenchRow]) -> None:
        for file, text in (
            (namespace.json, report.as_json(facts, rows)),
            (namespace.out, report.markdown(table.title(facts), rows)),
        ):
            if file:
                Path(file).write_text(text, encoding="utf-8")

    facts, rows = table.measure(namespace.device, namespace.quick, namespace.threads, parts, log, write)
    write(facts, rows)
    display.show_table(table.title(facts), [report.cells(row) for row in rows])
    return 0


# --------------------------------------------------------- pieces of experience


def _slots(name: str) -> list[str]:
    """The slots that have a piece of this name, unless a method has it: ``budget/xrpo`` names the piece."""
    if ":" in name or "+" in name or (name in signatures.method_names() and "/" not in name):
        return []
    from turnwise.recipes import experience

    return experience.slots_with(name)


def sources(lines: Mapping[str, str]) -> list[str]:
    """What a record says of paper and code, wrapped."""
    return [textwrap.fill(f"{title}: {said}", 118, subsequent_indent="  ") for title, said in lines.items()]


def explain_pieces(name: str, as_json: bool = False) -> bool:
    """Explain the pieces of this name; False if there is none."""
    slots = _slots(name)
    if not slots:
        return False
    from turnwise.recipes import experience

    bare = name.partition("/")[2] or name
    described = [experience.describe_piece(slot, bare) for slot in slots]
    if as_json:
        print(json.dumps(described, indent=1, default=str))
        return True
    print("\n\n".join(map(_text, described)))
    return True


def _text(described: Mapping[str, Any]) -> str:
    signature = "".join(f",{key}={value}" for key, value in described["parameters"].items())
    lines = [f"--{described['slot']} {described['name'].partition(',')[0]}{signature}", "", described["idea"], ""]
    lines += [described["body"], ""] if described["body"] else []
    for title in ("paper", "settings", "deviation", *(() if described["sources"] else ("sure of",))):
        if described[title] not in ("", "–"):
            lines += textwrap.wrap(f"{title.capitalize()}: {described[title]}", 118)
    lines += sources(described["sources"])
    lines += [f"Piece: {described['piece']}"]
    return "\n".join(
        [*lines, *([f"Requires: {', '.join(described['requirements'])}"] * bool(described["requirements"]))]
    )


def diff_pieces(left: str, right: str, as_json: bool = False) -> bool:
    """Compare two pieces of one slot argument by argument; False unless both are pieces."""
    common = [slot for slot in _slots(left) if slot in _slots(right)]
    if not common:
        return False
    from turnwise.recipes import experience

    a, b = (experience.describe_piece(common[0], name.partition("/")[2] or name) for name in (left, right))
    rows = [{"what": key, left: str(a[key]), right: str(b[key])} for key in ("idea", "piece") if a[key] != b[key]]
    if as_json:
        print_json(rows)
        return True
    print(
        "\n".join(f"{r['what']:<6} {r[left]}\n    →  {r[right]}" for r in rows) or f"{left} and {right} do not differ"
    )
    return True
