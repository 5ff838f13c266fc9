"""The console's page in a browser, told what a gateway seldom says, at moments of the test's choosing."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

import pytest
from playwright.sync_api import Browser, Route, expect

from penstock.live.reading import Reading
from penstock.live.timeline import timeline_of
from penstock.live.view import view_of
from penstock.queue.v1 import queue_pb2
from penstock.scheduler.v1.scheduler_pb2 import StatusResponse
from services.gateway.console.routes import PAGE
from tests.support.browser import PATIENCE_MS, Visit, browser, visit
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif("CONSOLE_TESTS" not in os.environ, reason="some seconds of browser: make test-console"),
]

expect.set_options(timeout=PATIENCE_MS)

QUEUE = queue_pb2.StatsResponse()
FLEET = StatusResponse(policy="of-the-test", queue_connected=True)


def told(queue: queue_pb2.StatsResponse | None, fleet: StatusResponse | None, **more: Any) -> dict[str, Any]:
    """Return the state that a gateway tells of these answers."""
    lists: dict[str, Any] = {"dead": [], "batches": [], "recent": []} if queue else {"dead": None, "batches": None}
    rest = {"workers_left_out": 0, "interval_s": 1.0, "history": {"ages_s": [], "usage": {}}, "recent": []}
    rest["now_unix_s"] = 1_000_000.0
    return {**asdict(view_of(Reading(0.0, queue, fleet, ()), {})), **rest, **lists, **more}


@dataclass
class Gateway:
    """Serves the page and one state."""

    address: str = ""
    state: dict[str, Any] = field(default_factory=lambda: told(QUEUE, FLEET))
    key: str = ""
    """What opens it as a password; empty: nothing is asked for."""
    let_in: bool = False
    """Whether the page was opened with the key."""

    def answer(self, path: str, authorization: str) -> tuple[int, str, bytes]:
        """Return status, type or challenge, and content; as the gateway does, have the browser ask for the page."""
        right = authorization == "Basic " + base64.b64encode(f"me:{self.key}".encode()).decode()
        if path == "/console/state":
            if self.key and not right:
                return 401, "Bearer", b'{"error": {"message": "no key"}}'
            return 200, "application/json", json.dumps(self.state).encode()
        if path == "/":
            if self.key and not right:
                return 401, 'Basic realm="of the test"', b"{}"
            self.let_in = right
        name, kind = PAGE[path]
        return 200, kind, (files("services.gateway.console") / "page" / name).read_bytes()


@contextmanager
def serving(gateway: Gateway) -> Iterator[Gateway]:
    """Serve over HTTP on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, content = gateway.answer(self.path, self.headers.get("authorization", ""))
            self.send_response(status)
            self.send_header("content-type" if status == 200 else "www-authenticate", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    gateway.address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield gateway
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def launched() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with serving(Gateway()) as made:
        yield made


@pytest.fixture
def desk(launched: Browser, gateway: Gateway) -> Iterator[Visit]:
    with visit(launched, gateway.address) as made:
        expect(made.page.locator("#connection")).to_have_text("live")
        yield made


def test_what_is_not_known_is_not_said_to_be_none(desk: Visit, gateway: Gateway) -> None:
    lists = {name: desk.page.locator(f"#no-{name}") for name in ("workers", "batches", "dead")}
    none = {"workers": "No worker is known to the scheduler.", "batches": "None.", "dead": "None."}
    for queue, fleet, unknown in (
        (None, None, {"workers", "batches", "dead"}),
        (QUEUE, FLEET, set()),
        (None, FLEET, {"batches", "dead"}),
        (QUEUE, None, {"workers"}),
    ):
        gateway.state = told(queue, fleet)
        for name, found in lists.items():
            who = "scheduler" if name == "workers" else "queue"
            expect(found).to_have_text(f"Not known: the {who} does not say." if name in unknown else none[name])
    gateway.state = told(QUEUE, FLEET, batches=None)
    expect(lists["batches"]).to_have_text("Not known: the queue does not say.")
    expect(lists["dead"]).to_have_text("None.")


def kept(desk: Visit, pattern: str) -> list[Route]:
    """Keep what the page asks for until the test answers it."""
    asked: list[Route] = []

    def keep(route: Route) -> None:
        asked.append(route)

    desk.page.route(pattern, keep)
    return asked


def nth(desk: Visit, asked: list[Route], place: int) -> Route:
    """Wait for the page to ask so often."""
    while len(asked) <= place:
        desk.page.wait_for_timeout(20)
    return asked[place]


def letter(error: str, died_unix_ns: int) -> dict[str, Any]:
    return {
        "request_id": "r1", "channel": "batch", "attempts": 3, "died_unix_ns": died_unix_ns, "last_error": error,
    }  # fmt: skip


def test_ages_are_by_the_clock_of_the_fleet(desk: Visit, gateway: Gateway) -> None:
    """That of whoever looks may be wrong by hours."""
    gateway.state = told(queue_pb2.StatsResponse(dead=1), FLEET, dead=[letter("late", 999_700 * 10**9)])
    expect(desk.page.get_by_text("batch, 3 attempts, 5 min ago")).to_be_visible()


def test_a_double_click_requeues_once(desk: Visit, gateway: Gateway) -> None:
    """The second of two requests would find no dead letter, and the page would say that requeueing failed."""
    asked = kept(desk, "**/console/requeue")
    gateway.state = told(queue_pb2.StatsResponse(dead=1), FLEET, dead=[letter("the first", 1)])
    button = desk.page.get_by_role("button", name="Requeue r1")
    button.dblclick()
    nth(desk, asked, 0).fulfill(json={"request_id": "r1"})
    expect(desk.page.locator("#said")).to_have_text("r1 waits again, with fresh attempts.")
    # The page still shows the letter as it was told of it before.
    button.click()
    gateway.state = told(queue_pb2.StatsResponse(dead=1), FLEET, dead=[letter("the second", 2)])
    expect(desk.page.get_by_text("the second")).to_be_visible()
    expect(desk.page.get_by_text("the first")).to_have_count(0)
    assert len(asked) == 1
    desk.expected.append("status of 503")
    button.click()
    nth(desk, asked, 1).fulfill(status=503, json={"error": {"message": "the queue does not answer"}})
    expect(desk.page.locator("#said")).to_have_text("requeue failed: the queue does not answer")
    button.click()
    nth(desk, asked, 2).fulfill(json={"request_id": "r1"})
    expect(desk.page.locator("#said")).to_have_text("r1 waits again, with fresh attempts.")


def test_the_latest_lookup_is_the_one_shown(desk: Visit) -> None:
    asked = kept(desk, "**/console/requests/*")
    for name in ("first", "second"):
        desk.page.get_by_label("Timeline of request").fill(name)
        desk.page.get_by_role("button", name="Show", exact=True).click()
    timeline = desk.page.get_by_role("region", name="Timeline")
    nth(desk, asked, 1).fulfill(json=asdict(timeline_of(queue_pb2.GetResponse(request_id="second"))))
    expect(timeline).to_contain_text("second")
    with desk.page.expect_response("**/console/requests/first"):
        nth(desk, asked, 0).fulfill(json=asdict(timeline_of(queue_pb2.GetResponse(request_id="first"))))
    with desk.page.expect_response("**/console/state"):
        pass
    expect(timeline).to_contain_text("second")
    expect(timeline).not_to_contain_text("first")


def test_an_address_with_a_password_in_it_is_good(launched: Browser, gateway: Gateway) -> None:
    with visit(launched, f"me:key@{gateway.address}") as made:
        expect(made.page.locator("#connection")).to_have_text("live")


def test_a_page_whose_key_is_missing_is_opened_again(launched: Browser, gateway: Gateway) -> None:
    """Asked for a key over what a script asks for, a browser gives up as soon as the script waits no longer."""
    with visit(launched, gateway.address, password="the key") as made:
        expect(made.page.locator("#connection")).to_have_text("live")
        made.expected.append("status of 401")
        gateway.key = "the key"
        wait_for(lambda: gateway.let_in, "the page to be opened with the key")
        expect(made.page.locator("#connection")).to_have_text("live")
