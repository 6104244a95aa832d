"""The server of the page: loopback only, one secret token, GET only, and nothing outside the runs it was given.

A browser shows the token once in the first address; a cookie that scripts cannot read carries it afterwards. Requests with
another host name are refused, so that a foreign page cannot reach the server through a name that points to this machine.
Transcripts are text: every answer forbids scripts that are not this package's own file.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Sequence
from typing import Any

from turnwise.errors import SettingError, StoreError, TurnwiseError
from turnwise.inspector.page.render import asset, render_error, render_export, render_page
from turnwise.inspector.page.view_query import ViewQuery
from turnwise.inspector.page.views.table import OTHER_PAGES, VIEWS, show_view
from turnwise.inspector.queries import RunReader

COOKIE = "turnwise-view"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
}
HOSTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")
TYPES = {"style.css": "text/css", "page.js": "text/javascript"}


def import_starlette() -> Any:
    """The web framework, or a sentence that says what to install."""
    try:
        import starlette.applications  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise SettingError(
            "the page needs Starlette and uvicorn; install them with: pip install 'turnwise[serve]'"
        ) from error


class InspectorApp:
    """All requests, as one class: which runs there are, who may read them, and what they get."""

    def __init__(self, runs: Sequence[RunReader], token: str = "") -> None:
        import_starlette()
        self.runs, self.token = list(runs), token or secrets.token_urlsafe(24)

    def application(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/", self.index, methods=["GET"]),
            Route("/static/{name}", self.static, methods=["GET"]),
            Route("/r/{run:int}/export/{view}", self.export, methods=["GET"]),
            Route("/r/{run:int}/{view}", self.view, methods=["GET"]),
        ]
        return Starlette(routes=routes)

    # -------------------------------------------------------------- requests

    def index(self, request: Any) -> Any:
        """The first address: takes the token into a cookie, then leads to the first run."""
        from starlette.responses import RedirectResponse

        given = request.query_params.get("token", "")
        if given and self._host_is_local(request) and hmac.compare_digest(given.encode(), self.token.encode()):
            answer = RedirectResponse("/", status_code=303, headers=HEADERS)
            answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict", path="/")
            return answer
        return self._refuse(request) or RedirectResponse("/r/0/overview", status_code=303, headers=HEADERS)

    def static(self, request: Any) -> Any:
        name = request.path_params["name"]
        if name not in TYPES:
            return self._error(404, "there is no such file")
        return self._answer(asset(name), TYPES[name])

    def view(self, request: Any) -> Any:
        refused = self._refuse(request)
        if refused is not None:
            return refused
        try:
            run, page = self._page(request)
            runs = [(f"/r/{i}/overview", reader.name) for i, reader in enumerate(self.runs)]
            live = page.name == "overview" and run.summary is None
            return self._answer(render_page(page, run.name, runs, live), "text/html")
        except TurnwiseError as error:
            return self._error(404 if isinstance(error, StoreError) else 400, str(error))

    def export(self, request: Any) -> Any:
        refused = self._refuse(request)
        if refused is not None:
            return refused
        try:
            run, page = self._page(request)
        except TurnwiseError as error:
            return self._error(400, str(error))
        answer = self._answer(render_export(page, run.name), "text/html")
        safe = re.sub(r"[^A-Za-z0-9_.-]", "_", run.name)[:80]
        answer.headers["Content-Disposition"] = f'attachment; filename="{safe}-{page.name}.html"'
        return answer

    # --------------------------------------------------------------- helpers

    def _page(self, request: Any) -> tuple[RunReader, Any]:
        number, name = request.path_params["run"], request.path_params["view"]
        if not 0 <= number < len(self.runs):
            raise StoreError(f"there is no run {number}")
        if name not in VIEWS and name not in OTHER_PAGES:
            raise StoreError(f"there is no view {name[:40]!r}")
        run, query = self.runs[number], ViewQuery.parse(dict(request.query_params))
        page = show_view(name, run, query)
        if name == "why" and query.token < 0 and run.has_ledger:
            self._expect_click(run, query)
        return run, page

    def _expect_click(self, run: RunReader, query: ViewQuery) -> None:
        """The next request asks for a token of this transcript."""
        from turnwise.inspector.page import step_cache
        from turnwise.inspector.page.views.why import opened_transcript

        step, trajectory = opened_transcript(run, query)
        if trajectory:
            step_cache.warm(run, step, trajectory)

    def _host_is_local(self, request: Any) -> bool:
        return bool(HOSTS.fullmatch(request.headers.get("host", "")))

    def _refuse(self, request: Any) -> Any:
        """The answer to a request without the token or with a foreign host name; None: it may read."""
        given = request.cookies.get(COOKIE, "")
        if self._host_is_local(request) and hmac.compare_digest(given.encode(), self.token.encode()):
            return None
        return self._error(403, "open the address that `turnwise view` printed: it contains the token of this server")

    def _answer(self, text: str, kind: str, status: int = 200) -> Any:
        from starlette.responses import Response

        # half a character cannot be encoded; texts of a run are clean, but a query may contain one
        body = text.encode("utf-8", "replace")
        return Response(body, status, dict(HEADERS), media_type=f"{kind}; charset=utf-8")

    def _error(self, status: int, text: str) -> Any:
        return self._answer(render_error(status, text), "text/html", status)
