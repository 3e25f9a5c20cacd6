"""The report in a real browser: dark and light, on a desk and on a phone, printed, pointed at, without a network."""

import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from support.browser import DRAWN, wait_until
from support.reported_runs import complete, completed_run, pending_run, report, running_run, spec_of

from hpc.base.files import append_json_line

DESK, PHONE = 1280, 390
FIGURES = 5
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
    return channels(matchMedia('screen and (prefers-color-scheme: dark)').matches ? 'black' : 'white');
  };
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.textContent.trim(), element = texts.currentNode.parentElement;
    if (!text || !element.checkVisibility() || element.closest('script, style')) continue;
    const style = getComputedStyle(element);
    const color = channels(style.color);
    const [high, low] = [luminance(color), luminance(behind(element))].sort((a, b) => b - a);
    found.push([text, (high + 0.05) / (low + 0.05)]);
  }
  return found;
}"""
# What reaches beyond the right side of the window, and does not scroll in a box of its own.
CUT_OFF = """() => [...document.body.querySelectorAll('*')]
  .filter(element => element.checkVisibility() && !element.closest('.scroll, script'))
  .filter(element => element.getBoundingClientRect().right > innerWidth).map(element => element.outerHTML)"""
# Finds tables that do not fit into their boxes.
SCROLLING = """() => [...document.querySelectorAll('.scroll')]
  .filter(box => box.scrollWidth > box.clientWidth).map(box => box.ariaLabel)"""
# What the lines and strips of the first figure show now, and the range of its x axis.
SHOWN = """() => {
  const {renderers, x_range, below} = Bokeh.documents[0].roots()[0];
  const fields = renderers.map(({name, glyph}) => [name, (glyph.x ?? glyph.x0).field, glyph.y?.field]);
  return {fields, range: [x_range.start, x_range.end], label: below[0].axis_label};
}"""
# Where a value of the x axis of the first figure is in the window.
PLACE = """value => {
  const {frame, el} = Bokeh.index.get_one(Bokeh.documents[0].roots()[0]), box = el.getBoundingClientRect();
  return [box.x + frame.x_scale.compute(value), box.y + frame.bbox.y + frame.bbox.height / 2];
}"""
# More settings than have room as columns.
MANY = {"lr": 0.25, "mixup": 0.2, "label_smoothing": 0.1, "optimizer": "adamw", "weight_decay": 0.3, "image_size": 224}


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[..., Browser]]:
    """Starts the distribution's Chromium; where the tests on a real Slurm are required, so is this."""
    chromium = shutil.which("chromium")
    if chromium is None:
        reason = "needs the package chromium"
        pytest.fail(reason) if os.environ.get("TORCHRELAY_REQUIRE_SLURM") else pytest.skip(reason)
    with sync_playwright() as playwright:
        # Without its sandbox, which root cannot use: the page is our own.
        yield lambda *flags: playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", *flags])


@pytest.fixture(scope="module")
def browser(launch: Callable[..., Browser]) -> Iterator[Browser]:
    started = launch()
    yield started
    started.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a complete run."""
    return report(completed_run(tmp_path_factory.mktemp("whole") / "r").path).path


# Colors do not depend on the width.
@pytest.fixture(params=[("light", PHONE), ("dark", DESK)], ids=str)
def window(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page that records its requests and its errors."""
    scheme, width = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.errors, page.requests = [], []  # type: ignore[attr-defined]
    # Bokeh says when it is ready.
    page.on("console", lambda message: message.type == "info" or page.errors.append(message.text))
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("request", lambda request: page.requests.append(request.url))
    yield page
    context.close()


