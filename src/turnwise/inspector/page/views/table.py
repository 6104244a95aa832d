"""All views by name, in the order of the navigation; each is imported when it is first opened, for some need torch.

A view is a generator of blocks. Its docstring is the sentence under the title of its page.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib import import_module

from turnwise.errors import SettingError, StoreError, nearest
from turnwise.inspector.page.blocks import Note, ViewPage, ViewQuery
from turnwise.inspector.queries import RunReader

VIEWS = {  # name: title, module
    "overview": ("Overview", "steps"),
    "failures": ("Failures", "failures"),
    "why": ("Why this token", "tokens"),
    "what-if": ("What if", "tokens"),
    "siblings": ("Siblings", "tokens"),
    "gradient": ("Gradient shares", "tokens"),
    "policy": ("Sampler and learner", "tokens"),
    "prompts": ("Where prompts went", "groups"),
    "waits": ("Where time goes", "steps"),
    "tasks": ("Tasks", "groups"),
    "reward": ("Is the reward gamed?", "groups"),
}
KEYS = "1f234567890"  # of the views, in order
OTHER_PAGES = {"step": ("Step", "steps"), "search": ("Search", "steps")}
NO_ROLLOUTS = "This run has no rollouts yet: it is at its cold start, or it ended there."
OF_ROLLOUTS = ("why", "what-if", "siblings", "gradient", "tasks", "reward")
OF_TOKENS = ("what-if", "gradient")
NOT_KEPT = "This run keeps no numbers of tokens (--keep-tokens 0)."
ROWS_OF_A_FILE = (
    "This run trains on rows of a file (--data). The ledger does not hold them: there are no transcripts and factors."
)


def show_view(name: str, run: RunReader, query: ViewQuery) -> ViewPage:
    """The page of a view; an unknown name is refused with the nearest one."""
    pages = {**VIEWS, **OTHER_PAGES}
    if name not in pages:
        raise SettingError(f"there is no view {name!r}; {nearest(name, pages)}")
    title, module = pages[name]
    empty = empty_views(run)
    if name in empty:
        return ViewPage(name, title, "", [Note(empty[name])], empty)
    if query.step and (steps := run.steps()) and query.step not in steps:
        raise StoreError(f"{run.name} has no step {query.step}: it has steps {steps[0]} to {steps[-1]}")
    if name == "step":  # the only page whose title says what it shows
        query = replace(query, step=query.step if query.step > 0 else (run.steps() or [1])[-1])
        title = f"Step {query.step}"
    view = getattr(import_module(f"turnwise.inspector.page.views.{module}"), name.replace("-", "_"))
    return ViewPage(name, title, " ".join((inspect.getdoc(view) or "").split()), list(view(run, query)), empty)


def empty_views(run: RunReader) -> dict[str, str]:
    """The views that have nothing to show of a run, and why: the navigation greys them out."""
    if not run.has_ledger:
        return dict.fromkeys([name for name in (*VIEWS, *OTHER_PAGES) if name != "overview"], NO_ROLLOUTS)
    # a mixed run has both: rows of a file and trajectories
    if run.settings.get("data") and not run.trajectories(limit=1):
        return dict.fromkeys(OF_ROLLOUTS, ROWS_OF_A_FILE)
    return {} if run.settings.get("keep_tokens", 1) else dict.fromkeys(OF_TOKENS, NOT_KEPT)
