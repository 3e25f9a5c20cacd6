"""What the test of a run showed: accuracy by class, confusion, sample predictions. Pure; runs on the login node."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from hpc.report import parts
from hpc.report.gather import RunRecord
from hpc.report.markup import Markup, join, tag, void
from hpc.report.write import number, percent, text

# More classes than this nobody reads as a matrix, and a thousand would make a page of a million cells.
_MOST_CLASSES, _MOST_LISTED = 30, 20
_KINDS = {
    "even": ("An even sample", "Spread evenly over the test set, right or wrong."),
    "mistake": ("The surest mistakes", "The wrong answers that the model gave the highest probability."),
}


def test_section(record: RunRecord) -> Markup | None:
    """Everything about the test, if there was one."""
    if record.confusion is None:
        return None
    classes, images = len(record.classes), int(record.classes["images"].sum())
    return parts.section(
        "Test",
        tag("div", _classes(record.classes), _confusion(record.confusion), class_="grid"),
        tag("div", *_samples(record.samples), class_="grid") if record.samples else None,
        intro=f"The final model on all {images:,} images of the test set, of {classes:,} classes.",
    )


def _classes(classes: pd.DataFrame) -> Markup:
    """The accuracy of each class, the worst first; of many classes only the worst."""
    shown = classes.sort_values("accuracy").head(len(classes) if len(classes) <= _MOST_CLASSES else _MOST_LISTED)
    rows = [
        [
            name,
            tag("span", percent(accuracy), class_="meter", style=f"--share:{0 if pd.isna(accuracy) else accuracy:.4f}"),
            number(images),
            f"{text(other)} ({number(count)})" if count else text(None),
        ]
        for name, images, _, accuracy, other, count in shown.itertuples(index=False)
    ]
    title = "Accuracy by class" if len(shown) == len(classes) else f"The {len(shown)} classes with the lowest accuracy"
    header = ("class", "accuracy", "images", "mostly taken for")
    return parts.card(parts.table(title, header, rows, left=("class", "mostly taken for")), title=title)


def _confusion(confusion: pd.DataFrame) -> Markup:
    """The whole matrix; of many classes the pairs that were confused most often."""
    return _matrix(confusion) if len(confusion) <= _MOST_CLASSES else _pairs(confusion)


def _matrix(confusion: pd.DataFrame) -> Markup:
    names, counts = list(confusion.index), confusion.to_numpy()
    corner = tag("th", "true class", scope="col")
    head = tag("tr", corner, *(tag("th", tag("span", name), scope="col") for name in names))
    body = [
        tag("tr", tag("th", name, scope="row"), *(_cell(counts, place, column) for column in range(len(names))))
        for place, name in enumerate(names)
    ]
    drawn = tag("table", tag("thead", head), tag("tbody", *body), class_="matrix")
    return parts.card(
        parts.scrolled("Confusion matrix", drawn),
        tag("p", "Rows are what the images are, columns what they were taken for.", class_="soft"),
        title="Confusion matrix",
    )


def _cell(counts: Any, row: int, column: int) -> Markup:
    count, total = int(counts[row, column]), int(counts[row].sum())
    share = count / total if total else 0.0
    # By the root, mistakes of a few percent can be seen.
    strength = 45 * share if row == column else min(45.0, 75 * share**0.5)
    return tag(
        "td",
        f"{count:,}" if count else Markup("<span>0</span>"),
        class_="right" if row == column else "wrong",
        style=f"--strength:{strength:.0f}%",
    )


def _pairs(confusion: pd.DataFrame) -> Markup:
    flat = [
        (int(count), true, predicted)
        for place, (true, row) in enumerate(zip(confusion.index, confusion.to_numpy(), strict=True))
        for column, (predicted, count) in enumerate(zip(confusion.columns, row, strict=True))
        if place != column and count
    ]
    most = sorted(flat, key=lambda pair: -pair[0])[:_MOST_LISTED]
    rows = [[true, predicted, number(count)] for count, true, predicted in most]
    title = "The pairs that were confused most often"
    return parts.card(
        parts.table(title, ("true class", "taken for", "images"), rows, left=("true class", "taken for")),
        tag("p", "The whole matrix is in final/confusion.csv.", class_="soft"),
        title=title,
    )


def _samples(samples: Sequence[dict[str, Any]]) -> list[Markup]:
    """The sample predictions, those of each kind together."""
    cards = []
    for kind, (title, meaning) in _KINDS.items():
        chosen = [sample for sample in samples if sample["kind"] == kind]
        if chosen:
            shown = tag("div", *map(_sample, chosen), class_="samples")
            cards.append(parts.card(tag("p", meaning, class_="soft"), shown, title=title))
    return cards


def _sample(sample: dict[str, Any]) -> Markup:
    right = sample["true"] == sample["predicted"]
    verdict = f"{sample['predicted']} {sample['probability']:.1%}"
    told = f"{sample['name']}: {sample['true']}, taken for {verdict}"
    image = void("img", src=f"data:image/png;base64,{sample['png']}", alt=told, title=sample["name"])
    answer = tag("span", ("✓ " if right else "✗ ") + verdict, class_="good" if right else "bad")
    truth = None if right else tag("span", f"is {sample['true']}", class_="soft")
    return tag("figure", image, tag("figcaption", join([answer, truth])))
