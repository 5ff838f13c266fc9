"""Which requests the console answers, and that its page can be read."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from services.gateway.console.guard import check_host, check_same_origin, host_name
from services.gateway.problem import Problem
from services.gateway.recent import MOST_RECENT, Recent

PAGE = files("services.gateway.console") / "page"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:7415", "10.1.2.3", "[::1]:7415", "localhost:7415", "a.localhost", "Fleet.Example:80", "fleet.example."],
)
def test_hosts_that_are_answered(host: str) -> None:
    check_host({"host": host}, {"fleet.example"})


@pytest.mark.parametrize(
    "host", ["", "evil.example", "fleet.example.evil.example", "127.0.0.1.evil.example", "localhost.evil.example"]
)
def test_hosts_that_are_refused(host: str) -> None:
    with pytest.raises(Problem) as refused:
        check_host({"host": host}, {"fleet.example"})
    assert refused.value.status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://h:1"},
        {"origin": "https://h:1"},
        {"origin": "http://h:1", "sec-fetch-site": "same-origin"},
    ],
)
def test_pages_of_this_host_may_act(headers: dict[str, str]) -> None:
    check_same_origin({"host": "h:1", **headers})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": ""},
        {"origin": "null"},
        {"origin": "h:1"},
        {"origin": "ftp://h:1"},
        {"origin": "http://h:2"},
        {"origin": "http://other:1"},
        {"origin": "http://h:1", "sec-fetch-site": "same-site"},
        {"origin": "http://h:1", "sec-fetch-site": "none"},
        {"origin": "http://", "host": ""},
    ],
)
def test_pages_of_others_may_not(headers: dict[str, str]) -> None:
    with pytest.raises(Problem) as refused:
        check_same_origin({"host": "h:1", **headers})
    assert refused.value.status == 403


def test_the_name_of_a_host() -> None:
    assert [host_name(host) for host in ("A.b:1", "[::1]:2", "[::1]", "1.2.3.4", "")] == [
        "a.b",
        "::1",
        "::1",
        "1.2.3.4",
        "",
    ]


# ---- the page ----


def colours() -> dict[str, dict[str, str]]:
    """Return the colours of the style sheet by scheme and name."""
    light, dark = re.findall(r":root \{(.*?)\}", (PAGE / "console.css").read_text(), re.DOTALL)
    return {
        scheme: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", text))
        for scheme, text in (("light", light), ("dark", dark))
    }


def luminance(colour: str) -> float:
    """Return the relative luminance of "#rrggbb", as WCAG 2 defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read(scheme: str) -> None:
    found = colours()[scheme]
    grounds = [found["ground"], found["card"]]
    for ground in grounds:
        for name in ("text", "quiet", "link", "good", "warn", "bad"):
            assert contrast(found[name], ground) >= 4.5, (name, ground)
    assert contrast(found["link"], found["track"]) >= 4.5, "a button under the pointer"
    assert contrast(found["bad"], found["bad-ground"]) >= 4.5
    for place in range(6):
        assert contrast(found[f"c{place}"], found["track"]) >= 3, f"bar c{place}"
        assert contrast(found[f"c{place}"], found["card"]) >= 3, f"bar c{place}"


def test_the_page_is_its_own() -> None:
    for name in ("index.html", "console.css", "console.js", "icon.svg"):
        text = (PAGE / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE), f"{name} names another host"
    html = (PAGE / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", html), "the content policy forbids it"
    script = (PAGE / "console.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|\.style\b", script)


def test_what_was_asked_lately_is_bounded() -> None:
    recent = Recent()
    for number in range(MOST_RECENT + 10):
        recent.began(f"r{number}", "/v1/completions", "m", "")
    recent.ended("r0", 200)
    recent.ended(f"r{MOST_RECENT}", 200)
    recent.began("r20", "/v1/completions", "m", "")
    asked = recent.latest_first()
    assert len(asked) == MOST_RECENT
    assert (asked[0].request_id, asked[0].status) == ("r20", 0)
    assert {a.request_id: a.status for a in asked}[f"r{MOST_RECENT}"] == 200
