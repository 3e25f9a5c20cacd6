"""What an evaluation showed, class by class: the confusion matrix and what follows from it, as CSV. Pure."""

import csv
import io

from torch import Tensor


def confusion_csv(confusion: Tensor, classes: tuple[str, ...]) -> str:
    """The confusion matrix with the names of the classes: a row for each true class, a column for each answer."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["true class", *classes])
    writer.writerows([name, *row] for name, row in zip(classes, confusion.tolist(), strict=True))
    return text.getvalue()


def classes_csv(confusion: Tensor, classes: tuple[str, ...]) -> str:
    """A row for each class.

    Its images, those that were recognised and their share (the accuracy, or recall), the share of right ones among
    the answers of this class (precision), the harmonic mean of the two (F1), and what it was mostly taken for instead.
    Empty where there is nothing to divide by.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["class", "images", "correct", "accuracy", "precision", "f1", "mostly taken for", "times"])
    answers = confusion.sum(0).tolist()
    for place, (name, row) in enumerate(zip(classes, confusion.tolist(), strict=True)):
        images, right, answered = sum(row), row[place], answers[place]
        wrong = [0 if column == place else count for column, count in enumerate(row)]
        most = max(wrong)
        shares = _share(right, images), _share(right, answered), _share(2 * right, images + answered)
        writer.writerow([name, images, right, *shares, classes[wrong.index(most)] if most else "", most])
    return text.getvalue()


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.6f}" if whole else ""
