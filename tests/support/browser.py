"""Debian's Chromium for tests of pages: whatever a page complains of, or asks of another host, fails its test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")

PATIENCE_MS = 30_000
"""For a fact to become true on a busy machine."""


@contextmanager
def browser() -> Iterator[Browser]:
    """Yield a headless browser; skips the tests where none is installed."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        # Root, which containers and CI run as, has no sandbox; /dev/shm is small there.
        flags = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        launched = playwright.chromium.launch(executable_path=path, args=flags)
        try:
            yield launched
        finally:
            launched.close()


@dataclass
class Visit:
    """One page and what went wrong on it."""

    page: Page
    host: str
    expected: list[str] = field(default_factory=list)
    """Parts of complaints that the test brings about."""
    complaints: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    def heard(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)

    def asked(self, request: Request) -> None:
        # What is before the @ is a name and a password.
        if urlsplit(request.url).netloc.rpartition("@")[2] != self.host.rpartition("@")[2]:
            self.strangers.append(request.url)

    def check(self) -> None:
        """Fail for anything that was not expected."""
        assert not [c for c in self.complaints if not any(part in c for part in self.expected)]
        assert not self.strangers

    def picture(self, path: Path) -> None:
        """Keep a picture of the whole page."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.evaluate("scrollTo(0, 0)")
        self.page.screenshot(path=path, full_page=True)


@contextmanager
def visit(
    launched: Browser,
    address: str,
    path: str = "/",
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
    password: str = "",
) -> Iterator[Visit]:
    """Open a page in a context of its own, and check it when leaving; `password` is given where one is asked for."""
    context = launched.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
        http_credentials={"username": "me", "password": password} if password else None,
    )
    context.set_default_timeout(PATIENCE_MS)
    try:
        page = context.new_page()
        made = Visit(page, address)
        page.on("console", made.heard)
        page.on("pageerror", lambda error: made.complaints.append(str(error)))
        page.on("request", made.asked)
        page.goto(f"http://{address}{path}")
        yield made
        made.check()
    finally:
        context.close()
