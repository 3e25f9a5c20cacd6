"""The report in a real browser: dark and light, on a desk and on a phone, without a network."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from report_rig import completed_run, pending_run, report, running_run

DESK, PHONE = 1280, 390
# WCAG 2.1, level AA, for text of ordinary size.
LEAST_CONTRAST = 4.5
# Each text with its contrast to what is behind it: backgrounds of its ancestors, one over the other.
CONTRASTS = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const channels = color => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = rgb => rgb.slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const color = channels(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
    return channels(matchMedia('(prefers-color-scheme: dark)').matches ? 'black' : 'white');
  };
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.textContent.trim(), element = texts.currentNode.parentElement;
    if (!text || !element.checkVisibility() || element.closest('script, style')) continue;
    const style = getComputedStyle(element);
    const color = channels(element.namespaceURI.endsWith('svg') ? style.fill : style.color);
    const [high, low] = [luminance(color), luminance(behind(element))].sort((a, b) => b - a);
    found.push([text, (high + 0.05) / (low + 0.05)]);
  }
  return found;
}"""
# Of each visible plot: its size, the height of its smallest letters, and the colors of its lines.
PLOTS = """() => [...document.querySelectorAll('figure.card svg')].filter(svg => svg.checkVisibility()).map(svg => {
  const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
  const letters = [...svg.querySelectorAll('text')].map(text => parseFloat(getComputedStyle(text).fontSize) * scale);
  const lines = [...svg.querySelectorAll('path')].map(path => getComputedStyle(path).stroke);
  return {width: box.width, height: box.height, letters: Math.min(...letters), lines, words: letters.length};
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The distribution's Chromium; where the tests on a real Slurm are required, so is this."""
    chromium = shutil.which("chromium")
    if chromium is None:
        reason = "needs the package chromium"
        pytest.fail(reason) if os.environ.get("TORCHRELAY_REQUIRE_SLURM") else pytest.skip(reason)
    with sync_playwright() as playwright:
        # Without its sandbox, which root cannot use: the page is our own.
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(params=[("light", DESK), ("dark", DESK), ("light", PHONE), ("dark", PHONE)], ids=str)
def window(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page that records its requests and its errors."""
    scheme, width = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.errors, page.requests = [], []  # type: ignore[attr-defined]
    page.on("console", lambda message: page.errors.append(message.text))
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("request", lambda request: page.requests.append(request.url))
    yield page
    context.close()


def look(page: Any, path: Path) -> list[dict[str, Any]]:
    """Open a page, assert what holds for each, and return its plots."""
    page.goto(path.as_uri())
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith("data:")] == [path.as_uri()]
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") == width, "it scrolls sideways"
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 10
    assert [found for found in contrasts if found[1] < LEAST_CONTRAST] == []
    plots: list[dict[str, Any]] = page.evaluate(PLOTS)
    for plot in plots:
        assert plot["width"] > 0.7 * min(width, 560)
        assert plot["height"] > 200
        assert plot["words"] > 6
        assert plot["letters"] > 9
        assert len(set(plot["lines"])) > 2
    return plots


def test_page_of_a_run(window: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plots = look(window, report(capsys, completed_run(tmp_path / "r").path).path)
    assert len(plots) == 4, "each is shown once"
    images = window.evaluate(
        "[...document.images].map(image => image.naturalWidth * image.getBoundingClientRect().width)"
    )
    assert len(images) == 2
    assert all(images)


def test_page_of_a_pending_run(window: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert look(window, report(capsys, pending_run(tmp_path / ("r" * 100)).path).path) == []


def test_comparison(window: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        completed_run(tmp_path / "first"),
        running_run(tmp_path / ("x" * 100), loss=3.0),
        pending_run(tmp_path / "p"),
    ]
    plots = look(window, report(capsys, *[run.path for run in runs]).path)
    assert len(plots) == 4
    window.set_viewport_size({"width": 700, "height": 900})
    assert window.evaluate("document.documentElement.scrollWidth") == 700


def test_colors_follow_dark_and_light(browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = report(capsys, completed_run(tmp_path / "r").path).path
    colors = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(path.as_uri())
        colors[scheme] = {color for plot in page.evaluate(PLOTS) for color in plot["lines"]} - {"none"}
        page.close()
    assert colors["light"]
    assert colors["light"].isdisjoint(colors["dark"])
