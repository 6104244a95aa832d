"""One headless browser of this process, for worlds that are web pages: a thread of its own drives it, because Playwright's
objects belong to the thread that made them. Knows no world."""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any

from turnwise.environments.families.adapter import import_package
from turnwise.errors import SettingError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
)  # fmt: skip
Job = tuple[Callable[[Any], Any], Future[Any]]


class Browser:
    """Runs functions of the browser in its thread. ``call`` waits for the result."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="turnwise-browser").start()

    def call(self, work: Callable[[Any], Any], seconds: float = 60.0) -> Any:
        result: Future[Any] = Future()
        self.jobs.put((work, result))
        return result.result(seconds)

    def _serve(self) -> None:
        from playwright.sync_api import sync_playwright

        flags = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]  # its own sandbox refuses to start for root
        with sync_playwright() as playwright:
            browser = None
            while True:
                work, result = self.jobs.get()
                try:
                    browser = browser or playwright.chromium.launch(executable_path=self.program, args=flags)
                    result.set_result(work(browser))
                except Exception as fault:  # of one page: the others go on
                    result.set_exception(fault)


@cache
def shared_browser(family: str, extra: str, program: str = "") -> Browser:
    """The browser of this process; ``program`` names one that is not on the path."""
    import_package("playwright.sync_api", family, extra)
    found = shutil.which(program) if program else next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise SettingError(
            f"{family}:... needs a browser, and there is no {program or BROWSERS[0]}; install one (Debian: apt install "
            "chromium), or write browser=PATH"
        )
    return Browser(found)