def luminance(pixel: tuple[int, int, int]) -> float:
    red, green, blue = ((c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for c in (v / 255 for v in pixel))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ground_and_contrast(page: Any) -> tuple[float, float]:
    """Of the first figure as it is seen: the luminance of its background, and the contrast of the letters below it."""
    image = Image.open(io.BytesIO(page.locator("#plot-0").screenshot())).convert("RGB")
    pixels = list(image.crop((0, image.height - 45, image.width, image.height)).get_flattened_data())
    ground = luminance(Counter(pixels).most_common(1)[0][0])
    ratios = [(max(ground, one) + 0.05) / (min(ground, one) + 0.05) for one in map(luminance, set(pixels))]
    return ground, max(ratios)


def open_page(page: Any, path: Path) -> None:
    page.goto(path.as_uri())
    wait_until(page, DRAWN)


def pointed_at(page: Any, value: float, text: str) -> Any:
    """What the first figure shows, with this text, where one points at a value of its x axis."""
    page.locator("#plot-0").scroll_into_view_if_needed()
    page.mouse.move(*page.evaluate(PLACE, value))
    tip = page.locator(".bk-Tooltip").filter(has_text=text)
    tip.wait_for()
    return tip


def look(page: Any, path: Path) -> int:
    """Open a page, assert what holds for each, and return how many figures it has."""
    open_page(page, path)
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith("data:")] == [path.as_uri()]
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") == width, "it scrolls sideways"
    assert page.evaluate(CUT_OFF) == []
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 10
    assert [found for found in contrasts if found[1] < LEAST_CONTRAST] == []
    plots = range(page.locator(".plot").count())
    sizes = [page.locator(f"#plot-{number} canvas").first.bounding_box() for number in plots]
    assert all(size["width"] > 0.7 * min(width, 560) and size["height"] > 200 for size in sizes)
    return len(sizes)


def test_page_of_a_run(window: Page, whole: Path) -> None:
    assert look(window, whole) == FIGURES
    ground, contrast = ground_and_contrast(window)
    is_dark = window.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert ground < 0.1 if is_dark else ground > 0.9
    assert contrast > LEAST_CONTRAST
    shown = window.evaluate("[...document.images].map(one => one.naturalWidth * one.getBoundingClientRect().width)")
    assert len(shown) == 1
    assert all(shown)


