"""``turnwise view``: the page of a run, one of its views as JSON, or one as a file."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.cli.flags import Parser
from turnwise.errors import SettingError

ABOUT = (
    "Open a local page about runs, also while they go on: curves, why a token got its gradient, what another method would have "
    "done, siblings, where prompts and seconds went. Read only; reachable from this machine only."
)
NUMBERS = ("step", "token", "update")
TEXTS = ("group", "trajectory", "method", "search")


def view(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise view", description=ABOUT, allow_abbrev=False)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories, or folders of runs [runs]")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0: any free one [0]")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    names = "overview, why, what-if, siblings, gradient, policy, prompts, waits, tasks, reward, step, search"
    parser.add_argument("--view", default="overview", help=f"the view of --json and --export: {names} [overview]")
    parser.add_argument("--json", action="store_true", help="print one view as JSON instead of serving")
    parser.add_argument(
        "--export", default="", metavar="FILE", help="write one view as one HTML file instead of serving"
    )
    for name in NUMBERS:
        parser.add_argument(f"--{name}", default="", metavar="N", help=f"{name} of the view")
    for name in TEXTS:
        parser.add_argument(f"--{name}", default="", metavar=name[0].upper(), help=f"{name} of the view")
    namespace = parser.parse(argv)
    from turnwise.inspector.page import serving
    from turnwise.inspector.page.view_query import ViewQuery

    readers = serving.find_runs(namespace.runs)
    if not readers:
        raise SettingError("there is no run here; write the path of one: turnwise view RUN")
    query = ViewQuery.parse({name: getattr(namespace, name) for name in (*NUMBERS, *TEXTS)})
    if namespace.json:
        print(serving.view_json(readers[0], namespace.view, query))
    elif namespace.export:
        print(serving.export_view(readers[0], namespace.view, query, namespace.export))
    else:
        serving.serve_page(readers, namespace.port, not namespace.no_browser, lambda text: print(text, flush=True))
    return 0
