"""A page in a real browser attacks the servers of this machine while a run samples: nothing changes.

Needs the package playwright and a chromium (Debian: apt-get install chromium); skipped where one is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.endpoint import new_episode
from support.generator_servers import SAMPLING, connected, served, weights_of
from support.generators import make

from turnwise.serve.server import serving
from turnwise.serve.sessions import Sessions
from turnwise.workers.tokens import find_token

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.thorough, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]
POSTS = (
    "/pause", "/pause?mode=abort", "/resume", "/abort_requests", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "/turnwise/v1/attach", "/turnwise/v1/release", "/turnwise/v1/sessions", "/inference/v1/generate",
    "/sessions", "/v1/chat/completions", "/v1/messages", "/s/x/reward",
)  # fmt: skip
GETS = ("/pause?mode=abort", "/turnwise/v1/info", "/is_paused", "/weight_info", "/v1/models", "/?token=x")
LIMIT = 120_000  # milliseconds for each navigation and each wait: a busy machine is slow, a hanging browser is not waited for
BODY = json.dumps({"client": "evil", "stop_ids": [], "slots": 1, "context": 8, "wait": 1, "messages": []})
PAGE = """<!doctype html><title>harmless</title><iframe name=hidden></iframe><script>
const bases = BASES, posts = POSTS, gets = GETS, body = BODY, read = [], sleep = (ms) => new Promise((go) => setTimeout(go, ms));
const types = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/plain;application/json"];
async function attempt(url, options) {
  try {
    const reply = await fetch(url, options);
    if (reply.type !== "opaque") read.push([url, reply.status]);
  } catch {}
}
async function attack() {
  for (const base of bases) {
    for (const path of posts) {
      for (const type of types)
        await attempt(base + path, { method: "POST", mode: "no-cors", body, headers: { "Content-Type": type } });
      await attempt(base + path, { method: "POST", mode: "no-cors" });
      const headers = { "Content-Type": "application/json", Authorization: "Bearer x" };
      await attempt(base + path, { method: "POST", body, headers });
      await attempt(base + path, { method: "DELETE", credentials: "include" });
      navigator.sendBeacon(base + path, new Blob([body], { type: "text/plain" }));
      const form = Object.assign(document.createElement("form"), { method: "post", action: base + path, target: "hidden" });
      form.enctype = "text/plain";
      form.append(Object.assign(document.createElement("input"), { name: '{"client":"evil","x":"', value: '"}' }));
      document.body.append(form);
      form.submit();
    }
    for (const path of gets) {
      for (const tag of ["img", "script", "iframe", "embed"])
        document.body.append(Object.assign(document.createElement(tag), { src: base + path }));
      document.head.append(Object.assign(document.createElement("link"), { rel: "stylesheet", href: base + path }));
      await attempt(base + path, { mode: "no-cors", credentials: "include" });
      try { new WebSocket(base.replace("http", "ws") + path); } catch {}
      try { new EventSource(base + path); } catch {}
    }
  }
  await sleep(500);
  document.title = "done";
}
attack();
</script>"""


@contextlib.contextmanager
def page_of_somebody_else(bases):
    """The address of a page that attacks ``bases``."""
    text = PAGE
    for name, value in (("BASES", bases), ("POSTS", POSTS), ("GETS", GETS), ("BODY", BODY)):
        text = text.replace(f" = {name}", f" = {json.dumps(value)}", 1)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def browser_page(address):
    """A page of a real browser at an address. evil.example means this machine, for page and servers alike: rebinding."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP evil.example 127.0.0.1"]
    flags += ["--disable-features=LocalNetworkAccessChecks"]  # the browser's own protection: not every browser has it
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=flags, timeout=LIMIT)
        try:
            page = browser.new_page()
            page.set_default_timeout(LIMIT)
            page.goto(address, wait_until="commit", timeout=LIMIT)  # the attack delays the event "load"
            yield page
        finally:
            browser.close()


def visit(port, name):
    """Open the page under a name, wait until it has tried everything, and return the replies that it could read."""
    with browser_page(f"http://{name}:{port}/") as page:
        page.wait_for_function("document.title === 'done'")
        return page.evaluate("read")


def rebound(url):
    """Ask a server by a foreign name as its own page would: same origin, JSON, every header allowed. The statuses."""
    options = """{method: "POST", headers: {"Content-Type": "application/json"}, body: "{}"}"""
    call = f"async (path) => (await fetch(path, {options})).status"
    with browser_page(f"http://evil.example:{url.rpartition(':')[2]}/health") as page:
        page.wait_for_load_state("domcontentloaded")
        return [page.evaluate(call, path) for path in POSTS]


def test_a_hostile_page_changes_nothing_in_a_run():
    model = make(seed=1)

    async def sampled(generator):
        session = generator.open(7)
        try:
            return tuple((await session.generate([1, 2, 3], SAMPLING)).tokens)
        finally:
            session.close()  # in deterministic mode the others wait for a session that is open

    async def play(server):
        sessions, samples = Sessions(), []
        opened = sessions.open(new_episode(), awaits_reward=True, offered=True)
        generator = await connected([server.url], model)
        await generator.publish(weights_of(model), 1)
        async with serving(sessions) as endpoint:
            with page_of_somebody_else([server.url, endpoint.url]) as port:
                attacks = [(visit, port, name) for name in ("127.0.0.1", "localhost", "evil.example")]
                attacks += [(rebound, server.url), (rebound, endpoint.url)]
                for attack in attacks:
                    attacking = asyncio.ensure_future(asyncio.to_thread(*attack))
                    try:
                        while not attacking.done():  # the run goes on, and samples what it would have sampled
                            samples.append(await asyncio.wait_for(sampled(generator), LIMIT / 1000))
                            assert not server.host.paused and not opened.taken.is_set() and len(sessions) == 1
                    finally:
                        replies = await attacking
                    # a page of another site reads nothing; one under a foreign name reads that this is not its server
                    assert set(replies) == ({421} if attack[0] is rebound else set()), (attack, replies)
        assert generator.alive() and server.host.label == "1" and server.host.client == "test"
        assert len(set(samples)) == 1 and not opened.episode.turns and not opened.outcome.done()

    with served(model) as server:
        assert find_token(server.url)
        asyncio.run(play(server))