@pytest.mark.slow
def test_comparison(window: Page, tmp_path: Path) -> None:
    runs = [
        completed_run(tmp_path / "first"),
        running_run(tmp_path / ("x" * 100), loss=3.0, spec=spec_of("x" * 100, **MANY, data=f"/data/{'deep/' * 40}")),
        pending_run(tmp_path / "p"),
    ]
    assert look(window, report(*[run.path for run in runs]).path) == FIGURES
    assert window.evaluate(SCROLLING) == []
    window.set_viewport_size({"width": 700, "height": 900})
    assert window.evaluate("document.documentElement.scrollWidth") == 700


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page on a desk."""
    context = browser.new_context(viewport={"width": DESK, "height": 900}, color_scheme="light")
    yield context.new_page()
    context.close()


@pytest.mark.slow
def test_paper_is_light_and_cuts_nothing_off(page: Page, tmp_path: Path) -> None:
    runs = [completed_run(tmp_path / "first"), running_run(tmp_path / ("x" * 60), spec=spec_of("x" * 60, **MANY))]
    page.emulate_media(color_scheme="dark", media="print")
    page.set_viewport_size({"width": 718, "height": 1000})  # A4 with Chromium's margins
    for shown in (runs[:1], runs):
        open_page(page, report(*[run.path for run in shown]).path)
        assert page.evaluate(CUT_OFF.replace(".scroll, ", "")) == []
        assert ground_and_contrast(page)[0] > 0.9
        assert [found for found in page.evaluate(CONTRASTS) if found[1] < LEAST_CONTRAST] == []


@pytest.mark.slow
def test_a_line_shows_its_values_where_one_points_at_it_and_no_other_script_runs(page: Page, whole: Path) -> None:
    open_page(page, whole)
    tip = pointed_at(page, 300, "training")
    name, loss, step, *_ = tip.locator(".bk-tooltip-row-value").all_inner_texts()
    assert name == "training"
    lines = map(json.loads, (whole.parents[1] / "metrics/train.jsonl").read_text().splitlines())
    assert float(loss) == pytest.approx({line["step"]: line["loss"] for line in lines}[int(step)], abs=1e-4)
    page.evaluate("""() => {
      const script = document.createElement("script"), image = document.createElement("img");
      script.textContent = "hit = 1";
      image.setAttribute("onerror", "hit = 2");
      document.body.append(script, image);
      image.dispatchEvent(new Event("error"));
    }""")
    assert page.evaluate("typeof hit") == "undefined"


@pytest.mark.slow
def test_what_one_points_at_is_text_whatever_it_is_called(page: Page, tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)><b>@step"
    runs = [running_run(tmp_path / name), running_run(tmp_path / "other", loss=9.0)]
    line = {"step": 402, name: 1.0}
    append_json_line(runs[0].train_metrics, {**json.loads(runs[0].train_metrics.read_text().splitlines()[-1]), **line})
    open_page(page, report(*[run.path for run in runs]).path)
    assert pointed_at(page, 300, name).locator("img, b").count() == 0


@pytest.mark.slow
def test_interruptions_say_what_they_were_and_the_axis_is_chosen_for_all_figures(page: Page, whole: Path) -> None:
    open_page(page, whole)
    find = "name => Bokeh.documents[0].roots()[0].renderers.find(one => one.name === name).data_source.data"
    strips = page.evaluate(find, "interruptions")
    assert (strips["step_from"], strips["step_to"]) == ([118, 210], [120, 210])
    assert strips["color"][0] != strips["color"][1], "a crash has another color than a preemption"
    page.select_option("[data-control=axis]", "time")
    middle = (strips["time_from"][1] + strips["time_to"][1]) / 2
    pointed_at(page, middle, "#2 preempted at step 210: 1 min 18 s, 0 steps")
    labels = {}
    for axis, largest in (("step", 400), ("time", 8.3), ("epoch", 4)):
        page.select_option("[data-control=axis]", axis)
        shown = page.evaluate(SHOWN)
        labels[axis] = shown["label"]
        assert {field.removesuffix("_from") for _, field, _ in shown["fields"]} == {axis}
        assert shown["range"][1] == pytest.approx(1.02 * largest, rel=0.01)
    assert labels == {"step": "step", "time": "minutes since the start", "epoch": "epoch"}


@pytest.mark.slow
def test_a_zoomed_page_stays_and_another_reloads_itself(page: Page, tmp_path: Path) -> None:
    run = running_run(tmp_path / "r")
    path = report(run.path).path
    page.clock.install()
    open_page(page, path)
    page.select_option("[data-control=axis]", "epoch")
    whole = page.evaluate(SHOWN)["range"]
    page.locator("#plot-0").scroll_into_view_if_needed()
    page.mouse.move(*page.evaluate(PLACE, 1.0))
    page.mouse.down()
    page.mouse.move(*page.evaluate(PLACE, 2.0), steps=5)
    page.mouse.up()
    wait_until(page, f"Bokeh.documents[0].roots()[1].x_range.end < {whole[1]}")
    assert page.evaluate(SHOWN)["range"] == pytest.approx([1.0, 2.0], abs=0.05)
    complete(run)
    report(run.path)
    page.clock.fast_forward(31_000)
    assert page.locator(".pill").inner_text() == "running", "the reader is looking at something"
    page.evaluate("Bokeh.documents[0].roots()[0].reset.emit()")
    wait_until(page, f"Bokeh.documents[0].roots()[1].x_range.end === {whole[1]}")
    with page.expect_navigation():
        page.clock.fast_forward(31_000)
    assert page.locator(".pill").inner_text() == "completed"
    wait_until(page, DRAWN)
    assert page.evaluate(SHOWN)["label"] == "epoch", "what was chosen stays"


@pytest.mark.slow
def test_runs_are_sorted_by_any_column(page: Page, tmp_path: Path) -> None:
    runs = [completed_run(tmp_path / "b")]
    runs += [running_run(tmp_path / name, spec=spec_of(name, lr=lr)) for name, lr in (("c", 0.9), ("a", 0.85))]
    open_page(page, report(*[run.path for run in runs]).path)
    orders = []
    settings = ("Settings that differ", "lr")
    for region, title in [("Results", "run")] * 2 + [settings] * 2 + [("Results", "test accuracy")]:
        results = page.get_by_role("region", name=region)
        results.get_by_role("button", name=title, exact=True).click()
        orders.append("".join(results.locator("tbody th").all_inner_texts()).replace("\n", ""))
    assert orders == ["cba", "abc", "bca", "acb", "bac"]


@pytest.mark.slow
def test_without_javascript_figures_are_described(launch: Callable[..., Browser], whole: Path) -> None:
    # Playwright's own switch leaves <noscript> out, and so does its search for text.
    browser = launch("--blink-settings=scriptEnabled=false")
    page = browser.new_page()
    page.goto(whole.as_uri())
    assert page.locator("noscript .notes").is_visible()
    assert page.locator("noscript p").filter(visible=True).count() == 1 + FIGURES
    assert not page.locator(".controls").is_visible()
    browser.close()
