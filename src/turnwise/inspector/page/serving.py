"""Serves the page on a loopback address until it is interrupted, prints one view as JSON, or writes one as a file.

The server answers GET only, with one secret token, and shows nothing outside the runs it was given. A browser shows the token
once in the first address; a cookie that scripts cannot read carries it afterwards. A browser sends a cookie to every port of a
host, so it belongs to a path that no other server knows. It stands behind the front of all servers
(``serve.front``), which refuses other host names and other pages. Transcripts are text: every answer forbids scripts that are
not this package's own file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import webbrowser
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from turnwise.core.text import printable_line
from turnwise.errors import SettingError, StoreError, TurnwiseError
from turnwise.inspector.page.blocks import ViewPage, ViewQuery, as_json
from turnwise.inspector.page.render import asset, render_error, render_export, render_page
from turnwise.inspector.page.views.table import OTHER_PAGES, VIEWS, show_view
from turnwise.inspector.queries import RunReader
from turnwise.serve.server import LOOPBACK, listen_on, serve_app, url_of
from turnwise.store.atomic import atomic_write
from turnwise.store.rundir import runs as runs_in
from turnwise.workers.tokens import new_token, same_token

DEFAULT_FOLDER = "runs"
COOKIE = "turnwise-view"
HEADERS = {
    # inline styles: the strength of a token's colour is a CSS variable of its element
    "Content-Security-Policy": "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
}
TYPES = {"style.css": "text/css", "page.js": "text/javascript"}


def find_runs(paths: Sequence[str]) -> list[RunReader]:
    """The runs at these paths; a folder of runs means all of them; without paths, all runs under ``runs``, newest first."""
    if not paths and not Path(DEFAULT_FOLDER).is_dir():
        raise StoreError(f"there is no folder {DEFAULT_FOLDER}/ here; write the path of a run: turnwise view RUN")
    folders: list[Path] = []
    for path in paths or (DEFAULT_FOLDER,):
        inside = [run.path for run in runs_in(path)]
        folders += [Path(path)] if (Path(path) / "run.json").is_file() or not inside else inside

    def changed(folder: Path) -> float:
        file = folder / "run.json"
        return file.stat().st_mtime if file.is_file() else 0.0

    return [RunReader(path) for path in sorted(folders, key=changed, reverse=not paths)]


def view_json(run: RunReader, view: str, query: ViewQuery) -> str:
    """One view as JSON."""
    return json.dumps({"run": run.name, **as_json(show_view(view, run, query))}, indent=1)


def export_view(run: RunReader, view: str, query: ViewQuery, target: str) -> Path:
    """Write one view as one HTML file; an existing file is not overwritten."""
    path = Path(target)
    if path.exists():
        raise SettingError(f"{path} exists and is not overwritten; choose another name")
    if not path.parent.is_dir():
        raise SettingError(f"there is no folder {path.parent}; make it, or choose another file")
    text = render_export(show_view(view, run, query), run.name)
    # a reader, or a second export, never sees half a page
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace")
    return path


class InspectorApp:
    """All requests, as one class: which runs there are, who may read them, and what they get."""

    def __init__(self, runs: Sequence[RunReader], token: str = "") -> None:
        self.runs, self.token = list(runs), token or new_token()
        self.place = f"/{new_token()[:8]}"  # below which the pages are
        self.once = (
            new_token()
        )  # for a browser that we start: other users may read its command line, but not use it again

    def application(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        from turnwise.serve.front import Front

        answers: dict[str, Callable[..., Any]] = {
            "/": self.index,
            "/static/{name}": self.static,
            f"{self.place}/": self.index,
            f"{self.place}/r/{{run:int}}/export/{{view}}": partial(self.page, export=True),
            f"{self.place}/r/{{run:int}}/{{view}}": self.page,
        }
        routes = [Route(path, answer, methods=["GET"]) for path, answer in answers.items()]
        return Front(Starlette(routes=routes), self._admits, refuse=self._refuse)

    def index(self, request: Any) -> Any:
        """The first address: takes the token into a cookie, then leads to the first run."""
        from starlette.responses import RedirectResponse

        # without the token in the address: it would stay in the browser's history
        answer = RedirectResponse(f"{self.place}/r/0/overview", status_code=303, headers=HEADERS)
        if request.url.path == "/":
            if same_token(request.query_params["token"], self.once):
                self.once = ""
            answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict", path=self.place)
        return answer

    def static(self, request: Any) -> Any:
        name = request.path_params["name"]
        return self._answer(asset(name), TYPES[name]) if name in TYPES else self._error(404, "there is no such file")

    def page(self, request: Any, export: bool = False) -> Any:
        """One view of one run: as a page, or as one file to save."""
        try:
            run, page = self._view(request)
        except TurnwiseError as error:
            return self._error(404 if isinstance(error, StoreError) else 400, str(error))
        if not export:
            runs = [(f"../../r/{i}/overview", reader.name) for i, reader in enumerate(self.runs)]
            live = page.name == "overview" and run.summary is None
            return self._answer(render_page(page, run.name, runs, live), "text/html")
        answer = self._answer(render_export(page, run.name), "text/html")
        # a name of a run may hold what a header or a file system does not accept
        safe = re.sub(r"[^A-Za-z0-9_.-]", "_", run.name)[:80]
        answer.headers["Content-Disposition"] = f'attachment; filename="{safe}-{page.name}.html"'
        return answer

    def _view(self, request: Any) -> tuple[RunReader, ViewPage]:
        number, name = request.path_params["run"], request.path_params["view"]
        if not 0 <= number < len(self.runs):
            raise StoreError(f"there is no run {number}")
        if name not in VIEWS and name not in OTHER_PAGES:
            raise StoreError(f"there is no view {name[:40]!r}")
        run = self.runs[number]
        return run, show_view(name, run, ViewQuery.parse(dict(request.query_params)))

    def _admits(self, request: Any) -> bool:
        """Whether a request may read: by the cookie, or by the first address. Style and script hold nothing of a run."""
        path = request.url.path
        if path == "/":
            first = request.query_params.get("token", "")
            return same_token(first, self.token) or same_token(first, self.once)
        return path.startswith("/static/") or same_token(request.cookies.get(COOKIE, ""), self.token)

    async def _refuse(self, request: Any, refusal: Any) -> Any:
        text = "open the address that `turnwise view` printed: it contains the token of this server"
        return self._error(403, text if refusal.code == "invalid_api_key" else str(refusal))

    def _answer(self, text: str, kind: str, status: int = 200) -> Any:
        from starlette.responses import Response

        # half a character cannot be encoded; texts of a run are clean, but a query may contain one
        body = text.encode("utf-8", "replace")
        return Response(body, status, dict(HEADERS), media_type=f"{kind}; charset=utf-8")

    def _error(self, status: int, text: str) -> Any:
        return self._answer(render_error(status, text), "text/html", status)


def serve_page(runs: Sequence[RunReader], port: int, open_browser: bool, say: Callable[[str], None]) -> None:
    """Serve until interrupted. The address with the token is printed, and opened in a browser if so wished."""
    app = InspectorApp(runs)
    listener = listen_on(LOOPBACK, port)
    address = f"{url_of(listener)}/?token={app.token}"
    names = ", ".join(printable_line(run.name, 40) for run in runs[:3]) + (" …" if len(runs) > 3 else "")
    say(f"{names}\n{address}\nread only, this machine only; stop with Ctrl-C")
    if open_browser:
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(f"{url_of(listener)}/?token={app.once}")
    # torch takes seconds to import: have it ready when the first token is clicked
    threading.Thread(target=import_module, args=("turnwise.inspector.page.step_cache",), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve_app(listener, app.application(), LOOPBACK, app.token))
