"""The console in a browser, with real services behind it."""

from __future__ import annotations

import json
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from playwright.sync_api import Browser, Page, expect

from penstock.openai.bodies import COMPLETIONS_URL
from tests.integration.conftest import SIMULATED_FLAGS
from tests.support.browser import PATIENCE_MS, Visit, browser, visit
from tests.support.fleet import ROOT, Fleet
from tests.support.keyed import Keyfile
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(180),
    pytest.mark.skipif("CONSOLE_TESTS" not in os.environ, reason="a minute of browser: make test-console"),
]

PICTURES = ROOT / "build/console"
LONG = {"max_tokens": 1500, "ignore_eos": True}
SLOW = [*SIMULATED_FLAGS, "--profile", "cpu-tiny", "--num-gpu-blocks-override", "129", "--max-num-seqs", "8"]
"""A worker that takes a real engine's time for its steps."""

DOOMED = ["--engine", "simulated", "--served-model-name", "doomed", "--profile", "cpu-tiny"]
"""One that a test kills under its request."""

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def launched() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def fleet(launched: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two workers of one model and a gateway; a request has one attempt."""
    made = Fleet(tmp_path_factory.mktemp("console"), queue_flags=["--max-attempts", "1"])
    try:
        made.start_core()
        for name in ("w1", "w2"):
            made.add_worker(name, SLOW, wait=False)
        made.add_worker("doomed", DOOMED, wait=False)
        flags = ["--queue-address", made.queue.address, "--scheduler-address", made.scheduler.address]
        made.add("gateway", flags).start()
        for name in ("w1", "w2", "doomed"):
            made.services[f"worker-{name}"].wait_ready()
        yield made
    finally:
        made.close()


def call(fleet: Fleet, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Return status and JSON of one HTTP request to the gateway, without a browser."""
    fields = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    data = None if body is None else json.dumps(body).encode()
    url = f"http://{fleet.services['gateway'].address}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, fields, method=method), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def state(fleet: Fleet) -> Any:
    return call(fleet, "GET", "/console/state")[1]


def finished(fleet: Fleet, **fields: Any) -> str:
    """Have one request answered; return its id."""
    body = {"model": "tiny", "prompt": "the river " * 20, "max_tokens": 40, "ignore_eos": True, **fields}
    status, answer = call(fleet, "POST", COMPLETIONS_URL, body)
    assert status == 200, answer
    return str(answer["id"]).removeprefix("cmpl-")


@contextmanager
def load(fleet: Fleet, askers: int = 20) -> Iterator[None]:
    """Keep so many clients asking on both channels while the body runs."""
    enough = threading.Event()

    def ask(number: int) -> None:
        body = {"model": "tiny", "prompt": f"{number} " * 40, "max_tokens": 30 + 6 * number, "ignore_eos": True}
        while not enough.is_set():
            call(fleet, "POST", COMPLETIONS_URL, body, x_penstock_channel=("batch", "interactive")[number % 3 // 2])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(askers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        enough.set()
        for thread in threads:
            thread.join()


@pytest.fixture
def desk(launched: Browser, fleet: Fleet) -> Iterator[Visit]:
    """The console on a desk."""
    with visit(launched, fleet.services["gateway"].address) as made:
        expect(made.page.locator("#connection")).to_have_text("live")
        yield made


def card(page: Page, worker: str) -> Any:
    return page.get_by_role("listitem").filter(has=page.get_by_role("heading", name=worker, exact=True))


def test_numbers_move(desk: Visit, fleet: Fleet, launched: Browser) -> None:
    page = desk.page
    address = fleet.services["gateway"].address
    channels = page.get_by_role("table").filter(has_text="blocks held")
    with load(fleet):
        for channel in ("batch", "interactive"):
            row = channels.get_by_role("row").filter(has=page.get_by_role("rowheader", name=channel))
            expect(row.locator("[data-part=held]")).to_have_text(re.compile(r"[1-9]"))
            expect(row.locator("[data-part=requests]")).to_have_text(re.compile(r"[1-9]|0\.[1-9]"))
        expect(card(page, "w1").get_by_role("img", name=re.compile(r"^[1-9]\d* of 128 blocks held$"))).to_be_visible()
        expect(page.locator("[data-total=running]")).to_have_text(re.compile(r"[1-9]"))
        expect(card(page, "w2").locator("polyline")).to_have_attribute("points", re.compile(r"\d,\d.* 100,"))
        for dark in (False, True):
            with visit(launched, address, dark=dark) as made:
                expect(made.page.locator("[data-total=running]")).to_have_text(re.compile(r"[1-9]"))
                made.picture(PICTURES / f"busy-{'dark' if dark else 'light'}.png")
    expect(page.locator("[data-total=running]")).to_have_text("0")
    asked = page.get_by_role("table", name="Asked of this gateway lately").get_by_role("row")
    assert 20 < asked.count() <= 51


def test_a_worker_is_drained_and_undrained(desk: Visit, fleet: Fleet) -> None:
    page = desk.page
    page.get_by_role("button", name="Drain w1").click()
    expect(card(page, "w1").locator(".state")).to_have_text("drained")
    expect(page.locator("#said")).to_have_text("w1 takes no new grants; 0 requests still there.")
    assert {w["name"]: w["state"] for w in state(fleet)["workers"]} == {"w1": "drained", "w2": "up", "doomed": "up"}
    page.get_by_role("button", name="Undrain w1").click()
    expect(card(page, "w1").locator(".state")).to_have_text("up")
    assert {w["name"]: w["state"] for w in state(fleet)["workers"]} == {"w1": "up", "w2": "up", "doomed": "up"}


def test_a_dead_letter_is_requeued(desk: Visit, fleet: Fleet) -> None:
    asking = threading.Thread(
        target=call, args=(fleet, "POST", COMPLETIONS_URL, {"model": "doomed", "prompt": "x", **LONG})
    )
    asking.start()
    wait_for(lambda: any(w["running"] for w in state(fleet)["workers"] if w["name"] == "doomed"), "the request to run")
    fleet.services["worker-doomed"].kill()
    asking.join()
    page = desk.page
    letter = page.get_by_role("region", name="Dead letters").get_by_role("listitem")
    expect(letter).to_have_count(1)
    expect(page.locator("[data-total=dead]")).to_have_text("1")
    desk.picture(PICTURES / "dead-letter-light.png")
    letter.get_by_role("button", name=re.compile("^Timeline of ")).click()
    expect(page.get_by_role("region", name="Timeline")).to_contain_text("dead")
    letter.get_by_role("button", name=re.compile("^Requeue ")).click()
    expect(page.locator("#said")).to_contain_text("waits again, with fresh attempts")
    expect(letter).to_have_count(0)
    expect(page.get_by_text("1 requests wait for the model 'doomed'")).to_be_visible()
    (waiting,) = [asked for asked in state(fleet)["recent"] if asked["model"] == "doomed"]
    assert call(fleet, "GET", f"/v1/requests/{waiting['request_id']}")[1]["status"] == "waiting"
    call(fleet, "DELETE", f"/v1/requests/{waiting['request_id']}")
    expect(page.get_by_text("1 requests wait for the model 'doomed'")).to_have_count(0)


def test_a_batch_and_its_progress(desk: Visit, fleet: Fleet) -> None:
    lines = [
        {"custom_id": str(n), "method": "POST", "url": COMPLETIONS_URL,
         "body": {"model": "tiny", "prompt": "x", "max_tokens": 30, "ignore_eos": True}}
        for n in range(40)
    ]  # fmt: skip
    with OpenAI(base_url=f"http://{fleet.services['gateway'].address}/v1", api_key="none") as client:
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    row = desk.page.get_by_role("region", name="Batches").get_by_role("listitem").filter(has_text=batch.id)
    expect(row.get_by_role("img", name=re.compile(r"^[1-9]\d* of 40 done"))).to_be_visible()
    expect(row.locator("[data-part=status]")).to_have_text("completed")
    expect(row).to_contain_text("40 of 40 done, 0 failed")
    desk.picture(PICTURES / "batch-light.png")


def test_the_timeline_of_a_request(desk: Visit, fleet: Fleet) -> None:
    request_id = finished(fleet)
    page = desk.page
    page.get_by_role("button", name=f"Timeline of {request_id}").click()
    timeline = page.get_by_role("region", name="Timeline")
    parts = timeline.get_by_role("list", name="Parts").get_by_role("listitem")
    expect(parts).to_have_count(6)
    names = ["wait", "grant", "tokenize", "prefill", "decode", "record"]
    assert [text.split()[0] for text in parts.all_inner_texts()] == names
    for text in parts.all_inner_texts():
        assert re.search(r"\d ?m?s$", text), text
    acks = timeline.get_by_role("table").get_by_role("row")
    said = [text.split("\t") for text in acks.all_inner_texts()[1:]]
    assert (said[0][0], said[1][0], said[-1][0], said[-1][2]) == ("grant", "tokenizer ACK", "completion ACK", "0")
    assert all(int(row[2]) > 0 for row in said[:-1])
    expect(timeline).to_contain_text("channel interactive")
    expect(timeline).to_contain_text("40 generated")
    desk.picture(PICTURES / "timeline-light.png")
    desk.expected.append("404")
    page.get_by_label("Timeline of request").fill("no-such-request")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(timeline).to_contain_text("No timeline of no-such-request")


def test_the_keyboard_is_enough(desk: Visit, fleet: Fleet) -> None:
    request_id = finished(fleet)
    page = desk.page
    expect(page.get_by_role("button", name=f"Timeline of {request_id}")).to_be_visible()
    focused = page.locator(":focus")
    page.keyboard.press("Tab")
    expect(focused).to_have_text("Skip to the fleet")
    expect(focused).to_be_in_viewport()
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(focused.evaluate("e => e.getAttribute('aria-label') || e.id || e.textContent"))
        assert focused.evaluate("e => getComputedStyle(e).outlineStyle") == "solid", seen
        if seen[-1] == f"Timeline of {request_id}":
            break
    order = ["Channels", "Drain w1", "Drain w2", "request-id", "Show", f"Timeline of {request_id}"]
    assert [name for name in seen if name in order] == order
    # The list goes on under the focus: more requests come in above it.
    finished(fleet)
    expect(page.get_by_role("table", name="Asked of this gateway lately").get_by_role("row").nth(2)).to_contain_text(
        request_id
    )
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Timeline")).to_be_focused()
    expect(page.get_by_role("region", name="Timeline")).to_contain_text(request_id)
    page.get_by_role("button", name="Drain w2").focus()
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Undrain w2")).to_be_focused()
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Drain w2", exact=True)).to_be_focused()


def test_it_fits_a_phone(launched: Browser, fleet: Fleet) -> None:
    request_id = finished(fleet)
    for dark in (False, True):
        with visit(launched, fleet.services["gateway"].address, width=390, height=844, dark=dark) as made:
            made.page.get_by_role("button", name=f"Timeline of {request_id}").click()
            expect(made.page.get_by_role("list", name="Parts")).to_be_visible()
            widths = made.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert widths == [390, 390]
            made.picture(PICTURES / f"phone-{'dark' if dark else 'light'}.png")


def test_a_service_that_is_away_is_said(desk: Visit, fleet: Fleet) -> None:
    page = desk.page
    for service, peer in ((fleet.queue, "queue"), (fleet.scheduler, "scheduler")):
        service.kill()
        expect(page.get_by_text(f"the {peer} does not answer:")).to_be_visible()
        expect(page.locator("#connection")).to_have_text("live")
        service.start()
        expect(page.get_by_text(f"the {peer} does not answer:")).to_have_count(0)
    expect(card(page, "w1").locator(".state")).to_have_text("up")


def test_with_keys_a_queue_that_is_away_is_said_by_the_page(launched: Browser, tmp_path: Path) -> None:
    """Which is loaded meanwhile, and goes on by itself when somebody can be asked for a key again."""
    keyfile = Keyfile(tmp_path / "keys.toml")
    keyfile.put("ops", 'role = "operator"')
    keyfile.put("fleet", 'role = "service"')
    keyfile.write()
    made = Fleet(tmp_path, {"PENSTOCK_KEYS": str(keyfile.path), "PENSTOCK_KEY": keyfile.keys["fleet"]})
    try:
        made.start_core()
        flags = ["--queue-address", made.queue.address, "--scheduler-address", made.scheduler.address]
        gateway = made.add("gateway", flags)
        gateway.start()
        with visit(launched, gateway.address, password=keyfile.keys["ops"]) as seen:
            said = seen.page.locator("#connection")
            expect(said).to_have_text("live")
            seen.expected += ["status of 503", "status of 401", "net::ERR"]
            for again in (lambda: None, seen.page.reload):
                made.queue.kill()
                again()
                expect(said).to_contain_text("the queue does not answer")
                made.queue.start()
                expect(said).to_have_text("live")
    finally:
        made.close()


def test_a_gateway_that_is_away_is_said(desk: Visit, fleet: Fleet) -> None:
    desk.expected.append("net::ERR")
    gateway = fleet.services["gateway"]
    gateway.kill()
    expect(desk.page.locator("#connection")).to_contain_text("the gateway does not answer")
    gateway.start()
    expect(desk.page.locator("#connection")).to_have_text("live")


def test_a_gateway_that_hangs_is_away(desk: Visit) -> None:
    said = desk.page.locator("#connection")
    expect(said).to_have_text("live")
    desk.page.route("**/console/state", lambda _route: None)
    expect(said).to_contain_text("the gateway does not answer")
    desk.page.unroute("**/console/state")
    expect(said).to_have_text("live")


def test_pages_of_others_are_refused(fleet: Fleet) -> None:
    host = fleet.services["gateway"].address
    body = {"worker": "w1"}
    for headers in (
        {},
        {"origin": "null"},
        {"origin": "http://evil.example"},
        {"origin": f"http://{host}0"},
        {"origin": f"http://{host}", "sec_fetch_site": "cross-site"},
        {"origin": "http://evil.example", "host": "evil.example"},
    ):
        for action in ("drain", "undrain", "requeue"):
            status, answer = call(fleet, "POST", f"/console/{action}", body, **headers)
            assert (status, answer["error"]["code"] in {"cross_origin", "host_not_allowed"}) == (403, True), headers
    for path in ("/", "/console/state", "/console/console.js"):
        assert call(fleet, "GET", path, host="rebound.example:80")[0] == 403
    ours = {"origin": f"http://{host}"}
    assert call(fleet, "POST", "/console/drain", {"worker": 1}, **ours)[0] == 400
    assert call(fleet, "POST", "/console/drain", body, **ours, content_type="text/plain")[0] == 415
    status, answer = call(fleet, "POST", "/console/drain", {"worker": "nobody"}, **ours)
    assert status in {400, 404}
    assert "nobody" in answer["error"]["message"]
    assert {w["state"] for w in state(fleet)["workers"] if w["name"] != "doomed"} == {"up"}
