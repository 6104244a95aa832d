"""All views by name, in the order of the navigation; each is imported when it is first opened, for some need torch.

A view is a generator of blocks. Its docstring is the sentence under the title of its page.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib import import_module

from turnwise.errors import SettingError, nearest
from turnwise.inspector.page.blocks import Note, ViewPage, ViewQuery
from turnwise.inspector.queries import RunReader

VIEWS = {  # name: title, module
    "overview": ("Overview", "steps"),
    "why": ("Why this token", "tokens"),
    "what-if": ("What if", "tokens"),
    "siblings": ("Siblings", "tokens"),
    "gradient": ("Who eats the gradient", "tokens"),
    "policy": ("Same policy?", "tokens"),
    "prompts": ("Where every prompt went", "groups"),
    "waits": ("Who waits for whom", "steps"),
    "tasks": ("Tasks", "groups"),
    "reward": ("Is the reward gamed?", "groups"),
}
OTHER_PAGES = {"step": ("Step", "steps"), "search": ("Search", "steps")}
NO_ROLLOUTS = "This run has no rollouts yet: it is at its cold start, or it ended there."
OF_ROLLOUTS = ("why", "what-if", "siblings", "gradient", "tasks", "reward")
ROWS_OF_A_FILE = (
    "This run trains on rows of a file (--data). The ledger does not hold them: there are no transcripts and factors."
)


def show_view(name: str, run: RunReader, query: ViewQuery) -> ViewPage:
    """The page of a view; an unknown name is refused with the nearest one."""
    pages = {**VIEWS, **OTHER_PAGES}
    if name not in pages:
        raise SettingError(f"there is no view {name!r}; {nearest(name, pages)}")
    title, module = pages[name]
    if not run.has_ledger and name != "overview":
        return ViewPage(name, title, "", [Note(NO_ROLLOUTS)])
    # a mixed run has both: rows of a file and trajectories
    if name in OF_ROLLOUTS and run.settings.get("data") and not run.trajectories(limit=1):
        return ViewPage(name, title, "", [Note(ROWS_OF_A_FILE)])
    if name == "step":  # the only page whose title says what it shows
        query = replace(query, step=query.step_of(run.steps(), 1))
        title = f"Step {query.step}"
    view = getattr(import_module(f"turnwise.inspector.page.views.{module}"), name.replace("-", "_"))
    return ViewPage(name, title, inspect.getdoc(view) or "", list(view(run, query)))
