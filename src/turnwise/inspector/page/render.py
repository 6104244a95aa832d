"""Pages as HTML: one Jinja template with automatic escaping for every block of every view.

The only markup that is not escaped comes from ``charts``. Knows no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import jinja2
from markupsafe import Markup

from turnwise.core.text import printable, printable_line
from turnwise.inspector.page.blocks import ViewPage, as_json
from turnwise.inspector.page.views.table import KEYS, VIEWS
from turnwise.observe import charts
from turnwise.observe.charts import Link

FOLDER = files("turnwise.inspector.page")
COLOUR_FROM = 0.02  # tones below this stay uncoloured


def asset(name: str) -> str:
    """A file of ``static``, by one of two names."""
    assert name in ("style.css", "page.js")
    return (FOLDER / "static" / name).read_text(encoding="utf-8")


@cache
def environment() -> jinja2.Environment:
    loader = jinja2.FunctionLoader(lambda name: (FOLDER / "templates" / name).read_text(encoding="utf-8"))
    # StrictUndefined: a misspelt field of a block is an error, not an empty page
    env = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    env.filters |= {
        "number": charts.number,
        "printable": printable,
        "line": printable_line,
        "kind": lambda b: type(b).__name__,
    }
    env.globals |= {
        "line_chart": charts.line_chart,
        "heat_map": charts.heat_map,
        "timeline": charts.timeline,
        "fork_tree": charts.fork_tree,
        "tone": tone,
        "is_link": lambda value: isinstance(value, Link),
        "is_number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
        "bar_width": bar_width,
    }
    return env


def tone(value: float) -> str:
    """CSS of a token's colour: a class by its sign and the strength as a variable."""
    # the square root lifts small gradients, which would all look white beside the largest
    return f"--t:{min(1.0, abs(value)) ** 0.5:.2f}" if abs(value) >= COLOUR_FROM else ""


def bar_width(value: float, values: Sequence[float]) -> str:
    top = max((abs(v) for v in values), default=0.0) or 1.0
    return f"{100 * abs(value) / top:.1f}%"


def render_page(page: ViewPage, run: str, runs: Sequence[tuple[str, str]], live: bool = False) -> str:
    """``runs``: address and name of each run of the server."""
    views = [(name, title, key) for (name, (title, _)), key in zip(VIEWS.items(), KEYS, strict=True)]
    template = environment().get_template("page.html")
    return template.render(page=page, run=run, runs=runs, views=views, live=live, exported=False, style="", data="")


def render_export(page: ViewPage, run: str) -> str:
    """The page as one file: style inside, no script, no links, the data as JSON at its end."""
    data = Markup(json.dumps(as_json(page)).replace("<", "\\u003c"))  # a script element must not be closed by a text
    template = environment().get_template("page.html")
    style = Markup(asset("style.css"))
    return template.render(page=page, run=run, runs=(), views=(), live=False, exported=True, style=style, data=data)


def render_error(status: int, text: str) -> str:
    return environment().get_template("error.html").render(status=status, text=text)
