"""Serves the page on a loopback address until it is interrupted, prints one view as JSON, or writes one as a file."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from turnwise.core.text import printable_line
from turnwise.errors import SettingError, StoreError
from turnwise.inspector.page.app import InspectorApp, import_starlette
from turnwise.inspector.page.blocks import as_json
from turnwise.inspector.page.render import render_export
from turnwise.inspector.page.view_query import ViewQuery
from turnwise.inspector.page.views.table import show_view
from turnwise.inspector.queries import RunReader
from turnwise.store.atomic import atomic_write
from turnwise.store.rundir import runs as runs_in

DEFAULT_FOLDER = "runs"
LOOPBACK = "127.0.0.1"


def find_runs(paths: Sequence[str]) -> list[RunReader]:
    """The runs at these paths; a folder of runs means all of them; without paths, all runs under ``runs``."""
    found: list[Path] = []
    for path in paths or (DEFAULT_FOLDER,):
        inside = [run.path for run in runs_in(path)]
        found += [Path(path)] if (Path(path) / "run.json").is_file() or not inside else inside
    if not paths and not Path(DEFAULT_FOLDER).is_dir():
        raise StoreError(f"there is no folder {DEFAULT_FOLDER}/ here; write the path of a run: turnwise view RUN")
    return [RunReader(path) for path in sorted(found, key=_changed, reverse=not paths)]


def _changed(path: Path) -> float:
    return (path / "run.json").stat().st_mtime if (path / "run.json").is_file() else 0.0


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
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace")
    return path


def serve_page(
    runs: Sequence[RunReader], port: int, open_browser: bool, say: Callable[[str], None], view: str = ""
) -> None:
    """Serve until interrupted. The address with the token is printed, and opened in a browser if so wished."""
    import_starlette()
    import uvicorn

    app = InspectorApp(runs)
    with _listen(port) as listener:
        address = f"http://{LOOPBACK}:{listener.getsockname()[1]}/?token={app.token}"
        names = ", ".join(printable_line(run.name, 40) for run in runs[:3]) + (" …" if len(runs) > 3 else "")
        say(f"{names}\n{address}\nread only, this machine only; stop with Ctrl-C")
        if open_browser:
            with contextlib.suppress(webbrowser.Error):
                webbrowser.open(address)
        config = uvicorn.Config(app.application(), log_level="error", access_log=False, timeout_graceful_shutdown=1)
        # torch takes seconds to import: have it ready when the first token is clicked
        threading.Thread(target=import_module, args=("turnwise.inspector.page.step_cache",), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    try:
        listener.bind((LOOPBACK, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise SettingError(
            f"port {port} cannot be used: {error}; write another --port, or 0 for any free one"
        ) from error
    return listener
