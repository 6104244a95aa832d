"""All views by name, in the order of the navigation; each is imported when it is first opened, for some need torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from turnwise.errors import SettingError, nearest
from turnwise.inspector.page.blocks import Note, ViewPage
from turnwise.inspector.page.view_query import ViewQuery
from turnwise.inspector.queries import RunReader

VIEWS = {  # name: (title, module, function)
    "overview": ("Overview", "overview", "overview"),
    "why": ("Why this token", "why", "why"),
    "what-if": ("What if", "what_if", "what_if"),
    "siblings": ("Siblings", "siblings", "siblings"),
    "gradient": ("Who eats the gradient", "gradient", "gradient"),
    "policy": ("Same policy?", "policy", "policy"),
    "prompts": ("Where every prompt went", "prompts", "prompts"),
    "waits": ("Who waits for whom", "waits", "waits"),
    "tasks": ("Tasks", "tasks", "tasks"),
    "reward": ("Is the reward gamed?", "reward", "reward"),
}
OTHER_PAGES = {"step": ("Step", "steps", "step"), "search": ("Search", "steps", "search")}
NO_ROLLOUTS = "This run has no rollouts yet: it is at its cold start, or it ended there."
OF_ROLLOUTS = ("why", "what-if", "siblings", "gradient", "tasks", "reward")
ROWS_OF_A_FILE = (
    "This run trains on rows of a file (--data). The ledger does not hold them: there are no transcripts and factors."
)
View = Callable[[RunReader, ViewQuery], ViewPage]


def show_view(name: str, run: RunReader, query: ViewQuery) -> ViewPage:
    """The page of a view; an unknown name is refused with the nearest one."""
    pages = {**VIEWS, **OTHER_PAGES}
    if name not in pages:
        raise SettingError(f"there is no view {name!r}; {nearest(name, pages)}")
    title, module, function = pages[name]
    if not run.has_ledger and name != "overview":
        return ViewPage(name, title, "", [Note(NO_ROLLOUTS)])
    view = cast(View, getattr(import_module(f"turnwise.inspector.page.views.{module}"), function))
    if name in OF_ROLLOUTS and run.settings.get("data") and not run.trajectories(limit=1):
        return ViewPage(name, title, "", [Note(ROWS_OF_A_FILE)])
    return view(run, query)
