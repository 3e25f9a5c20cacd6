"""The report in a real browser: dark and light, on a desk and on a phone, pointed at, without a network."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page
from support.browser import DRAWN, chromium, open_quietly, wait_until
from support.reported_runs import completed_run, pending_run, report, running_run, spec_of

from hpc.base.files import append_json_line

DESK, PHONE = 1280, 390
FIGURES = 5
# What reaches beyond the right side of the window, and does not scroll in a box of its own.
CUT_OFF = """() => [...document.body.querySelectorAll('*')]
  .filter(element => element.checkVisibility() && !element.closest('.scroll, script'))
  .filter(element => element.getBoundingClientRect().right > innerWidth).map(element => element.outerHTML)"""
# Finds tables that do not fit into their boxes.
SCROLLING = """() => [...document.querySelectorAll('.scroll')]
  .filter(box => box.scrollWidth > box.clientWidth).map(box => box.ariaLabel)"""
# Where a value of the x axis of the first figure is in the window.
PLACE = """value => {
  const {frame, el} = Bokeh.index.get_one(Bokeh.documents[0].roots()[0]), box = el.getBoundingClientRect();
  return [box.x + frame.x_scale.compute(value), box.y + frame.bbox.y + frame.bbox.height / 2];
}"""
# More settings than have room as columns.
MANY = {"lr": 0.25, "mixup": 0.2, "label_smoothing": 0.1, "optimizer": "adamw", "weight_decay": 0.3, "image_size": 224}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a complete run."""
    return report(completed_run(tmp_path_factory.mktemp("whole") / "r").path).path


# Colors do not depend on the width.
@pytest.fixture(params=[("light", PHONE), ("dark", DESK)], ids=str)
def window(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page on a phone or on a desk."""
    scheme, width = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    yield context.new_page()
    context.close()


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
    open_quietly(page, path)
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") == width, "it scrolls sideways"
    assert page.evaluate(CUT_OFF) == []
    plots = range(page.locator(".plot").count())
    sizes = [page.locator(f"#plot-{number} canvas").first.bounding_box() for number in plots]
    assert all(size["width"] > 0.7 * min(width, 560) and size["height"] > 200 for size in sizes)
    return len(sizes)


def test_page_of_a_run(window: Page, whole: Path) -> None:
    assert look(window, whole) == FIGURES
    image = Image.open(io.BytesIO(window.locator("#plot-0").screenshot())).convert("L")
    [(_, ground), *_] = sorted(image.getcolors(), reverse=True)
    is_dark = window.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert ground < 64 if is_dark else ground > 192


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
    assert pointed_at(page, 3, name).locator("img, b").count() == 0


@pytest.mark.slow
def test_interruptions_say_what_they_were(page: Page, whole: Path) -> None:
    open_page(page, whole)
    find = "name => Bokeh.documents[0].roots()[0].renderers.find(one => one.name === name).data_source.data"
    strips = page.evaluate(find, "interruptions")
    assert (strips["start"], strips["end"]) == ([118, 210], [120, 210])
    assert strips["color"][0] != strips["color"][1], "a crash has another color than a preemption"
    pointed_at(page, 119, "#1 crashed at step 120: 10 s, 2 steps")
