"""The distribution's Chromium, in which tests open reports."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from support.waiting import wait_for

# Bokeh draws in its own time.
DRAWN = "!document.getElementById('plots') || globalThis.Bokeh?.documents[0]?.is_idle"


def wait_until(page: Page, expression: str) -> None:
    """Wait until JavaScript is true. Playwright's own way calls eval in the page, which its security policy forbids."""
    wait_for(lambda: page.evaluate(expression))


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser; where the tests on a real Slurm are required, so is this."""
    path = shutil.which("chromium")
    if path is None:
        reason = "needs the package chromium"
        pytest.fail(reason) if os.environ.get("TORCHRELAY_REQUIRE_SLURM") else pytest.skip(reason)
    with sync_playwright() as playwright:
        # Without its sandbox, which root cannot use: the page is our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_quietly(page: Page, path: Path) -> None:
    """Open a report, which asks nobody for anything and has no error."""
    errors, requests = list[str](), list[str]()
    # Bokeh says when it is ready.
    page.on("console", lambda message: message.type == "info" or errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    wait_until(page, DRAWN)
    assert not errors
    assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]


@contextmanager
def opened(path: Path) -> Iterator[Page]:
    """A report in a window of its own."""
    with chromium() as browser:
        page = browser.new_page()
        open_quietly(page, path)
        yield page
