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

from penstock.live.departed import Departed
from penstock.live.reading import Reading
from penstock.live.timeline import timeline_of
from penstock.live.view import view_of
from penstock.queue.v1 import queue_pb2
from penstock.scheduler.v1.scheduler_pb2 import ChannelStatus, StatusResponse, UnservedModel, WorkerStatus
from services.gateway.console.lookout import MOST_CHANNELS, MOST_HELD, MOST_WORKERS, shown_of
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


def told(
    queue: queue_pb2.StatsResponse | None,
    fleet: StatusResponse | None,
    departed: tuple[Departed, ...] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return the state that a gateway tells of these answers."""
    lists: dict[str, Any] = {"dead": [], "batches": [], "recent": []} if queue else {"dead": None, "batches": None}
    rest = {"interval_s": 1.0, "history": {"ages_s": [], "usage": {}}, "recent": [], "now_unix_s": 1_000_000.0}
    return {**shown_of(view_of(Reading(0.0, queue, fleet, ()), {}, departed)), **rest, **lists, **more}


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


def test_a_fleet_too_large_for_the_page_is_counted_and_what_is_wrong_is_shown(desk: Visit, gateway: Gateway) -> None:
    channels = [f"lane-{n:03}" for n in range(MOST_CHANNELS + 5)]
    workers = [
        WorkerStatus(
            worker_id=f"w-{n:03}", connected=n != 499, capacity_blocks=10_000, free_blocks=100,
            held_blocks={name: 1 + place for place, name in enumerate(channels[:60])},
        )
        for n in range(500)
    ]  # fmt: skip
    fleet = StatusResponse(
        queue_connected=True, workers=workers, channels=[ChannelStatus(channel=name) for name in channels],
        unserved_models=[UnservedModel(model=f"none-{n}", waiting=1) for n in range(30)],
    )  # fmt: skip
    gateway.state = told(queue_pb2.StatsResponse(), fleet)
    page = desk.page
    cards = page.locator("#worker-cards > li")
    expect(cards).to_have_count(MOST_WORKERS)
    expect(cards.last).to_contain_text("w-499")
    expect(cards.last).to_contain_text("gone")
    expect(cards.first).to_contain_text(f"{60 - MOST_HELD} other channels {sum(range(1, 53)):,}")
    expect(page.locator("#more-workers")).to_have_text("400 more (400 up); penstock status --once has all.")
    expect(page.locator("#channel-rows > tr")).to_have_count(MOST_CHANNELS)
    expect(page.locator("#more-channels")).to_have_text("5 more; penstock status --once has all.")
    expect(page.locator("#more-problems")).to_have_text("10 more; penstock status --once has all.")
    gateway.state = told(QUEUE, FLEET)
    for kind in ("workers", "channels", "problems"):
        expect(page.locator(f"#more-{kind}")).to_be_hidden()


def test_who_has_left_is_shown_for_a_while(desk: Visit, gateway: Gateway) -> None:
    section = desk.page.locator("#departed")
    expect(section).to_be_hidden()
    left = tuple(Departed(f"w-{n}", "tiny", "" if n else "up", 40.0 + 60 * n) for n in range(25))
    gateway.state = told(QUEUE, FLEET, left)
    expect(section.get_by_role("listitem")).to_have_count(20)
    expect(section.get_by_role("listitem").first).to_have_text("w-0: up until 40 s ago, tiny")
    expect(section.get_by_role("listitem").nth(1)).to_have_text("w-1: 100 s ago, tiny")
    expect(section).to_contain_text("and 5 more")
    gateway.state = told(QUEUE, FLEET, left[1:2])
    expect(section.get_by_role("listitem")).to_have_text(["w-1: 100 s ago, tiny"])
    expect(desk.page.locator("#more-departed")).to_be_hidden()
    gateway.state = told(QUEUE, FLEET)
    expect(section).to_be_hidden()


def test_the_tenants_of_which_most_waits_are_shown_where_there_are_several(desk: Visit, gateway: Gateway) -> None:
    section = desk.page.locator("#tenants")
    one, other = (
        queue_pb2.TenantWaiting(tenant=name, requests=requests, bytes=1_900_000)
        for name, requests in (("<b>evil</b>", 1436), ("good", 1))
    )
    gateway.state = told(queue_pb2.StatsResponse(tenants=[one, other]), FLEET)
    expect(section.locator("tbody tr")).to_have_text(["<b>evil</b>1,4361.9", "good11.9"])
    gateway.state = told(queue_pb2.StatsResponse(tenants=[one]), FLEET)
    expect(section).to_be_hidden()


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
